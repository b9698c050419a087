"""Errors that Morph raises on purpose.

Every message names the thing, the value and the remedy. `InvalidRequest` is the caller's fault (HTTP 400),
everything else says so in its own class.
"""

from __future__ import annotations


class MorphError(Exception):
    """Base of all errors that Morph raises on purpose."""


class InvalidRequest(MorphError, ValueError):
    """A request that cannot be served as asked.

    Args:
        message: names the field, its value and the remedy.
        param: name of the offending request field, for the API's error object.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotFound(MorphError):
    """No model of that name or at that path."""


class CorruptFile(MorphError):
    """A model file that is truncated, of a wrong checksum or not of its format."""


class UnsupportedModel(MorphError):
    """A checkpoint whose architecture, tensor type or format version Morph does not run."""


class OutOfMemory(MorphError):
    """The pool can never hold this request, or the engine does not fit the machine."""


class EngineDead(MorphError):
    """The engine loop stopped; the message carries the cause."""
