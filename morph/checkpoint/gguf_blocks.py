"""Dequantising GGUF blocks to float32.

The common types are done here with torch, several times faster than the `gguf` package's numpy and with the same
bits; all others go through the package. Block layouts: ggml-common.h of ggml.
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import torch

Kind = gguf.GGMLQuantizationType

TYPES = (
    Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0,
    Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS,
)  # fmt: skip
"""Types that are read."""


def dequantise(raw: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Values of whole rows of blocks.

    Args:
        raw: uint8 `[rows, bytes per row]`.

    Returns:
        float32 `[rows, columns]`.
    """
    if kind in _FLOATS:
        return raw.contiguous().view(_FLOATS[kind]).float()
    if kind in _BLOCKS:
        return _BLOCKS[kind](raw.view(raw.shape[0], -1, gguf.GGML_QUANT_SIZES[kind][1])).flatten(1)
    return torch.from_numpy(np.asarray(gguf.quants.dequantize(raw.numpy(), kind), dtype=np.float32))


def _halves(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """The float16 at byte `begin` of each block, float32 `[rows, blocks, 1]`."""
    return blocks[..., begin : begin + 2].contiguous().view(torch.float16).float()


def _nibbles(blocks: torch.Tensor, begin: int) -> torch.Tensor:
    """16 bytes of two 4-bit values each: the low ones first, then the high ones, `[rows, blocks, 32]`."""
    packed = blocks[..., begin : begin + 16]
    return torch.cat([packed & 0xF, packed >> 4], dim=-1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks, 2).float().sub_(8).mul_(_halves(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks, 4).float().mul_(_halves(blocks, 0)).add_(_halves(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[..., 2:].contiguous().view(torch.int8).float().mul_(_halves(blocks, 0))


_FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_BLOCKS: dict[Kind, Callable[[torch.Tensor], torch.Tensor]] = {
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q8_0: _q8_0,
}
