"""Weights as the serving kernels want them: fused projections, packed once, no second copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from morph.config import ModelConfig
from morph.kernels.interface import Kernels, PackedLinear, SSMParams


class TensorSource(Protocol):
    """Where weights come from, one tensor at a time."""

    def get(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The tensor of that name, dequantised to `dtype`."""
        ...

    def has(self, name: str) -> bool:
        """True when the model has a tensor of that name."""
        ...


@dataclass(frozen=True)
class AttentionWeights:
    """`qkv` `[q + 2 kv, hidden]`, `out` `[hidden, q]`, optional QK-norm gains float32 `[head_dim]`."""

    qkv: PackedLinear
    out: PackedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


@dataclass(frozen=True)
class SSMWeights:
    """`inputs` = q, k, v | decay, write strength | output gate down, in one projection of the normed input."""

    inputs: PackedLinear
    params: SSMParams
    gate_up: PackedLinear
    out: PackedLinear


@dataclass(frozen=True)
class BlockWeights:
    """One block; a mixer that the block does not have is None."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    attention: AttentionWeights | None
    ssm: SSMWeights | None
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a model. `head` is `embedding` itself when they are tied."""

    embedding: PackedLinear
    blocks: list[BlockWeights]
    norm: torch.Tensor
    head: PackedLinear


def load_weights(
    source: TensorSource,
    config: ModelConfig,
    kernels: Kernels,
    dtype: torch.dtype,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> ModelWeights:
    """Read and pack all weights, one projection at a time so that the peak stays near the final size.

    Args:
        dtype: of the projections; norms and small ssm parameters stay float32.
        cos, sin: rotary tables of the model, float32 `[max_context, head_dim / 2]`.
    """

    def read(*names: str) -> torch.Tensor:
        parts = [source.get(name, dtype) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def pack(*names: str, bias: torch.Tensor | None = None) -> PackedLinear:
        return kernels.pack_linear(read(*names).to(kernels.device), bias)

    def small(name: str) -> torch.Tensor:
        return source.get(name, torch.float32).to(kernels.device)

    blocks = []
    for index, kind in enumerate(config.block_kinds):
        base, mixer = f"model.layers.{index}.", f"blocks.{index}.ssm."
        attention = ssm = None
        if kind != "ssm":
            attention = AttentionWeights(
                qkv=pack(*(f"{base}self_attn.{x}_proj.weight" for x in "qkv")),
                out=pack(f"{base}self_attn.o_proj.weight"),
                q_norm=small(f"{base}self_attn.q_norm.weight") if config.qk_norm else None,
                k_norm=small(f"{base}self_attn.k_norm.weight") if config.qk_norm else None,
            )
        if kind != "attention":
            assert config.ssm is not None
            ssm = SSMWeights(
                inputs=pack(*(f"{mixer}{x}.weight" for x in ("qkv", "ab", "gate_down"))),
                params=SSMParams.build(
                    config,
                    conv_weight=small(f"{mixer}conv.weight"),
                    ab_bias=small(f"{mixer}ab.bias"),
                    gain=small(f"{mixer}gain"),
                    mix=small(f"{mixer}mix") if config.ssm.window else None,
                    cos=cos,
                    sin=sin,
                ),
                gate_up=pack(f"{mixer}gate_up.weight", bias=small(f"{mixer}gate_up.bias")),
                out=pack(f"{mixer}out.weight"),
            )
        blocks.append(
            BlockWeights(
                input_norm=small(f"{base}input_layernorm.weight"),
                post_norm=small(f"{base}post_attention_layernorm.weight"),
                attention=attention,
                ssm=ssm,
                gate_up=pack(f"{base}mlp.gate_proj.weight", f"{base}mlp.up_proj.weight"),
                down=pack(f"{base}mlp.down_proj.weight"),
            )
        )
    embedding = pack("model.embed_tokens.weight")
    head = embedding if config.tie_embeddings else pack("lm_head.weight")
    return ModelWeights(embedding, blocks, small("model.norm.weight"), head)
