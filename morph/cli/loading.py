"""Opening a model for a command. Imports torch, so commands import this when they run."""

from __future__ import annotations

import time

from rich.console import Console

from morph.config import EngineConfig
from morph.server.serve import ManagedEngine


def load_engine(model: str, config: EngineConfig, device: str = "cpu") -> ManagedEngine:
    """An engine for a model name or path, not started yet; says on stderr what takes the time.

    Raises:
        ModelNotFound: no such model.
        MorphError: it cannot be read, or does not fit this machine.
    """
    console = Console(stderr=True)
    begin = time.perf_counter()
    with console.status(f"loading {model}"):
        from morph.engine.async_engine import AsyncEngine
        from morph.hub import resolve_model

        engine = AsyncEngine.from_model(resolve_model(model), config, device)
    seconds = time.perf_counter() - begin
    console.print(f"loaded {engine.model_name} ({config.dtype}) in {seconds:.1f} s", style="dim", highlight=False)
    return engine
