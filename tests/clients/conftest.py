"""A tiny real model behind a socket, under the name that the documentation uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from morph.config import EngineConfig
from morph.engine.async_engine import AsyncEngine
from morph.server.app import create_app
from tests.server.conftest import running

NAME = "smollm2-135m"


@dataclass
class Served:
    """One model and its address."""

    url: str
    engine: AsyncEngine
    folder: Path


@pytest.fixture
def serve() -> Iterator[Callable[[Path], Served]]:
    """Serves a model folder until the test ends."""
    with ExitStack() as stack:

        def start(folder: Path) -> Served:
            config = EngineConfig(dtype="float32", max_requests=4, memory_bytes=32 << 20, poison=True)
            engine = AsyncEngine.from_model(folder, config)
            engine.start()
            stack.callback(engine.stop)
            url = stack.enter_context(running(create_app(engine, NAME)))
            return Served(url, engine, folder)

        yield start


@pytest.fixture
def served(serve: Callable[[Path], Served], tiny_folder: Path) -> Served:
    """The tiny hybrid with gates."""
    return serve(tiny_folder)
