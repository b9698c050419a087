"""A converted tiny model, texts, and settings for runs of seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from morph.config import SSMConfig
from morph.convert.base import open_base
from morph.convert.convert import convert, converted_config
from morph.train.config import load_config
from morph.train.run import Options
from tests.convert.bases import tiny_base, write_texts

SETTINGS = (
    "run.log_every=10", "run.held_out_rows=4",
    "align.tokens=12800", "align.tokens_per_step=256", "align.lengths=[[1.0, 64]]", "align.warmup=5", "align.lr=3e-3",
    "distill.tokens=25600", "distill.tokens_per_step=512", "distill.micro_tokens=256", "distill.warmup=5",
    "distill.lengths=[[1.0, 32]]", "distill.ema=0.9", "distill.kl_chunk=50", "distill.evaluate_every=0",
    "distill.lr=1e-3",
)  # fmt: skip


def convert_tiny(base: Path, out: Path, **ssm: Any) -> Path:
    opened = open_base(str(base))
    return convert(opened, out, converted_config(opened.source.config, SSMConfig(gate_rank=8, **ssm)))


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted tiny Llama without a window."""
    folder = tmp_path_factory.mktemp("train")
    return convert_tiny(tiny_base(folder / "base"), folder / "converted")


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of sixty short documents."""
    return write_texts(tmp_path_factory.mktemp("texts") / "words.txt")


@pytest.fixture
def options(converted: Path, texts: Path, tmp_path: Path) -> Callable[..., Options]:
    """Makes options of a short run; `settings` come after the defaults of these tests."""

    def make(*settings: str, **changes: Any) -> Options:
        values: dict[str, Any] = {
            "model": converted,
            "data": (str(texts),),
            "out": tmp_path / "run",
            "config": load_config(None, (*SETTINGS, *settings)),
            "device": "cpu",
        }
        return Options(**(values | changes))

    return make
