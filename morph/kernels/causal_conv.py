"""Causal depthwise convolution for training on CUDA: one Triton kernel forward, one backward.

The plain torch form is `morph.model.ssm.gated_delta_net.causal_depthwise`; compilers make five kernels of it that move
three times the bytes.
"""

from __future__ import annotations

from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # no triton: `has_causal_conv` says so
    triton = None

TOKENS, CHANNELS = 64, 64
"""Tile of one program."""


def has_causal_conv(device: torch.device) -> bool:
    """True where `causal_conv` runs: CUDA with triton."""
    return device.type == "cuda" and triton is not None


if triton is not None:

    @triton.jit
    def _forward_kernel(
        x, weight, y, tokens, channels, WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr
    ):  # fmt: skip
        # One tile of one sequence: y[t] = sum over taps of x[t - WIDTH + 1 + tap] * weight[tap].
        tile, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        t = tile * TOKENS + tl.arange(0, TOKENS)
        c = group * CHANNELS + tl.arange(0, CHANNELS)
        inside = c < channels
        base = row * tokens * channels
        total = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
        for tap in tl.static_range(WIDTH):
            at = t + (tap - WIDTH + 1)
            seen = ((at >= 0) & (at < tokens))[:, None] & inside[None, :]
            value = tl.load(x + base + at[:, None] * channels + c[None, :], mask=seen, other=0.0).to(tl.float32)
            factor = tl.load(weight + c * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
            total += value * factor[None, :]
        kept = (t < tokens)[:, None] & inside[None, :]
        tl.store(y + base + t[:, None] * channels + c[None, :], total.to(y.dtype.element_ty), mask=kept)

    @triton.jit
    def _backward_kernel(
        x, weight, dy, dx, dweight, tokens, channels,
        WIDTH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    ):  # fmt: skip
        # Gradient of a tile of x, and what the tile adds to the gradient of the taps (`dweight`, one row per tile).
        tile, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
        t = tile * TOKENS + tl.arange(0, TOKENS)
        c = group * CHANNELS + tl.arange(0, CHANNELS)
        inside = c < channels
        kept = (t < tokens)[:, None] & inside[None, :]
        base = row * tokens * channels
        value = tl.load(x + base + t[:, None] * channels + c[None, :], mask=kept, other=0.0).to(tl.float32)
        total = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
        part = (row * tl.num_programs(0) + tile) * channels * WIDTH
        for tap in tl.static_range(WIDTH):
            at = t + (WIDTH - 1 - tap)
            seen = (at < tokens)[:, None] & inside[None, :]
            slope = tl.load(dy + base + at[:, None] * channels + c[None, :], mask=seen, other=0.0).to(tl.float32)
            factor = tl.load(weight + c * WIDTH + tap, mask=inside, other=0.0).to(tl.float32)
            total += slope * factor[None, :]
            tl.store(dweight + part + c * WIDTH + tap, tl.sum(slope * value, axis=0), mask=inside)
        tl.store(dx + base + t[:, None] * channels + c[None, :], total.to(dx.dtype.element_ty), mask=kept)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        batch, tokens, channels = x.shape
        out = torch.empty_like(x)
        grid = (triton.cdiv(tokens, TOKENS), triton.cdiv(channels, CHANNELS), batch)
        _forward_kernel[grid](x, weight, out, tokens, channels, weight.shape[1], TOKENS, CHANNELS)
        ctx.save_for_backward(x, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        dy = upstream[0].contiguous()
        batch, tokens, channels = x.shape
        tiles = triton.cdiv(tokens, TOKENS)
        dx = torch.empty_like(x)
        parts = torch.empty((batch * tiles, *weight.shape), dtype=torch.float32, device=x.device)
        grid = (tiles, triton.cdiv(channels, CHANNELS), batch)
        _backward_kernel[grid](x, weight, dy, dx, parts, tokens, channels, weight.shape[1], TOKENS, CHANNELS)
        return dx, parts.sum(0).to(weight.dtype)


def causal_conv(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`causal_depthwise` without a past: `x` `[batch, tokens, channels]`, `weight` `[channels, width]`; differentiable.

    Sums are float32; the output has the dtype of `x`, whatever that of `weight`.
    """
    out: torch.Tensor = _CausalConv.apply(x, weight)
    return out
