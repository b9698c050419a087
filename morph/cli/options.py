"""Options that several commands share, and the engine configuration made of them."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import typer

from morph.config import EngineConfig

UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_size(text: str) -> int:
    """Bytes of `512MB`, `4GiB`, `1.5g` or a plain number.

    Raises:
        typer.BadParameter: not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; use for example 512MB or 4GiB")
    return int(float(match[1]) * UNITS[match[2] or ""])


ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A name (NAME or NAME@REVISION), a model folder or a .gguf file."),
]
DtypeOption = Annotated[Literal["float32", "bfloat16"], typer.Option("--dtype", help="Type of weights and KV cache.")]
DeviceOption = Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="Where the model runs.")]
MemoryOption = Annotated[
    int | None,
    typer.Option(
        "--memory",
        parser=parse_size,
        metavar="SIZE",
        help="Memory for KV pages and states, e.g. 4GiB; default: by need.",
    ),
]
MaxRequestsOption = Annotated[int, typer.Option("--max-requests", min=1, help="Requests that run at the same time.")]
MaxContextOption = Annotated[
    int | None,
    typer.Option("--max-context", min=2, help="Longest prompt + answer in tokens; default: the model's."),
]
BudgetOption = Annotated[
    float | None,
    typer.Option(
        "--attention-budget",
        "--budget",
        min=0.0,
        max=1.0,
        help="0 = cheapest, 1 = all attention; default: 0.5.",
    ),
]

DEFAULTS = EngineConfig()


def engine_config(
    dtype: Literal["float32", "bfloat16"],
    memory: int | None,
    max_context: int | None,
    max_requests: int = DEFAULTS.max_requests,
    budget: float | None = None,
    max_waiting: int = DEFAULTS.max_waiting,
) -> EngineConfig:
    """The engine's limits from command-line options."""
    return EngineConfig(
        dtype=dtype,
        memory_bytes=memory,
        max_context=max_context,
        max_requests=max_requests,
        max_waiting=max_waiting,
        attention_budget=DEFAULTS.attention_budget if budget is None else budget,
    )
