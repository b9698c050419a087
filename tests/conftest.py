"""Fixtures that several test folders share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    # Read when triton is first imported: its kernels then run on CPU tensors, which is how they are tested here.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.tiny import tiny_model

# Tiny models gain nothing from threads, and on a busy machine waiting for each other costs them minutes.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random hybrid model with gates."""
    return tiny_model(tmp_path_factory.mktemp("tiny") / "tiny")


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests keep what they download out of the user's cache; compiled kernels are shared by the whole run."""
    home = tmp_path_factory.getbasetemp() / "home"
    monkeypatch.setenv("MORPH_HOME", str(home))
    yield
