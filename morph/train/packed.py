"""q, k and v of all heads as one tensor `[batch, tokens, q heads + 2 · kv heads, head_dim]`, without branches.

A compiler that fuses "split, then different work on each part" makes, in the backward pass, one kernel that computes
every part's formula for every element. With a factor per head instead (1 or 0 where a head has nothing to do), forward
and backward are one formula each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from morph.model.attention import Rope
from morph.model.ssm.gated_delta_net import MixerSizes


def rotate_heads(heads: torch.Tensor, rope: Rope, rotated: int) -> torch.Tensor:
    """`apply_rope` on the first `rotated` heads of `[..., tokens, heads, head_dim]`; the others pass."""
    cos, sin = (table.to(heads.dtype)[:, None, None] for table in rope)  # [tokens, 1, 1, head_dim / 2]
    turns = (torch.arange(heads.shape[-2], device=heads.device) < rotated)[:, None, None]
    sign = torch.tensor([-1.0, 1.0], device=heads.device, dtype=heads.dtype)[:, None]
    pairs = heads.unflatten(-1, (2, -1))
    turned = pairs * torch.where(turns, cos, 1.0) + pairs.flip(-2) * (sign * torch.where(turns, sin, 0.0))
    return turned.flatten(-2)


def rotated_heads(projected: torch.Tensor, rope: Rope, sizes: MixerSizes) -> torch.Tensor:
    """Heads of projected q, k, v `[batch, tokens, channels]`, q and k with RoPE."""
    heads = projected.unflatten(-1, (-1, sizes.head_dim))
    return rotate_heads(heads, rope, (sizes.q + sizes.kv) // sizes.head_dim)


def project(x: torch.Tensor, weights: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Projected q, k, v, and the logits of decay and write strength; weights may be of a wider dtype than `x`."""
    qkv, ab, ab_bias = (weight.to(x.dtype) for weight in weights)
    return F.linear(x, qkv), F.linear(x, ab, ab_bias)


def normalised_heads(
    convolved: torch.Tensor, ab: torch.Tensor, sizes: MixerSizes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `recurrence_inputs` computes, before k and v are repeated: heads with q and k L2-normalised, g, beta."""
    heads = convolved.unflatten(-1, (-1, sizes.head_dim)).float()
    normed = (torch.arange(heads.shape[-2], device=heads.device) < (sizes.q + sizes.kv) // sizes.head_dim)[:, None]
    heads = heads * torch.where(normed, torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6), 1.0)
    a, b = ab.float().chunk(2, dim=-1)
    g, beta = F.logsigmoid(a), torch.sigmoid(b)
    if sizes.shared != 1:
        g, beta = (t.repeat_interleave(sizes.shared, dim=2) for t in (g, beta))
    return heads.to(convolved.dtype), g, beta


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, query: int, keys: int) -> tuple[torch.Tensor, ...]:
        ctx.keys = keys
        q, k, v = heads.split([query, keys, keys], dim=-2)
        group = query // keys
        return q.contiguous(), k.repeat_interleave(group, dim=-2), v.repeat_interleave(group, dim=-2)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dq, dk, dv = upstream
        dk, dv = (t.unflatten(-2, (ctx.keys, -1)).sum(-2) for t in (dk, dv))
        return torch.cat([dq, dk, dv], dim=-2), None, None


def spread_heads(heads: torch.Tensor, sizes: MixerSizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v `[batch, tokens, q heads, head_dim]`, contiguous, k and v repeated."""
    q, k, v = _Spread.apply(heads, sizes.q // sizes.head_dim, sizes.kv // sizes.head_dim)
    return q, k, v
