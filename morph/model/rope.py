"""Rotary position embedding, rotate-half convention, with the scalings that Llama-family checkpoints use."""

from __future__ import annotations

import math
from typing import Any

import torch

from morph.config import ModelConfig
from morph.errors import UnsupportedModel


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Angular frequencies of the head's dimension pairs, float32 `[head_dim / 2]`.

    Raises:
        UnsupportedModel: a `rope_scaling` type other than default, linear and llama3.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    scaling = config.rope_scaling
    if not scaling:
        return frequencies
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(scaling["factor"])
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    raise UnsupportedModel(f"rope_scaling type {kind!r} is not supported; use a model with default, linear or llama3")


def _llama3(frequencies: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's rule: long wavelengths are stretched by the factor, short ones kept, between them blended."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    context = float(scaling["original_max_position_embeddings"])
    wavelengths = 2 * math.pi / frequencies
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    out = torch.where(wavelengths > context / low, frequencies / factor, frequencies)
    medium = (wavelengths <= context / low) & (wavelengths >= context / high)
    return torch.where(medium, blended, out)


def rope_tables(
    config: ModelConfig, length: int, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions 0…length-1, float32 `[length, head_dim / 2]` each."""
    angles = torch.outer(torch.arange(length).float(), inverse_frequencies(config))
    return angles.cos().to(device), angles.sin().to(device)


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` `[..., heads, head_dim]` by `cos`, `sin` `[..., head_dim / 2]` (one angle set per token)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
