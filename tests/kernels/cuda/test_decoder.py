"""Whole requests through the CUDA backend: equal to the reference, in company and alone, captured and eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from morph import LLM, SamplingParams
from tests.kernels.cuda.device import DEVICE, close
from tests.tiny import tiny_model

from morph.kernels.cuda.backend import CudaKernels  # isort: skip
from morph.kernels.cuda.buffers import RowLists, bucket_of  # isort: skip
from morph.kernels.torch_backend import TorchKernels  # isort: skip

LAYOUTS = ["attention", "ssm", "10", "01"]
PROMPTS = [[(7 * i + 3 * j) % 290 for i in range(3 + 9 * j)] for j in range(len(LAYOUTS))]


def build(folder: Path, monkeypatch: pytest.MonkeyPatch, backend: type, device: Any, dtype: torch.dtype) -> LLM:
    """A model on one backend, freed units filled with NaN."""
    monkeypatch.setattr("morph.engine.load.get_kernels", lambda _, dtype, heads: backend(device, dtype, heads))
    name = "float32" if dtype is torch.float32 else "bfloat16"
    return LLM(str(folder), dtype=name, device=str(device), max_requests=6, max_context=128, poison=True)


def watch(llm: LLM) -> list[torch.Tensor]:
    """Logits of every decode step from now on."""
    kept, decode = [], llm.engine.runner.decode

    def keep(requests: Any) -> torch.Tensor:
        logits = decode(requests)
        kept.append(logits.clone().cpu())
        return logits

    llm.engine.runner.decode = keep  # type: ignore[method-assign]
    return kept


@pytest.mark.parametrize(
    "shape",
    [
        {"window": 16},
        pytest.param({"state_heads": "kv"}, marks=pytest.mark.slow),
        pytest.param({"qk_norm": True, "window": 64}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_mixed_batch_equals_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: dict[str, Any]
) -> None:
    folder = tiny_model(tmp_path / "model", gates=False, num_blocks=2, **shape)
    params = [SamplingParams(max_tokens=2 + j, layout=layout, ignore_eos=True) for j, layout in enumerate(LAYOUTS)]
    mine = build(folder, monkeypatch, CudaKernels, DEVICE, torch.float32)
    assert type(mine.engine.runner.decoder).__name__ == "CudaDecoder"
    ours = watch(mine)
    got = mine.generate(PROMPTS, params)
    reference = build(folder, monkeypatch, TorchKernels, "cpu", torch.float32)
    theirs = watch(reference)
    want = reference.generate(PROMPTS, params)
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert len(ours) == len(theirs) > 3
    for a, b in zip(ours, theirs, strict=True):
        close(a, b, torch.float32)
    close(mine.engine.runner.sums, reference.engine.runner.sums, torch.float32)
    for prompt, param, together in list(zip(PROMPTS, params, got, strict=True))[:3]:
        assert mine.generate([prompt], param)[0].token_ids == together.token_ids, "a request depends on its company"
    mine.engine.check()


def test_padding_and_empty_steps_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model(tmp_path / "model", gates=False, num_blocks=2, window=16)
    llm = build(folder, monkeypatch, CudaKernels, DEVICE, torch.float32)
    runner = llm.engine.runner
    step, tables = runner.decoder.step, runner.tables
    step.buffers.clear()
    before = [t.clone() for t in (tables.pool.storage, runner.sums, tables.conv_tails)]
    for uniform in (None, "attention", "ssm"):
        step.run(4, uniform)
    for old, new in zip(before, (tables.pool.storage, runner.sums, tables.conv_tails), strict=True):
        assert torch.equal(old, new)


def test_row_lists_say_who_takes_which_path() -> None:
    class Rows:
        def __init__(self, rows: list[int] | None, count: int) -> None:
            self.rows = None if rows is None else torch.tensor(rows)
            self.slots, self.count = torch.zeros(count, dtype=torch.int32), count

    mixed = (Rows([0, 3], 2), Rows([1, 2], 2))
    lists = RowLists.build([mixed, (Rows(None, 4), None), mixed], ["adaptive"] * 3, 6, torch.device("cpu"))
    assert lists.counts.tolist() == [[2, 2], [4, 0], [2, 2]]
    assert lists.lists[0].tolist() == [[0, 3, 0, 0, 0, 0], [1, 2, 0, 0, 0, 0]]
    assert lists.lists[1, 0].tolist() == [0, 1, 2, 3, 0, 0]
    assert lists.uniform is None
    one = (Rows(None, 4), None)
    assert RowLists.build([one, one], ["adaptive"] * 2, 6, torch.device("cpu")).uniform == "attention"
    other = (None, Rows(None, 4))
    assert RowLists.build([one, other], ["attention", "adaptive"], 6, torch.device("cpu")).uniform == "ssm"


@pytest.mark.parametrize("capacity", [1, 5, 64, 300])
def test_buckets_hold_their_rows(capacity: int) -> None:
    for rows in range(1, capacity + 1):
        assert rows <= bucket_of(rows, capacity) <= capacity
    with pytest.raises(ValueError, match="slots"):
        bucket_of(capacity + 1, capacity)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs CUDA: graphs are captured on a GPU only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_equals_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    folder = tiny_model(tmp_path / "model", gates=False, num_blocks=2, window=16)
    params = [SamplingParams(max_tokens=6 + j, layout=layout, ignore_eos=True) for j, layout in enumerate(LAYOUTS)]
    runs = []
    for captured in (True, False):
        llm = build(folder, monkeypatch, CudaKernels, DEVICE, dtype)
        if not captured:
            llm.engine.runner.decoder._graph = lambda bucket, uniform: None
        logits = watch(llm)
        runs.append(([o.token_ids for o in llm.generate(PROMPTS, params)], logits))
    assert runs[0][0] == runs[1][0]
    for a, b in zip(runs[0][1], runs[1][1], strict=True):
        assert torch.equal(a, b)
