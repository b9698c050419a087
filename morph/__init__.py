"""Morph: hybrid language models whose layer layout is chosen per request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from morph.engine.llm import LLM as LLM
    from morph.engine.params import SamplingParams as SamplingParams
    from morph.layout import Layout as Layout

__all__ = ["LLM", "Layout", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line must start without importing torch.
    if name == "LLM":
        from morph.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from morph.engine.params import SamplingParams

        return SamplingParams
    if name == "Layout":
        from morph.layout import Layout

        return Layout
    raise AttributeError(f"module 'morph' has no attribute {name!r}")
