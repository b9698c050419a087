"""What a model is, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from morph.checkpoint.safetensors_file import SafetensorsFiles
from morph.checkpoint.source import open_model
from morph.config import ModelConfig


@dataclass(frozen=True)
class ModelInfo:
    """Facts about one model.

    Attributes:
        delta_parameters: numbers that conversion added (mixers), gates apart.
        state_bytes_per_block: what one ssm block keeps for one request, whatever its length.
        kv_bytes_per_token_per_block: what one attention block keeps per token, at bfloat16.
        break_even_tokens: context length above which an ssm block keeps less memory than an attention block.
    """

    name: str
    revision: str | None
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
    licence: str | None


def base_parameters(config: ModelConfig) -> int:
    """Parameters of the base model."""
    hidden = config.hidden_size
    attention = hidden * config.qkv_size + config.q_size * hidden
    block = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    embeddings = config.vocab_size * hidden * (1 if config.tie_embeddings else 2)
    return config.num_blocks * block + embeddings + hidden


def info(path: str | Path) -> ModelInfo:
    """Read a model's description.

    Raises:
        ModelNotFound, CorruptFile, UnsupportedModel: as `open_model`.
    """
    path = Path(path)
    source = open_model(path)
    config, meta = source.config, source.meta
    kv_bytes = 2 * config.kv_size * 2
    state = None
    if config.ssm is not None and config.has_ssm:
        ring = config.ssm.window * kv_bytes
        tail = (config.ssm.conv_width - 1) * config.qkv_size * 4
        state = config.num_state_heads * config.head_dim**2 * 4 + tail + ring
    counts = {"delta": 0, "gate": 0}
    if meta.get("model_type") == "morph":
        files = {"delta": meta.get("delta", []), "gate": ["gate.safetensors"] if meta.get("gate") else []}
        for kind, names in files.items():
            tensors = SafetensorsFiles(path / name for name in names)
            counts[kind] = sum(tensors.get(name).numel() for name in tensors.names())
    return ModelInfo(
        name=str(meta.get("name") or path.name),
        revision=meta.get("revision"),
        path=str(path),
        blocks=config.num_blocks,
        adaptive_blocks=sum(kind == "adaptive" for kind in config.block_kinds),
        hidden_size=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_context=config.max_context,
        base_parameters=base_parameters(config),
        delta_parameters=counts["delta"],
        gate_parameters=counts["gate"],
        state_bytes_per_block=state,
        kv_bytes_per_token_per_block=kv_bytes,
        break_even_tokens=None if state is None else -(-state // kv_bytes),
        window=config.ssm.window if config.ssm else None,
        budgets=tuple((meta.get("gate") or {}).get("budgets", ())),
        licence=meta.get("licence"),
    )
