"""A whole run: losses fall, a stopped run goes on bit for bit, the result serves, and failures leave nothing broken."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import morph.train.stage as stage_module
from morph import LLM, SamplingParams
from morph.errors import InvalidRequest, MorphError, UnsupportedModel
from morph.train.config import load_config
from morph.train.optimizer import MixerOptimizer
from morph.train.run import Options, run_distill
from morph.train.snapshot import load_snapshot, snapshots
from tests.convert.bases import tiny_base, write_texts
from tests.tiny import tiny_model
from tests.train.conftest import SETTINGS, convert_tiny

Make = Callable[..., Options]


def rows(out: Path, stage: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [row for row in lines if row["stage"] == stage and "lr" in row]


def final_state(out: Path) -> dict[str, torch.Tensor]:
    return load_snapshot(snapshots(out / "checkpoints")[-1])[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, converted: Path, texts: Path) -> Options:
    """A run of 50 + 50 steps."""
    options = Options(
        converted, (str(texts),), tmp_path_factory.mktemp("whole") / "run", load_config(None, SETTINGS), device="cpu"
    )
    assert run_distill(options, lambda line: None).finished
    return options


def test_losses_fall_in_both_stages(finished: Options) -> None:
    align, distill = rows(finished.out, "align"), rows(finished.out, "distill")
    assert [row["step"] for row in align] == [10, 20, 30, 40, 50] == [row["step"] for row in distill]
    assert align[-1]["loss"] < 0.8 * align[0]["loss"]
    assert distill[-1]["kl_ssm"] < 0.9 * distill[0]["kl_ssm"]


def test_result_serves_under_explicit_layouts(finished: Options, converted: Path) -> None:
    llm = LLM(str(finished.out / "model"), dtype="float32")
    texts = {}
    for layout in ("attention", "ssm", "0101"):
        output = llm.generate(["the river"], SamplingParams(max_tokens=8, layout=layout, temperature=0))[0]
        assert len(output.token_ids) > 0 and output.layout == {"attention": "1111", "ssm": "0000"}.get(layout, layout)
        texts[layout] = output.token_ids
    # All attention is the base, trained or not.
    base = LLM(str(converted), dtype="float32")
    params = SamplingParams(max_tokens=8, layout="attention", temperature=0)
    assert base.generate(["the river"], params)[0].token_ids == texts["attention"]
    card = (finished.out / "model" / "README.md").read_text()
    assert "| licence | apache-2.0" in card and "held_out_kl" in card and "sha256" in card


def test_finished_run_given_again_only_exports(finished: Options) -> None:
    before = final_state(finished.out)
    assert run_distill(finished, lambda line: None).finished
    after = final_state(finished.out)
    assert all(torch.equal(before[name], after[name]) for name in before)


SHORT = ("align.tokens=3072", "distill.tokens=7168", "distill.ranking_every=0.4")
"""12 and 14 steps, with blocks ranked anew inside the second stage."""


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, finished: Options) -> dict[str, torch.Tensor]:
    config = load_config(None, (*SETTINGS, *SHORT))
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert run_distill(dataclasses.replace(finished, config=config, out=out), lambda line: None).finished
    return final_state(out)


@pytest.mark.parametrize(("stage", "stop"), [("align", 7), ("distill", 9)])
def test_stopped_run_goes_on_bit_for_bit(
    uninterrupted: dict[str, torch.Tensor], options: Make, monkeypatch: pytest.MonkeyPatch, stage: str, stop: int
) -> None:
    made = options(*SHORT)
    calls = {"align": 0, "distill": 0}
    real = stage_module.StageRunner._step

    def step(self: stage_module.StageRunner) -> tuple[torch.Tensor, torch.Tensor]:
        calls[self.position.stage] += 1
        if calls[stage] == stop:
            # The deadline passes while this step runs.
            self.deadline = 0.0
        return real(self)

    monkeypatch.setattr(stage_module.StageRunner, "_step", step)
    said: list[str] = []
    outcome = run_distill(made, said.append)
    assert not outcome.finished and (outcome.model / "config.json").is_file()
    assert any(f"stopped at {stage} step {stop}" in line for line in said)
    monkeypatch.setattr(stage_module.StageRunner, "_step", real)
    assert run_distill(made, lambda line: None).finished
    want, got = uninterrupted, final_state(made.out)
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)


def test_max_seconds_stops_with_a_checkpoint(options: Make) -> None:
    made = dataclasses.replace(options("align.tokens=10000000"), max_seconds=2.0)
    assert not run_distill(made, lambda line: None).finished
    position, _ = load_snapshot(snapshots(made.out / "checkpoints")[-1])
    assert position.stage == "align" and 0 < position.step < 10_000


def test_init_begins_with_the_given_mixers(finished: Options, options: Make) -> None:
    said: list[str] = []
    quick = ("distill.tokens=1024", "distill.start=0.5", "distill.lr=1e-12", "distill.final_lr=0.0")
    made = dataclasses.replace(
        options(*quick), stages=("distill",), init=finished.out / "model", export="bfloat16", revision="r7"
    )
    assert run_distill(made, said.append).finished
    position, state = load_snapshot(snapshots(made.out / "checkpoints")[-1])
    assert (position.begin, position.step) == (1, 2)
    assert json.loads((made.out / "model" / "config.json").read_text())["revision"] == "r7"
    want = final_state(finished.out)
    for name in want:
        if name.startswith("average."):
            got = state[name.replace("average.", "parameter.")]
            assert (got - want[name]).norm() < 0.02 * want[name].norm() + 1e-6, name


def test_init_of_another_shape_is_refused(options: Make, tmp_path: Path) -> None:
    other = convert_tiny(tiny_base(tmp_path / "base"), tmp_path / "other", window=64)
    with pytest.raises(InvalidRequest, match="has no place in this model"):
        run_distill(dataclasses.replace(options(), init=other), lambda line: None)
    fewer = convert_tiny(tmp_path / "base", tmp_path / "fewer", state_heads="kv")
    with pytest.raises(InvalidRequest, match=r"ab.weight' has shape \(4, 64\), this model wants \(8, 64\)"):
        run_distill(dataclasses.replace(options(), init=fewer), lambda line: None)


def test_nan_stops_clearly_and_keeps_the_last_good_checkpoint(options: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = options("run.checkpoint_seconds=0.0", "run.log_every=4")
    real = MixerOptimizer.step

    def step(self: MixerOptimizer, rate: float) -> torch.Tensor:
        if self.updates == 9:
            self.gradient[0] = torch.nan
        return real(self, rate)

    monkeypatch.setattr(MixerOptimizer, "step", step)
    with pytest.raises(MorphError, match=r"align went wrong by step .*align-0000009, is kept; lower align.lr"):
        run_distill(made, lambda line: None)
    position, state = load_snapshot(snapshots(made.out / "checkpoints")[-1])
    assert position.step == 9 and all(tensor.isfinite().all() for tensor in state.values())


def test_checkpoint_of_another_model_or_of_other_settings_is_refused(
    finished: Options, options: Make, tmp_path: Path
) -> None:
    other = convert_tiny(tiny_base(tmp_path / "base", rms_norm_eps=1e-3), tmp_path / "other")
    with pytest.raises(InvalidRequest, match=r"is of another model than"):
        run_distill(dataclasses.replace(finished, model=other))
    with pytest.raises(InvalidRequest, match=r"distill.lr was 0.001, now 0.002"):
        run_distill(dataclasses.replace(finished, config=options("distill.lr=2e-3").config))
    with pytest.raises(InvalidRequest, match="made with data words, now it is others"):
        texts = write_texts(tmp_path / "others.txt", seed=1)
        stopped = dataclasses.replace(options("align.tokens=10000000"), max_seconds=2.0)
        run_distill(stopped, lambda line: None)
        run_distill(dataclasses.replace(stopped, data=(str(texts),)), lambda line: None)


def test_model_without_mixers_is_refused(options: Make, tmp_path: Path) -> None:
    plain = tiny_model(tmp_path / "plain", ssm=False)
    with pytest.raises(UnsupportedModel, match=r"no ssm mixers; make some with .morph convert"):
        run_distill(dataclasses.replace(options(), model=plain))


def test_longer_sequences_than_the_context_are_refused(options: Make) -> None:
    with pytest.raises(InvalidRequest, match="sequences of 1024 tokens exceed the model's context of 512"):
        run_distill(options("align.lengths=[[1.0, 1024]]"))


@pytest.mark.parametrize("where", ["checkpoint", "export"])
def test_full_disk_leaves_no_half_written_folder(options: Make, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    made = options("align.tokens=2560", "distill.tokens=2048")

    def full(tensors: object, path: Path) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    module = "morph.train.snapshot" if where == "checkpoint" else "morph.checkpoint.delta"
    monkeypatch.setattr(f"{module}.save_file", full)
    with pytest.raises(MorphError, match=r"the disk of .* is full: about .* MB are needed; free some space"):
        run_distill(made, lambda line: None)
    names = [path.name for path in made.out.rglob("*")]
    assert not [name for name in names if name.startswith(".") or name == "model"]
    if where == "checkpoint":
        assert not snapshots(made.out / "checkpoints")
    else:
        assert snapshots(made.out / "checkpoints")[-1].name == "distill-0000004"
    monkeypatch.undo()
    assert run_distill(made, lambda line: None).finished


def test_damaged_checkpoint_names_the_remedy(finished: Options, tmp_path: Path) -> None:
    import shutil

    out = tmp_path / "run"
    shutil.copytree(finished.out, out)
    last = snapshots(out / "checkpoints")[-1]
    (last / "state.safetensors").write_bytes(b"no")
    with pytest.raises(MorphError, match=r"checkpoint .* cannot be read .* remove .* to go on from the one before"):
        run_distill(dataclasses.replace(finished, out=out))


def test_early_runs_file_can_begin_a_run(finished: Options, options: Make, tmp_path: Path) -> None:
    from morph.checkpoint.delta import FIRST_DELTA

    short = {long: name for name, long in FIRST_DELTA.items()}
    state, tensors = final_state(finished.out), {}
    for name, tensor in state.items():
        kind, block, _, long = name.split(".", 3)[0], name.split(".")[2], None, name.split(".ssm.")[1]
        if kind == "average":
            early = short[long]
            tensors[f"{block}.{early}"] = (tensor[:, None] if early == "cw" else tensor).contiguous()
    save_file(tensors, tmp_path / "early.safetensors")
    quick = ("distill.tokens=512", "distill.lr=1e-12", "distill.final_lr=0.0")
    made = dataclasses.replace(options(*quick), stages=("distill",), init=tmp_path / "early.safetensors")
    assert run_distill(made, lambda line: None).finished
    got = final_state(made.out)
    for name in state:
        if name.startswith("average."):
            torch.testing.assert_close(got[name.replace("average.", "parameter.")], state[name], atol=1e-6, rtol=1e-4)
    assert load_file(tmp_path / "early.safetensors").keys() == tensors.keys()
