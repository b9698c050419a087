"""`morph calibrate` and `morph gate inspect` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from morph import LLM, SamplingParams
from morph.checkpoint import open_model
from morph.cli import main
from morph.gate import recalibrate, timing
from morph.gate.cost import CostTable
from morph.gate.policy import Gates
from tests.tiny import tiny_model


def seconds(n: int, layout: str) -> float:
    """A machine where attention is quadratic, the ssm linear, and short prompts are cheaper with attention."""
    return 1e-3 + 1e-5 * n + (4e-8 * n * n if layout == "attention" else 2e-4)


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are the same in every run; the engine runs all the same."""
    prefill, decode = timing.prefill_seconds, timing.decode_seconds

    def timed_prefill(engine: object, n: int, layout: str) -> float:
        assert prefill(engine, n, layout) > 0  # type: ignore[arg-type]
        return seconds(n, layout)

    def timed_decode(engine: object, n: int, batch: int, layout: str) -> float:
        assert decode(engine, n, batch, layout) > 0  # type: ignore[arg-type]
        return 1e-4 + (1e-7 * n if layout == "attention" else 0.0)

    monkeypatch.setattr(timing, "prefill_seconds", timed_prefill)
    monkeypatch.setattr(timing, "decode_seconds", timed_decode)


def calibrate(model: Path, requests: Path, *more: str) -> int:
    words = ["--requests", str(requests), "--prompts", "10", "--longest", "300", "--batch", "2", "--repeats", "1"]
    return main(["calibrate", str(model), *words, "--dtype", "float32", *more])


@pytest.mark.usefixtures("known_machine")
def test_the_table_holds_what_was_timed_and_the_engine_serves_with_it(
    model: Path, requests_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = json.loads((model / "config.json").read_text())["gate"]
    assert calibrate(model, requests_file, "--answer-tokens", "20") == 0, capsys.readouterr().err
    table = CostTable.load(model / "cost.json")
    assert table.source == "measured" and table.mean_answer_tokens == 20 and table.lengths[-1] == 300
    assert table.rates is not None
    assert {"name", "versions", "dtype", "kernels", "threads", "batch", "date"} <= set(table.rates)
    for n in (16, 64, 300):
        saved = (seconds(n, "attention") - seconds(n, "ssm")) / 4 + 20 * 1e-7 * (n + 10) / 4 / 2
        assert table.saved_seconds(2, n) == pytest.approx(saved, abs=2e-6)
    assert table.saved_seconds(0, 16) < 0 < table.saved_seconds(0, 300)
    again = CostTable.from_dict(json.loads(json.dumps(table.to_dict())))
    assert again.fingerprint() == table.fingerprint() and np.array_equal(again.ssm, table.ssm)

    gate = json.loads((model / "config.json").read_text())["gate"]
    assert gate["tau"] != old["tau"] and len(gate["tau"]) == len(gate["budgets"])
    assert gate["mean_answer_tokens"] == 20
    llm = LLM(str(model), dtype="float32", max_requests=1)
    assert llm.generate([50] * 20, SamplingParams(max_tokens=1))[0].layout == "1111"
    counts = []
    for budget in (0.0, 0.3, 0.7, 1.0):
        output = llm.generate([40 + i % 50 for i in range(280)], SamplingParams(max_tokens=1, attention_budget=budget))
        counts.append(str(output[0].layout).count("1"))
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] == 4


@pytest.mark.usefixtures("known_machine")
def test_a_pulled_or_unsuitable_model_is_refused_and_left_alone(
    model: Path, requests_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    bare, plain = tiny_model(tmp_path / "bare", gates=False), tiny_model(tmp_path / "plain", ssm=False)
    monkeypatch.setattr(recalibrate, "measure_costs", lambda *_: pytest.fail("timed"))
    for folder, words, message in (
        (bare, (), "model has no gates; name a layout, or fit gates with `morph gate fit`"),
        (plain, (), "no block with both mixers"),
        (model, ("--longest", "5000"), "give --longest from"),
        (model, ("--out", str(bare)), "exists already"),
        (model, ("--data", "prompts.jsonl"), "one of the two"),
    ):
        before = sorted(path.name for path in folder.iterdir())
        assert calibrate(folder, requests_file, *words) != 0
        assert message in capsys.readouterr().err
        assert sorted(path.name for path in folder.iterdir()) == before


def test_where_the_ssm_never_pays_nothing_is_written(
    model: Path, requests_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "prefill_seconds", lambda engine, n, layout: 1.0 if layout == "attention" else 2.0)
    monkeypatch.setattr(timing, "decode_seconds", lambda engine, n, batch, layout: 0.1)
    before = (model / "cost.json").read_bytes()
    assert calibrate(model, requests_file) == 2
    assert "nothing was written" in capsys.readouterr().err
    assert (model / "cost.json").read_bytes() == before


def test_differences_are_smoothed_over_lengths() -> None:
    lengths = [16, 32, 64, 128, 256, 512]
    slow = [1.0 + 1e-4 * n * n for n in lengths]
    fast = [1.2 for _ in lengths]
    noisy = [value * (1.02 if i % 2 else 0.98) for i, value in enumerate(slow)]
    found = timing.smoothed(lengths, noisy, fast, [24, 400], 2)
    assert found == pytest.approx([1e-4 * 24**2 - 0.2, 1e-4 * 400**2 - 0.2], rel=0.05, abs=0.06)


def test_inspect_shows_what_the_gates_say_of_a_prompt(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["gate", "inspect", str(model), "--prompt", "abc", "--raw", "--budget", "0.5", "--dtype", "float32"]) == 0
    )
    shown = capsys.readouterr().out
    llm = LLM(str(model), dtype="float32", max_requests=1)
    layout = llm.generate("abc", SamplingParams(max_tokens=1, attention_budget=0.5))[0].layout
    assert layout is not None and layout.replace("1", "#").replace("0", ".") in shown
    gates = Gates.load(open_model(model))
    assert f"{gates.tau_of(0.5) * gates.cost.saved_seconds(0, 3):.5f}" in shown
    assert main(["gate", "inspect", str(model)]) == 0
    assert "config.json records no û by kind" in capsys.readouterr().out


def test_inspect_of_a_model_without_gates_names_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tiny_model(tmp_path / "bare", gates=False)
    assert main(["gate", "inspect", str(bare)]) == 1
    assert "morph gate fit" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["gate", "fit"], ["gate", "inspect"], ["calibrate"]])
def test_help_shows_an_example(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "Example" in shown and f"morph {' '.join(words)} smollm2-135m" in shown
