"""Which request fields are known, which are harmless, and what is said about the others."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from morph.server.errors import ApiError, bad_request
from morph.server.schema import GenerationBody, MorphOptions

Body = TypeVar("Body", bound=BaseModel)

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "parallel_tool_calls",
    }
)  # fmt: skip
"""OpenAI fields that change nothing about the answer; read past."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}
"""OpenAI fields that would change the answer and that Morph does not have -> the values that ask for nothing."""


def parse(model: type[Body], data: dict[str, Any]) -> Body:
    """Check a JSON object against a model.

    Raises:
        ApiError: 400 that names the first offending field.
    """
    known = {name: value for name, value in data.items() if not _skip(model, name, value)}
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise _as_bad_request(error) from None


def _skip(model: type[BaseModel], name: str, value: Any) -> bool:
    """True for a field that asks for nothing; raises for one that asks for what Morph does not have."""
    if name in model.model_fields or not issubclass(model, GenerationBody):
        return False
    if name in HARMLESS or (name in UNSUPPORTED and (value is None or value in UNSUPPORTED[name])):
        return True
    if name in UNSUPPORTED:
        raise bad_request(f"{name} is not supported; leave it out", name, "unsupported_parameter")
    raise bad_request(f"unknown field {name!r}; leave it out or check its spelling", name, "unknown_parameter")


def _as_bad_request(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    # Union members append their type's name to the location; the client only knows the field.
    parts = [str(part) for part in first["loc"]]
    param = ".".join(parts[:2] if parts[0] in ("morph", "stream_options") else parts[:1]) if parts else None
    if first["type"] == "extra_forbidden":
        message = f"unknown field {param!r}; leave it out or check its spelling"
        if parts[0] == "morph":
            message = f"unknown field {param!r}; morph has {', '.join(MorphOptions.model_fields)}"
        return bad_request(message, param, "unknown_parameter")
    if first["type"] == "missing":
        return bad_request(f"{param} is missing; give it", param, "missing_required_parameter")
    reason = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "value_error":
        return bad_request(f"{param} has {reason}", param, "invalid_value")
    value = repr(first["input"])
    shown = value if len(value) <= 80 else f"{value[:77]}..."
    return bad_request(f"{param} is {shown}: {reason[:1].lower()}{reason[1:]}", param, "invalid_value")
