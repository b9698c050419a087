"""`morph gate fit` from requests to gates that the engine serves, stopped and resumed, and refused where it must be."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from morph import LLM, SamplingParams
from morph.checkpoint import open_model
from morph.cli import main
from morph.errors import InvalidRequest, ModelNotFound, UnsupportedModel
from morph.gate import stages
from morph.gate.answers import Requests
from morph.gate.command import fit_command
from morph.gate.policy import Gates
from morph.gate.work import Deadline, OutOfTime
from tests.gate.conftest import SMALL, Options
from tests.tiny import tiny_model

LIGHT_FILES = {
    "config.json", "cost.json", "features_0.safetensors", "features_1.safetensors", "gate.safetensors", "losses.npz",
    "meta.json", "projection.safetensors",
}  # fmt: skip


def quiet(_: str) -> None:
    pass


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def test_fit_writes_gates_that_the_engine_serves_with(options: Options, model: Path, tmp_path: Path) -> None:
    before = contents(model)
    out = fit_command(options(out=tmp_path / "out"), quiet, SMALL)
    assert contents(model) == before
    gates = Gates.load(open_model(out))
    section = json.loads((out / "config.json").read_text())["gate"]
    assert section["budgets"][0] == 0 and section["budgets"][-1] == 1
    assert sorted(section["static_ranking"]) == [0, 1, 2, 3]
    assert set(section["kinds"]) == {"maths", "chat"}
    assert section["fit"]["requests"] == 22
    assert set(section["count_tau"]) == {"1", "2"}
    assert gates.cost.source == "analytic" and gates.cost.mean_answer_tokens == 3
    llm = LLM(str(out), dtype="float32", max_requests=2)
    prompt = [40 + i % 60 for i in range(250)]
    counts = []
    for budget in (0.0, 0.5, 1.0):
        output = llm.generate(prompt, SamplingParams(max_tokens=1, attention_budget=budget))[0]
        assert output.layout_source == "gate" and output.layout is not None
        counts.append(output.layout.count("1"))
    assert counts == sorted(counts) and counts[0] < counts[-1] == 4
    # What is kept for good is small and complete.
    light = tmp_path / "work" / "light"
    assert {file.name for file in light.iterdir()} == LIGHT_FILES
    assert (light / "gate.safetensors").read_bytes() == (out / "gate.safetensors").read_bytes()


def test_no_request_of_the_eval_split_is_ever_measured(options: Options, tmp_path: Path) -> None:
    fit_command(options(), quiet, SMALL)
    meta = json.loads((tmp_path / "work/light/meta.json").read_text())
    assert meta["ids"] == list(range(22))


def test_a_stopped_run_goes_on_to_the_same_gates(
    options: Options, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = fit_command(options(out=tmp_path / "whole", work=tmp_path / "other"), quiet, SMALL)
    before, stops, check, seen = contents(model), [0], Deadline.check, set[str]()

    def stop_now_and_then(self: Deadline, stage: str) -> None:
        check(self, stage)
        stops[0] += 1
        # A call gets through two pieces of work; the calibration, which is one, is stopped once.
        if stops[0] % 3 == 0 and f"stopped in {stage}" not in seen - {"stopped in measurement"}:
            raise OutOfTime(f"stopped in {stage}")

    monkeypatch.setattr(Deadline, "check", stop_now_and_then)
    for _ in range(30):
        try:
            out = fit_command(options(out=tmp_path / "parts"), quiet, SMALL)
            break
        except OutOfTime as stopped:
            seen.add(str(stopped))
            assert contents(model) == before and not (tmp_path / "parts").exists()
            assert (tmp_path / "work/light").is_dir()
    else:
        pytest.fail("never came to an end")
    assert len(seen) >= 2
    assert contents(out)["gate.safetensors"] == contents(whole)["gate.safetensors"]
    assert json.loads((out / "config.json").read_text()) == json.loads((whole / "config.json").read_text())


def test_the_time_limit_stops_the_run_and_says_how_to_go_on(options: Options, model: Path, tmp_path: Path) -> None:
    before = contents(model)
    with pytest.raises(OutOfTime, match=r"stopped at the limit of 0 s in stage 'pilot'.*same --work again to go on"):
        fit_command(options(limit_seconds=0.0), quiet, SMALL)
    assert contents(model) == before
    out = fit_command(options(limit_seconds=1e6), quiet, SMALL)
    assert json.loads((out / "config.json").read_text())["gate"]["fit"]["requests"] == 22


def test_in_place_the_old_gates_stay_until_the_new_ones_are_complete(
    options: Options, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(model)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("morph.gate.folder.save_file", full)
        with pytest.raises(OSError):
            fit_command(options(), quiet, SMALL)
    assert contents(model) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "work"]
    fit_command(options(), quiet, SMALL)
    after = contents(model)
    assert after["gate.safetensors"] != before["gate.safetensors"]
    assert {k: v for k, v in after.items() if k.startswith(("weights", "delta", "token"))} == {
        k: v for k, v in before.items() if k.startswith(("weights", "delta", "token"))
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "work"]


@pytest.mark.parametrize(
    ("change", "word"), [({"dtype": "bfloat16"}, "dtype"), ({"prompts": 20}, "prompts")], ids=["dtype", "prompts"]
)
def test_a_work_folder_of_other_settings_is_refused(
    options: Options, change: dict[str, object], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "answers", _stop)
    with pytest.raises(OutOfTime):
        fit_command(options(), quiet, SMALL)
    with pytest.raises(InvalidRequest, match=rf"was made with .*{word}.* repeat the first run's options"):
        fit_command(options(**change), quiet, SMALL)


def _stop(*_: object) -> None:
    raise OutOfTime("stopped")


def test_a_work_folder_of_another_model_is_refused(
    options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "answers", _stop)
    with pytest.raises(OutOfTime):
        fit_command(options(), quiet, SMALL)
    other = tiny_model(tmp_path / "second", window=16)
    with pytest.raises(InvalidRequest, match="was made with model"):
        fit_command(options(model=str(other)), quiet, SMALL)


def test_a_folder_with_other_things_is_no_work_folder(options: Options, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.txt").write_text("dear to someone")
    with pytest.raises(InvalidRequest, match="holds other files; name an empty"):
        fit_command(options(), quiet, SMALL)


def test_bad_input_is_refused_before_anything_is_measured(
    options: Options, model: Path, tmp_path: Path, requests_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "answers", lambda *_: pytest.fail("measured"))
    plain = tiny_model(tmp_path / "plain", ssm=False)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    few, foreign = tmp_path / "few.npz", tmp_path / "foreign.npz"
    Requests([[40] * 20] * 5, ["x"] * 5, ["train"] * 5, [[41]] * 5).save(few)
    Requests([[4000] * 20] * 20, ["x"] * 20, ["train"] * 20, [[41]] * 20).save(foreign)
    pulled = tiny_model(tmp_path / "pulled")
    (pulled / ".complete").write_text("{}")
    cases: list[tuple[dict[str, object], type[Exception], str]] = [
        ({"model": str(plain)}, UnsupportedModel, "no block with both mixers"),
        ({"requests": None}, InvalidRequest, "either --data"),
        ({"data": empty}, InvalidRequest, "either --data"),
        ({"requests": None, "data": empty}, InvalidRequest, "has no prompt of"),
        ({"requests": None, "data": tmp_path / "nowhere"}, ModelNotFound, "no folder or file"),
        ({"requests": tmp_path / "nowhere.npz"}, ModelNotFound, "no file"),
        ({"requests": few}, InvalidRequest, "5 requests to fit on are too few"),
        ({"requests": foreign}, InvalidRequest, "made for another model"),
        ({"prompts": 500}, InvalidRequest, "--prompts 500 is not between"),
        ({"model": str(pulled)}, InvalidRequest, "give --out DIR"),
        ({"out": Path("/proc/morph/gates")}, InvalidRequest, "give --out DIR at a place that can be written"),
        ({"out": plain}, InvalidRequest, "exists already; name a new folder"),
        ({"work": None, "limit_seconds": 5.0}, InvalidRequest, "give --work DIR"),
    ]
    before = contents(model)
    for number, (change, error, message) in enumerate(cases):
        work: dict[str, object] = {"work": tmp_path / f"work-{number}"}
        with pytest.raises(error, match=message):
            fit_command(options(**(work | change)), quiet, SMALL)
    assert contents(model) == before


def test_a_folder_that_cannot_be_written_is_refused_early(
    options: Options, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode, **more: Path(path) != model and access(path, mode, **more))
    with pytest.raises(InvalidRequest, match=r"no folder can be written at .*model \(Permission denied\)"):
        fit_command(options(), quiet, SMALL)


def test_prompts_too_short_for_any_saving_are_refused(options: Options, tmp_path: Path) -> None:
    short = tmp_path / "short.npz"
    Requests([[40 + i] * 9 for i in range(20)], ["x"] * 20, ["train"] * 20, [[41]] * 20).save(short)
    with pytest.raises(InvalidRequest, match="add longer prompts"):
        fit_command(options(requests=short), quiet, SMALL)


def test_one_long_prompt_among_short_ones_is_enough_wherever_it_stands(options: Options, tmp_path: Path) -> None:
    prompts = [[40 + i] * 12 for i in range(20)]
    for place in (0, 19):
        mixed, path = list(prompts), tmp_path / f"{place}.npz"
        mixed[place] = [50 + i % 40 for i in range(300)]
        Requests(mixed, ["x"] * 20, ["train"] * 20, [[41, 42]] * 20).save(path)
        out = fit_command(options(requests=path, work=tmp_path / f"w{place}", out=tmp_path / f"o{place}"), quiet, SMALL)
        assert Gates.load(open_model(out)).tau_of(0.5) > 0


def test_the_number_of_requests_follows_the_time_limit(options: Options, requests_file: Path) -> None:
    requests = Requests.load(requests_file)

    def planned(limit: float | None, rate: float) -> int:
        run = stages.Run(None, requests, SMALL, None, Deadline(limit), quiet)  # type: ignore[arg-type]
        return stages.planned_requests(run, 1000, rate, 100.0)

    assert planned(None, 1.0) == 1000
    assert planned(100.0, 1e9) == 1000
    assert planned(100.0, 1e-3) == SMALL.pilot
    half, full = planned(100.0, 5000.0), planned(160.0, 5000.0)
    assert SMALL.pilot < half < full < 1000
    # It costs what was planned: the rows of the stages, at that speed.
    rows = half * (SMALL.own_share * (SMALL.own_rows + 2) + len(SMALL.chain) + SMALL.layouts + 1)
    assert rows * 100.0 / 5000.0 < 0.9 * 100.0 - 30


def test_the_command_draws_prompts_and_answers_itself(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr("morph.gate.command.PipelineConfig", lambda **_: dataclasses.replace(SMALL, pilot_layouts=4))
    data = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"{i} " + "why is the sky blue " * (1 + i % 12), "kind": "sky"} for i in range(18)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = [
        "gate",
        "fit",
        str(model),
        "--data",
        str(data),
        "--work",
        str(tmp_path / "w"),
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(words) == 0, capsys.readouterr().err
    assert "gates written to" in capsys.readouterr().err
    assert main(["gate", "inspect", str(tmp_path / "o")]) == 0
    shown = capsys.readouterr().out
    assert "sky" in shown and "Threshold by budget" in shown and "requests 18" in shown
    assert main(["gate", "fit", str(model), "--data", str(data), "--work", str(tmp_path / "w"), "--seed", "1",
                 "--out", str(tmp_path / "o")]) == 2  # fmt: skip
    assert "exists already" in capsys.readouterr().err
