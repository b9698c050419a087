"""What a model is, in numbers."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from morph.checkpoint.source import open_model
from morph.config import ModelConfig
from morph.hub.registry import ENTRIES


@dataclass(frozen=True)
class ModelInfo:
    """Facts about one model.

    Attributes:
        base_parameters: numbers of the frozen model. delta_parameters: what conversion added (mixers), gates apart.
        state_bytes_per_block: what one ssm block keeps for one request, whatever its length; window ring at bfloat16.
        kv_bytes_per_token_per_block: what one attention block keeps per token, at bfloat16.
        break_even_tokens: first context length at which an ssm block keeps less memory than an attention block.
        budgets: attention budgets that the gates are calibrated for.
        files: name -> bytes.
    """

    name: str
    revision: str | None
    licence: str | None
    path: str
    blocks: int
    adaptive_blocks: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    max_context: int
    base_parameters: int
    delta_parameters: int
    gate_parameters: int
    state_bytes_per_block: int | None
    kv_bytes_per_token_per_block: int
    break_even_tokens: int | None
    window: int | None
    budgets: tuple[float, ...]
    files: dict[str, int]


def info(path: str | os.PathLike[str]) -> ModelInfo:
    """Read a model's description; no weights are read.

    Raises:
        ModelNotFound, CorruptFile, UnsupportedModel: as `open_model`.
    """
    path = Path(path)
    source = open_model(path)
    config, meta = source.config, source.meta
    counts = {"base": 0, "delta": 0, "gate": 0}
    for name in source.names():
        kind = "base" if not name.startswith("blocks.") else "gate" if ".gate." in name else "delta"
        counts[kind] += math.prod(source.shape(name))
    kv_bytes = 2 * config.kv_size * 2
    state = state_bytes(config)
    known = ENTRIES.get((str(meta.get("name")), str(meta.get("revision"))))
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return ModelInfo(
        name=str(meta.get("name") or path.name),
        revision=meta.get("revision"),
        licence=meta.get("licence") or (known.licence if known else None),
        path=str(path),
        blocks=config.num_blocks,
        adaptive_blocks=sum(kind == "adaptive" for kind in config.block_kinds),
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_context=config.max_context,
        base_parameters=counts["base"],
        delta_parameters=counts["delta"],
        gate_parameters=counts["gate"],
        state_bytes_per_block=state,
        kv_bytes_per_token_per_block=kv_bytes,
        # A window's ring grows with the context up to its length, like KV, so the break-even lies beyond it.
        break_even_tokens=None if state is None else state // kv_bytes + 1,
        window=config.ssm.window if config.ssm else None,
        budgets=tuple((meta.get("gate") or {}).get("budgets", ())),
        files={
            file.name if path.is_file() else file.relative_to(path).as_posix(): file.stat().st_size
            for file in files
            if not file.name.startswith(".")
        },
    )


def state_bytes(config: ModelConfig) -> int | None:
    """Bytes of one ssm block's state: recurrent matrices and conv tail in float32, window ring in bfloat16."""
    if config.ssm is None or not config.has_ssm:
        return None
    recurrent = config.num_state_heads * config.head_dim**2 * 4
    tail = (config.ssm.conv_width - 1) * config.qkv_size * 4
    return recurrent + tail + config.ssm.window * 2 * config.kv_size * 2
