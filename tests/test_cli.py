"""The command line: help that is quick and shows examples, clear errors, chat, serve and demo."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from morph.cli import main
from morph.cli.app import COMMANDS, app
from morph.cli.display import is_plain, layout_strip, printable
from morph.cli.options import parse_size
from morph.cli.session import ChatSession
from morph.demo.prompts import prompts
from morph.demo.run import run as run_demo
from morph.engine.params import SamplingParams
from morph.errors import CorruptFile, InvalidRequest, ModelNotFound, MorphError
from tests.server.fake import ANSWER, FakeEngine

OWN = ("pull", "info", "chat", "serve", "demo")


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """What every command loads."""
    fake = FakeEngine()
    object.__setattr__(fake.config, "max_context", 16_384)
    monkeypatch.setattr("morph.cli.loading.load_engine", lambda model, config, device="cpu": fake)
    return fake


def feed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in OWN:
        assert f" {name} " in shown
        assert COMMANDS[name][1][:30] in shown


@pytest.mark.parametrize("command", OWN)
def test_the_help_of_each_command_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Example" in shown
    assert f"morph {command} smollm2-135m" in shown


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["pull", "--help"], ["chat", "--help"]])
def test_help_does_not_import_torch(words: list[str]) -> None:
    code = (
        "import sys; from morph.cli import main; status = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn'} & set(sys.modules);"
        "assert not heavy, heavy; sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_python_m_morph_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "morph", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0
    assert "morph" in done.stdout


def test_commands_whose_module_is_missing_are_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "ghost", ("morph.nowhere.cli", "Not there."))
    import typer

    assert "ghost" not in typer.main.get_command(app).commands


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["serve"],
        ["serve", "a", "--model", "b"],
        ["serve", "a", "--port", "x"],
        ["serve", "a", "--port", "70000"],
        ["serve", "a", "--attention-budget", "2"],
        ["serve", "a", "--dtype", "int3"],
        ["chat"],
        ["chat", "a", "--memory", "much"],
        ["--nonsense"],
    ],
)
def test_wrong_usage_is_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelNotFound("no model 'x'; try y"), 2),
        (InvalidRequest("bad"), 2),
        (CorruptFile("cut"), 1),
        (MorphError("m"), 1),
    ],
)
def test_a_morph_error_is_one_line_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: MorphError, status: int
) -> None:
    def fail(model: str, config: Any) -> FakeEngine:
        raise error

    monkeypatch.setattr("morph.cli.loading.load_engine", fail)
    assert main(["chat", "x"]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"morph: {error}\n"
    with pytest.raises(type(error)):
        main(["chat", "x", "--debug"])


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("4GiB", 4 * 2**30), ("512MB", 512 * 10**6), ("1.5g", 1_500_000_000), ("2 KiB", 2048)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_an_answer_that_the_encoding_lacks_is_no_crash() -> None:
    code = (
        "import sys; from tests.server.fake import FakeEngine; import morph.cli.loading as loading; "
        "from morph.cli import main; "
        "loading.load_engine = lambda model, config, device=\"cpu\": FakeEngine(); sys.exit(main(['chat', 'x']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input="Hi\n",
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ANSWER.replace("ö", "?") + "\n"


# ---- chat


def test_piped_chat_writes_answers_to_stdout_and_figures_to_stderr(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(monkeypatch, "Hi\n\nAnd?\n")
    assert main(["chat", "fake", "--temperature", "0", "--system", "Be brief."]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{ANSWER}\n{ANSWER}\n"
    assert captured.err.count("#..#") == 2
    assert "attention 2/4 = 50% (gate, budget 0.5)" in captured.err
    assert "ttft" in captured.err and "tokens/s" in captured.err
    first, second = (bytes(ids).decode() for ids, _ in engine.seen)
    assert first == "[system]Be brief.\n[user]Hi\n[assistant]"
    assert second == f"{first[:-11]}[assistant]{ANSWER}\n[user]And?\n[assistant]"
    assert not engine.alive, "the engine was not stopped"


def test_chat_commands_change_the_next_turns(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(
        monkeypatch,
        "/budget 0.2\na\n/layout ssm\nb\n/reset\n/layout 0110\nc\n/layout\n/budget\n/quit\nnever\n",
    )
    assert main(["chat", "fake"]) == 0
    params = [one for _, one in engine.seen]
    assert [one.attention_budget for one in params] == [0.2, 0.2, 0.2]
    assert [one.layout for one in params] == ["auto", "ssm", "0110"]
    assert bytes(engine.seen[2][0]).decode() == "[user]c\n[assistant]"
    notes = capsys.readouterr().err
    assert "not used while the layout is 0110" in notes


@pytest.mark.parametrize("line", ["/budget 2", "/budget x", "/layout 01", "/layout abcd", "/nonsense"])
def test_a_bad_chat_command_is_exit_code_2_in_a_pipe(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    feed(monkeypatch, f"{line}\n")
    assert main(["chat", "fake"]) == 2
    assert capsys.readouterr().err.startswith("morph: ")
    assert not engine.seen


def test_interactive_chat_goes_on_after_an_error(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from morph.cli import session

    lines = iter(["/budget 7", "x" * 20_000, "Hi", "/quit"])
    monkeypatch.setattr(session, "_read_line", lambda console, interactive: next(lines))
    session.run(ChatSession(engine, SamplingParams()), interactive=True)
    shown = capsys.readouterr().out
    assert "attention_budget" in shown
    assert "the context is 16384" in shown
    assert ANSWER in shown
    assert len(engine.seen) == 1


def test_a_failed_turn_is_not_part_of_the_conversation(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    chat = ChatSession(engine, SamplingParams())
    engine.fail_after = 2
    with pytest.raises(MorphError, match="not finite"):
        asyncio.run(chat.turn("Hi", lambda text: None))
    assert chat.messages == []


def test_near_the_end_of_the_context_the_answer_gets_what_is_left(engine: FakeEngine) -> None:
    import asyncio

    chat = ChatSession(engine, SamplingParams(max_tokens=512))
    asyncio.run(chat.turn("x" * 16_000, lambda text: None))
    ((ids, params),) = engine.seen
    assert params.max_tokens == 16_384 - len(ids)


def test_model_text_cannot_control_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07c\n\td\x9b1m\x7f\r") == "a[31mbc\n\td1m"


# ---- layouts on a screen


def test_a_layout_strip_is_one_cell_per_block() -> None:
    assert layout_strip("101", 3, plain=True).plain == "#.#"
    assert layout_strip(None, 3, plain=True).plain == "???"
    coloured = layout_strip("10", 2, plain=False)
    assert coloured.plain == "█░"
    assert len({span.style for span in coloured.spans}) == 2


def test_output_is_plain_without_a_terminal_or_without_unicode() -> None:
    assert is_plain(Console(file=io.StringIO()))
    ascii_file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert is_plain(Console(file=ascii_file, force_terminal=True))
    utf8_file = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    assert not is_plain(Console(file=utf8_file, force_terminal=True, _environ={"TERM": "xterm"}))


# ---- demo


def test_the_demo_has_prompts_of_many_kinds_and_lengths() -> None:
    lengths = {prompt.kind: len(prompt.messages[-1]["content"]) for prompt in prompts()}
    assert 6 <= len(lengths) <= 8
    assert min(lengths.values()) < 100
    assert 6000 < max(lengths.values()) < 14_000


def test_the_demo_without_a_terminal_prints_lines_a_table_and_what_to_do_next(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.answer = "plain words"
    assert main(["demo", "fake", "--budget", "0.3"]) == 0
    shown = capsys.readouterr().out
    assert shown.isascii()
    for prompt in prompts():
        assert shown.count(prompt.kind) >= 3
    assert "8 requests at the same time" in shown
    assert "make serve" in shown and "curl" in shown and "morph chat fake" in shown
    assert {params.attention_budget for _, params in engine.seen} == {0.3}
    assert not engine.alive


def test_the_demo_of_a_model_without_gates_says_so_and_names_the_layouts(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(FakeEngine, "has_gates", False)
    assert main(["demo", "fake"]) == 0
    assert "no gates yet" in capsys.readouterr().out
    blocks = engine.config.num_blocks
    every_other = "".join("10"[block % 2] for block in range(blocks))
    assert {params.layout for _, params in engine.seen} == {"attention", "ssm", every_other}


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60), (40, 10)])
def test_the_demo_on_a_terminal_draws_panels(width: int, height: int) -> None:
    engine = FakeEngine(delay=0.003)
    object.__setattr__(engine.config, "max_context", 16_384)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=width, height=height, color_system="truecolor")
    tracks = run_demo(engine, prompts(), ["auto"] * len(prompts()), None, console, plain=False)
    assert all(track.finished for track in tracks)
    assert "╭" in file.getvalue() and "█" in file.getvalue()
    assert "8 requests at the same time" in file.getvalue()


def test_a_failing_request_ends_the_demo_with_its_reason(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.fail_after = 2
    assert main(["demo", "fake"]) == 1
    assert "not finite" in capsys.readouterr().err
    assert main(["demo", "fake", "--layout", "01"]) == 2


# ---- pull and info


def test_pull_splits_the_revision_and_prints_the_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    def pull(name: str, **options: Any) -> Path:
        calls.append((name, options))
        return tmp_path

    monkeypatch.setattr("morph.hub.pull", pull, raising=False)
    assert main(["pull", "some-model@r1", "--force", "-q"]) == 0
    assert main(["pull", "some-model"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path)] * 2
    assert calls[0] == ("some-model", {"revision": "r1", "source": "auto", "force": True, "progress": False})
    assert calls[1][1]["revision"] is None
