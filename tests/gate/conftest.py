"""A tiny model and requests for it, and a fit that takes seconds."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from morph.gate.answers import Requests
from morph.gate.command import FitOptions
from morph.gate.fit import FitConfig
from morph.gate.stages import PipelineConfig
from tests.tiny import tiny_model

SMALL = PipelineConfig(
    chain=(0.25, 0.5, 0.75),
    layouts=5,
    pilot=8,
    pilot_layouts=8,
    contest=8,
    chunk=10,
    own_share=0.5,
    policy_budgets=(0.3,),
    policy_counts=(0.5,),
    calibration=8,
    batch_tokens=8192,
    answer_tokens=4,
    fit=FitConfig(penalties=(0.01, 0.1), deviations=(0.0, 1.0), folds=3, counts=(0.25, 0.5)),
)
"""Every stage, over as little as it takes."""

Options = Callable[..., FitOptions]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A tiny hybrid with random gates, in a folder of this test's own."""
    return tiny_model(tmp_path / "model")


@pytest.fixture(scope="session")
def requests_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """26 requests of two kinds: 22 to fit on, 4 of the split `eval`; lengths on both sides of where the ssm pays."""
    rng = random.Random(0)
    prompts = [[rng.randrange(33, 120) for _ in range(rng.randrange(20, 260))] for _ in range(26)]
    answers = [[rng.randrange(33, 120) for _ in range(3)] for _ in prompts]
    path = tmp_path_factory.mktemp("requests") / "requests.npz"
    Requests(
        prompts, [("maths", "chat")[i % 2] for i in range(26)], ["train"] * 16 + ["held"] * 6 + ["eval"] * 4, answers
    ).save(path)
    return path


@pytest.fixture
def options(model: Path, requests_file: Path, tmp_path: Path) -> Options:
    """Options of `morph gate fit` for that model, with changes."""

    def make(**changes: object) -> FitOptions:
        values: dict[str, object] = {
            "model": str(model), "data": None, "requests": requests_file, "prompts": None, "work": tmp_path / "work",
            "out": None, "device": "cpu", "dtype": "float32", "limit_seconds": None, "batch_tokens": None, "seed": 0,
        }  # fmt: skip
        return FitOptions(**(values | changes))  # type: ignore[arg-type]

    return make
