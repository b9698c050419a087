"""Two processes train like one with all the rows."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from morph.errors import InvalidRequest
from morph.train.parallel import Group, join
from morph.train.run import Options, run_distill
from morph.train.snapshot import load_snapshot, snapshots
from tests.train.conftest import SETTINGS

SHORT = ("align.tokens=2048", "distill.tokens=4096", "distill.micro_tokens=128")


@pytest.mark.slow
def test_two_processes_give_the_parameters_of_one(options: Callable[..., Options], tmp_path: Path) -> None:
    alone = options(*SHORT)
    assert run_distill(alone, lambda line: None).finished
    together = tmp_path / "together"
    words = ["distill", str(alone.model), "--data", *alone.data, "--out", str(together), "--device", "cpu"]
    changes = [word for change in (*SETTINGS, *SHORT) for word in ("--set", change)]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "morph"]
    done = subprocess.run([*launch, *words, *changes], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("begins with align") == 1 and "2 × cpu" in done.stdout
    (position, want), (other, got) = (
        load_snapshot(snapshots(out / "checkpoints")[-1]) for out in (alone.out, together)
    )
    assert (position.step, position.drawn, position.ranking) == (other.step, other.drawn, other.ranking)
    for name in want:
        if name.startswith("parameter."):
            assert (want[name] - got[name]).norm() <= 2e-3 * want[name].norm() + 1e-5, name


def test_rows_are_shared_without_overlap_and_too_few_are_refused() -> None:
    one = join("cpu")
    groups = [dataclasses.replace(one, rank=rank, size=3) for rank in range(3)]
    assert [group.share(8) for group in groups] == [(0, 2), (2, 5), (5, 8)]
    assert Group(0, 1, one.device).share(5) == (0, 5)
    with pytest.raises(InvalidRequest, match="a step has 2 sequences for 3 processes; raise tokens_per_step"):
        groups[0].share(2)


def test_missing_cuda_is_named() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(InvalidRequest, match="torch sees no CUDA device; use --device cpu"):
        join("cuda")
