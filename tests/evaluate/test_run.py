"""An evaluation on a tiny model: what is kept, what goes on after a crash, what is refused, what the figures say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from morph.cli.app import main
from morph.engine.llm import LLM
from morph.errors import CorruptFile, InvalidRequest, MorphError, UnsupportedModel
from morph.evaluate.command import evaluate
from morph.evaluate.metrics import choose
from morph.evaluate.plan import Options
from morph.evaluate.run import fingerprint, run_evaluation
from morph.evaluate.sources import FolderSource
from morph.evaluate.store import Store
from morph.evaluate.summary import summarise
from tests.convert.bases import tiny_base
from tests.evaluate.conftest import write_rows, write_sets
from tests.tiny import tiny_model

LAYOUTS = "attention,ssm,auto:0.5,static:0.5,shuffled:0.5,alternating,nemotron:1,random:0.5,oracle:3,0101"
SETS = ("arc_challenge", "squad_long", "scitldr_long")


@pytest.fixture(scope="module")
def options(roomy_model: Path, data_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Options:
    return Options(
        str(roomy_model),
        suite="six",
        datasets=SETS,
        layouts=LAYOUTS,
        data=data_folder,
        out=tmp_path_factory.mktemp("runs") / "whole",
        limit=5,
        lengths=(200, 350),
        ranking="2,0,3,1",
        dtype="float32",
        group_tokens=600,
    )


@pytest.fixture(scope="module")
def whole(options: Options) -> Any:
    return run_evaluation(options)


def test_every_item_runs_under_every_layout(whole: Any) -> None:
    names = {spec.name for spec in whole.specs}
    assert {"attention", "ssm", "auto:0.5", "static:0.5", "shuffled:0.5", "random:0.5", "chain:2", "0101"} <= names
    for part in whole.parts:
        for spec in whole.specs:
            records = whole.records[part.dataset.name][spec.name]
            assert len(records) == (3 if spec.kind == "chain" else 5)
    layouts = {r["layout"] for r in whole.records["squad_long"]["0101"].values()}
    assert layouts == {"0101"}
    assert {r["layout"] for r in whole.records["squad_long"]["ssm"].values()} == {"0000"}


def test_scores_are_those_of_the_engine_alone(whole: Any, options: Options) -> None:
    llm = LLM(options.model, dtype="float32")
    part = whole.parts[0]
    for item in part.items[:3]:
        record = whole.records["arc_challenge"]["ssm"][item.id]
        alone = llm.score([item.prompt], [[" " + c for c in item.choices]], _layout("ssm"))[0]
        assert record["logprobs"] == pytest.approx([s.logprob for s in alone], abs=1e-3)
        assert record["metrics"]["acc"] == float(choose([s.logprob for s in alone]) == item.gold)


def _layout(name: str) -> Any:
    from morph import SamplingParams

    return SamplingParams(layout=name)


def test_a_second_run_computes_nothing(whole: Any, options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a finished item was run again")

    monkeypatch.setattr(LLM, "score", refuse)
    monkeypatch.setattr(LLM, "generate", refuse)
    again = run_evaluation(options)
    assert again.records == whole.records


def test_a_crash_in_mid_run_keeps_what_was_finished(
    whole: Any, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = replace(options, out=tmp_path / "crash")
    calls = {"left": 4}
    real = LLM.generate

    def dies(self: LLM, *args: Any, **kwargs: Any) -> Any:
        calls["left"] -= 1
        if calls["left"] < 0:
            raise MemoryError("the machine gave up")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(LLM, "generate", dies)
    with pytest.raises(MemoryError):
        run_evaluation(mine)
    kept = sum(len(path.read_text().splitlines()) for path in (mine.out / "items").rglob("*.jsonl"))
    assert kept > 0
    # A line that was being written when the machine died.
    victim = next((mine.out / "items").rglob("*.jsonl"))
    with open(victim, "a") as file:
        file.write('{"id": "a1", "layo')
    monkeypatch.setattr(LLM, "generate", real)
    notes: list[str] = []
    again = run_evaluation(mine, notes.append)
    assert any("cut short" in note for note in notes)
    for name in SETS:
        for layout, records in whole.records[name].items():
            for item, record in records.items():
                other = again.records[name][layout][item]
                assert other["layout"] == record["layout"]
                assert other.get("answer") == record.get("answer")
                assert other["metrics"] == record["metrics"]


def test_more_layouts_can_be_asked_for_later(options: Options, tmp_path: Path) -> None:
    few = replace(options, out=tmp_path / "few", layouts="attention,static:0.5", datasets=("squad_long",), limit=3)
    before = run_evaluation(few)
    target = {r["layout"] for r in before.records["squad_long"]["static:0.5"].values()}
    # With the gates in the run, static spends what they spend: its items are run again where that changes a layout.
    after = run_evaluation(replace(few, layouts="attention,auto:0.5,static:0.5"))
    spent = summarise(after)["sets"]["squad_long"]["layouts"]
    assert spent["static:0.5"]["budget"] == pytest.approx(spent["auto:0.5"]["budget"], abs=0.15)
    assert target


def test_the_gates_see_the_context_only(whole: Any, options: Options) -> None:
    """All choices of an item share the layout of its context alone."""
    llm = LLM(options.model, dtype="float32")
    for item in whole.parts[0].items[:3]:
        from morph import SamplingParams

        alone = llm.generate(item.prompt, SamplingParams(max_tokens=1, attention_budget=0.5))[0]
        assert whole.records["arc_challenge"]["auto:0.5"][item.id]["layout"] == alone.layout


# ---- refusals


def test_a_folder_of_another_model_is_refused(options: Options, whole: Any, tmp_path: Path) -> None:
    other = tiny_model(tmp_path / "other", max_context=1024, intermediate_size=64)
    with pytest.raises(InvalidRequest, match=r"was made with fingerprint .* name another folder"):
        run_evaluation(replace(options, model=str(other)))
    with pytest.raises(InvalidRequest, match="was made with seed 0, this run has 1"):
        run_evaluation(replace(options, seed=1))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    with pytest.raises(InvalidRequest, match="holds other files"):
        run_evaluation(replace(options, out=tmp_path / "full"))


def test_another_tokenizer_is_another_evaluation(options: Options, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "same", max_context=1024)
    first = fingerprint(LLM(folder))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = vocab["a"], vocab["b"]
    vocab["a"], vocab["b"] = b, a
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert fingerprint(LLM(folder)) != first


def test_a_tokenizer_that_makes_unknown_tokens_is_refused(options: Options, tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "small", vocab_size=60, max_context=1024, eos_token_ids=(59,))
    with pytest.raises(UnsupportedModel, match=r"the model has 60.*another model"):
        run_evaluation(replace(options, model=str(folder), out=tmp_path / "out"))


def test_layouts_that_the_model_cannot_run_are_refused_before_it_runs(options: Options, tmp_path: Path) -> None:
    plain = tiny_base(tmp_path / "plain", max_position_embeddings=1024)
    with pytest.raises(UnsupportedModel, match="use --layouts attention"):
        run_evaluation(replace(options, model=str(plain), out=tmp_path / "a", layouts="attention,ssm"))
    found = run_evaluation(
        replace(options, model=str(plain), out=tmp_path / "b", layouts="attention", datasets=("arc_challenge",))
    )
    assert len(found.records["arc_challenge"]["attention"]) == 5
    bare = tiny_model(tmp_path / "bare", gates=False, max_context=1024)
    with pytest.raises(UnsupportedModel, match="no gates"):
        run_evaluation(replace(options, model=str(bare), out=tmp_path / "c", layouts="auto:0.5"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"suite": "seven"}, "'seven' is unknown"),
        ({"datasets": ("race",)}, "'race' is unknown"),
        ({"data": None}, "needs data"),
        ({"data": Path("/nowhere")}, "no folder"),
        ({"datasets": ("hellaswag",)}, "no set 'hellaswag'"),
        ({"ranking": "1,2"}, "0 to 3"),
        ({"ranking": "a,b"}, "neither a file nor"),
        ({"longest": 80}, "none fits 80 tokens"),
        ({"hub": True}, "choose one"),
    ],
)
def test_bad_input_is_named(options: Options, tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        run_evaluation(replace(options, out=tmp_path / "out", **change))


def test_a_ranking_is_measured_where_none_is_known(options: Options, tmp_path: Path) -> None:
    mine = replace(
        options, out=tmp_path / "r", ranking=None, layouts="attention,static:0.5", datasets=("arc_challenge",), limit=2
    )
    found = run_evaluation(mine)
    assert found.ranking is not None and sorted(found.ranking) == [0, 1, 2, 3]
    assert json.loads((mine.out / "ranking.json").read_text()) == {"ranking": found.ranking}


def test_items_that_do_not_fit_are_counted(options: Options, tmp_path: Path) -> None:
    rows = [
        {"id": f"m{i}", "task": "qasper", "prompt": "w " * (30 if i % 2 else 900), "answers": ["w"]} for i in range(6)
    ]
    write_rows(tmp_path / "eval/minilongbench/test.jsonl.gz", rows)
    mine = replace(
        options, data=tmp_path, out=tmp_path / "o", datasets=("minilongbench",), layouts="attention", limit=2
    )
    found = run_evaluation(mine)
    assert {item.id for item in found.parts[0].items} < {"qasper/m1", "qasper/m3", "qasper/m5"}
    assert len(found.parts[0].items) == 2 and found.left_out == {"minilongbench": 3}
    assert summarise(found)["sets"]["minilongbench"]["left_out"] == 3


# ---- store


def test_the_store_keeps_whole_lines_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "s", {"model": "m"})
    store.append("set", "ssm", [{"id": "1"}, {"id": "2"}])
    path = store.path("set", "ssm")
    path.write_bytes(path.read_bytes() + b'{"id": "3"}')
    assert list(store.read("set", "ssm")) == ["1", "2", "3"] and path.read_bytes().endswith(b'"3"}\n')
    path.write_bytes(path.read_bytes() + b'{"id": "4')
    assert list(store.read("set", "ssm")) == ["1", "2", "3"] and store.dropped == 1
    store.append("set", "ssm", [{"id": "5"}])
    assert list(Store(tmp_path / "s", {"model": "m"}).read("set", "ssm")) == ["1", "2", "3", "5"]
    path.write_text('{"id": "1"}\nnonsense\n{"id": "2"}\n')
    with pytest.raises(CorruptFile, match=r"ssm\.jsonl:2"):
        store.read("set", "ssm")


def test_a_full_disk_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "s", {})
    store.append("set", "ssm", [{"id": "1"}])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(MorphError, match=r"No space left.*run the same command again"):
        store.append("set", "ssm", [{"id": "2"}])
    assert "1" in store.read("set", "ssm")


# ---- figures


def test_the_figures_follow_from_the_records(whole: Any) -> None:
    summary = summarise(whole)
    for name in SETS:
        entry = summary["sets"][name]
        base = entry["layouts"]["attention"]
        assert base["agreement"]["value"] == 100 and base["flops_saved"] == 0 and base["budget"] == 1
        assert base["vs_base"] == {"value": 0, "low": 0, "high": 0}
        assert entry["layouts"]["ssm"]["budget"] == 0 and entry["layouts"]["ssm"]["attention_blocks"] == 0
        records = whole.records[name]["auto:0.5"].values()
        primary = entry["primary"]
        expected = 100 * sum(r["metrics"][primary] for r in records) / len(records)
        assert entry["layouts"]["auto:0.5"]["metrics"][primary]["value"] == pytest.approx(expected, abs=1e-3)
        static = entry["layouts"]["static:0.5"]["budget"]
        assert static == pytest.approx(entry["layouts"]["auto:0.5"]["budget"], abs=0.11)
        assert entry["layouts"]["shuffled:0.5"]["attention_blocks"] == entry["layouts"]["auto:0.5"]["attention_blocks"]
        assert entry["oracle"]["items"] == 3
        assert entry["oracle"]["auto:0.5"]["oracle"] >= 0
    assert [pair["set"] for pair in summary["auto_vs_static"]] == list(SETS)
    assert summary["not_inferior"]["auto:0.5"]["of"] == 3
    assert set(summary["by_kind"]["auto:0.5"]) == {"reasoning", "qa", "summary"}
    json.dumps(summary)


# ---- command


def test_the_command_writes_json_markdown_and_plots(
    options: Options, whole: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    from rich.console import Console

    summary = evaluate(options, Console(stderr=True))
    stored = json.loads((options.out / "results.json").read_text())
    assert stored["sets"] == json.loads(json.dumps(summary["sets"]))
    page = (options.out / "results.md").read_text()
    for text in ("squad_long", "auto:0.5", "Against static layouts at equal cost", "plots/layout_heatmap.svg"):
        assert text in page
    plots = {path.name for path in (options.out / "plots").iterdir()}
    assert plots == {
        "quality_over_share.svg", "quality_over_flops.svg", "layout_heatmap.svg", "layout_histogram.svg",
        "budget_by_kind.svg",
    }  # fmt: skip


def test_a_killed_command_goes_on(roomy_model: Path, data_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    words = [
        "eval", str(roomy_model), "--suite", "six", "--datasets", "squad_long,scitldr_long", "--data", str(data_folder),
        "--layouts", "attention,ssm,auto:0.5", "--lengths", "200-350", "--out", str(out), "--dtype", "float32",
    ]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "morph", *words], stderr=subprocess.PIPE, env=os.environ.copy())
    deadline = time.monotonic() + 120
    while not list(out.rglob("*.jsonl")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list(out.rglob("*.jsonl")), "nothing was kept before the kill"
    assert main(words) == 0
    assert len((out / "items/scitldr_long/auto-0.5.jsonl").read_text().splitlines()) == 9
    assert json.loads((out / "results.json").read_text())["sets"]["squad_long"]["items"] == 8


def test_the_command_reports_bad_input_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["eval", "nowhere", "--suite", "six", "--out", str(tmp_path / "o")]) == 2
    assert "needs data" in capsys.readouterr().err
    assert main(["eval", "nowhere", "--lengths", "9"]) == 2


def test_the_bases_answer_is_scored_under_every_layout_where_asked(options: Options, tmp_path: Path) -> None:
    mine = replace(options, out=tmp_path / "loss", layouts="attention,ssm", datasets=("scitldr_long",), limit=3)
    run_evaluation(mine)
    found = run_evaluation(replace(mine, answer_loss=True))
    llm = LLM(options.model, dtype="float32")
    base, ssm = (found.records["scitldr_long"][name] for name in ("attention", "ssm"))
    for prompt, item in zip(found.parts[0].prompts, found.parts[0].items, strict=True):
        answer = base[item.id]["tokens"]
        (score,) = llm.score([prompt], [[answer]], _layout("ssm"))[0]
        assert ssm[item.id]["answer_logprob"] == pytest.approx(score.logprob / len(answer), abs=1e-4)
        # The base's own greedy answer is likelier under the base.
        assert base[item.id]["answer_logprob"] >= ssm[item.id]["answer_logprob"] - 1e-4
    figures = summarise(found)["sets"]["scitldr_long"]["layouts"]
    assert figures["attention"]["answer_loss"]["value"] == 0 < figures["ssm"]["answer_loss"]["value"]


def test_an_interrupted_command_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("morph.evaluate.command.run_evaluation", stop)
    assert main(["eval", "any", "--out", str(tmp_path / "o")]) == 130
    assert "run the same command again" in " ".join(capsys.readouterr().err.split())


def test_a_question_that_has_changed_is_asked_again(options: Options, tmp_path: Path) -> None:
    data = write_sets(tmp_path / "data")
    mine = replace(
        options, data=data, out=tmp_path / "o", layouts="attention", datasets=("arc_challenge",), limit=3, ranking=None
    )
    before = run_evaluation(mine).records["arc_challenge"]["attention"]
    rows = FolderSource(data).rows("arc_challenge")
    rows[0]["answer"] = (rows[0]["answer"] + 1) % 4
    write_rows(data / "eval/arc_challenge/test.jsonl.gz", rows)
    after = run_evaluation(mine).records["arc_challenge"]["attention"]
    assert {id_ for id_ in after if after[id_]["item_sha"] != before[id_]["item_sha"]} == {rows[0]["id"]}
    lines = (mine.out / "items/arc_challenge/attention.jsonl").read_text().splitlines()
    assert len(lines) == 4, "one question was asked again, the others were kept"


def test_each_scored_context_may_have_its_own_layout(roomy_model: Path) -> None:
    llm = LLM(roomy_model, dtype="float32")
    contexts, answers = ["one river", "two bridges"], [[" a", " b"], [" c"]]
    both = llm.score(contexts, answers, [_layout("attention"), _layout("0101")])
    assert [row[0].layout for row in both] == ["1111", "0101"]
    for row, context, many, name in zip(both, contexts, answers, ("attention", "0101"), strict=True):
        (alone,) = llm.score([context], [many], _layout(name))
        assert [s.logprob for s in row] == pytest.approx([s.logprob for s in alone], abs=1e-4)
    with pytest.raises(InvalidRequest, match="2 contexts but 1 params"):
        llm.score(contexts, answers, [_layout("ssm")])
