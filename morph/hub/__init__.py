"""Models by name: fetch, find and describe them."""

from morph.hub.describe import ModelInfo, info
from morph.hub.pull import pull, resolve_model

__all__ = ["ModelInfo", "info", "pull", "resolve_model"]
