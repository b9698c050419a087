"""The arithmetic of the GPU benchmarks, which needs no GPU."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed (extra `cuda`)")

from benchmarks.gpu_models import SHAPES, random_layouts, recorded_layouts
from benchmarks.gpu_serving import arrivals, knee


def test_arrivals_come_at_the_rate() -> None:
    times = arrivals(50.0, 100.0, seed=1)
    assert all(a < b for a, b in pairwise(times)) and times[-1] < 100
    assert len(times) == pytest.approx(5000, rel=0.05)


def test_the_knee_is_the_highest_rate_served() -> None:
    def step(rate: float, served: float, ttft: float) -> dict[str, Any]:
        return {"rate": rate, "arrived_per_s": rate, "requests_per_s": served, "ttft_p50_s": ttft}

    assert knee([step(2, 2, 0.1), step(4, 3.9, 0.5), step(8, 5, 0.5)], 2.0) == 4
    assert knee([step(2, 2, 3.0)], 2.0) == 0


def test_layouts_differ_and_have_the_share() -> None:
    layouts = random_layouts(SHAPES["8b"], 64, 0.25)
    assert len(set(layouts)) == 64
    assert sum(map(sum, layouts)) / (64 * 32) == pytest.approx(0.25, abs=0.04)


def test_recorded_layouts_are_stretched_to_the_model(tmp_path: Path) -> None:
    file = tmp_path / "layouts.txt"
    file.write_text("10\n\n10\n")
    assert recorded_layouts(SHAPES["1b"], file, 3) == [(True,) * 8 + (False,) * 8] * 3
    file.write_text("10\n12\n")
    with pytest.raises(ValueError, match="line 2"):
        recorded_layouts(SHAPES["1b"], file, 3)
