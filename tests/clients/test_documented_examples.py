"""What the documentation shows works: curl, Python, JavaScript, and the command line's options."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from morph.cli.app import app
from tests.clients.conftest import NAME, Served
from tests.clients.examples import ADDRESS, ROOT, Block, blocks, commands

JS = Path(__file__).parent / "js"
CURL = commands("curl")
PYTHON = [block for block in blocks("python") if NAME in block.code]


def where(block: Any) -> str:
    """Name of a case."""
    return f"{block.file}:{block.line}" if isinstance(block, Block) else ""


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("number", range(len(CURL)), ids=[place for place, _ in CURL])
def test_curl(served: Served, number: int) -> None:
    _, words = CURL[number]
    words = [word.replace(ADDRESS, served.url) for word in words]
    done = subprocess.run([*words, "-sS", "--fail-with-body", "--max-time", "60"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    if "-N" in words:
        events = [line for line in done.stdout.splitlines() if line]
        assert events[-1] == "data: [DONE]" and len(events) > 2
        assert all("choices" in json.loads(event.removeprefix("data: ")) for event in events[:-1])
    else:
        answer = json.loads(done.stdout)
        assert isinstance(answer, dict) and "error" not in answer
        for asked in (json.loads(word) for word in words if word.startswith("{")):
            if "layout" in asked.get("morph", {}):
                assert answer["morph"]["layout"] == {"ssm": "0000", "attention": "1111"}[asked["morph"]["layout"]]


@pytest.mark.parametrize("block", PYTHON, ids=where)
def test_python(served: Served, block: Block, tmp_path: Path) -> None:
    if "langchain" in block.code:
        pytest.importorskip("langchain_openai", reason="needs langchain-openai (extra clients)")
    code = block.code.replace(ADDRESS, served.url).replace(f'LLM("{NAME}")', f"LLM({str(served.folder)!r})")
    # A process of its own, as a reader would run it.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.skipif(not (JS / "node_modules").exists(), reason="needs `npm install --prefix tests/clients/js`")
@pytest.mark.parametrize("block", blocks("js"), ids=where)
def test_javascript(served: Served, block: Block) -> None:
    done = subprocess.run(
        ["node", "--input-type=module", "-e", block.code.replace(ADDRESS, served.url)],
        capture_output=True, text=True, cwd=JS, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()[-1]) <= {"0", "1"} and len(done.stdout.splitlines()[-1]) == 4


def test_the_documentation_has_examples_of_each_kind() -> None:
    assert len(CURL) >= 5 and len(PYTHON) >= 3 and blocks("js") and len(commands("morph")) >= 5


@pytest.mark.parametrize("number", range(len(commands("morph"))), ids=[place for place, _ in commands("morph")])
def test_documented_commands_have_their_options(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = commands("morph")[number][1][1:]
    monkeypatch.chdir(tmp_path)
    # Files that the examples name; the options are looked at, nothing runs.
    for word in words:
        if "." in word and "/" not in word and not word.startswith("-") and "@" not in word:
            Path(word).touch()
    command: Any = typer.main.get_command(app)
    context = command.make_context("morph", list(words), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        arguments = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, arguments)
        context = command.make_context(name, rest, parent=context)
