"""Chunked gated delta rule in plain torch: all matmuls, differentiable, any device.

Per head, with S `[d_k, d_v]`: `S <- e^g S; v' = beta (v - k^T S); S <- S + k v'^T; o = q^T S` (Yang et al., 2024,
the WY form over chunks).
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

LEAF = 16


def invert_unit_lower(a: torch.Tensor) -> torch.Tensor:
    """Inverse of I + a for strictly lower triangular `a` `[..., size, size]`, size a power of two times 16 or less.

    Blocks are merged two by two: stable where a series in powers of `a` overflows (similar keys), and all matmuls.
    """
    size = a.shape[-1]
    if size <= LEAF:
        return _invert_leaf(a)
    half = size // 2
    diagonal = torch.stack([a[..., :half, :half], a[..., half:, half:]], dim=-3)
    inverse = invert_unit_lower(diagonal)
    top, bottom = inverse[..., 0, :, :], inverse[..., 1, :, :]
    corner = -(bottom @ a[..., half:, :half] @ top)
    return torch.cat([F.pad(top, (0, half)), torch.cat([corner, bottom], dim=-1)], dim=-2)


def _invert_leaf(a: torch.Tensor) -> torch.Tensor:
    """(I + a)^-1 = (I - a)(I + a^2)(I + a^4)...: exact, since a is nilpotent; short enough not to overflow."""
    size = a.shape[-1]
    eye = torch.eye(size, dtype=a.dtype, device=a.device)
    inverse, power, degree = eye - a, a @ a, 2
    while degree < size:
        inverse = inverse + inverse @ power
        power = power @ power
        degree *= 2
    return inverse


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of all tokens and the final state.

    Args:
        q, k, v: `[batch, tokens, heads, head_dim]`, q and k L2-normalised; computed in float32.
        g: log decay `[batch, tokens, heads]`, <= 0. beta: write strength, same shape.
        initial_state: float32 `[batch, heads, head_dim, head_dim]` or None = zeros.
        chunk: tokens per chunk, a power of two times 16 or a power of two below.

    Returns:
        o float32 `[batch, tokens, heads, head_dim]` and the state after the last token.
    """
    batch, tokens, heads, dim = q.shape
    pad = -tokens % chunk

    def chunked(x: torch.Tensor) -> torch.Tensor:
        x = F.pad(x.float(), (0, 0, 0, 0, 0, pad))
        return (
            x.unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4).contiguous()
        )  # [batch, heads, chunks, chunk, dim]

    # Padding has k = v = 0, g = 0, beta = 0: it neither writes nor decays.
    q, k, v = chunked(q), chunked(k), chunked(v)
    g = chunked(g.unsqueeze(-1)).squeeze(-1).cumsum(-1)
    beta = chunked(beta.unsqueeze(-1))
    rows = torch.arange(chunk, device=q.device)
    lower = rows[:, None] >= rows[None, :]
    decay = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
    a = (beta * (k @ k.mT) * decay).tril(-1)
    solve = invert_unit_lower(a)
    u = solve @ (beta * v)
    w = solve @ (beta * k * g.exp().unsqueeze(-1))
    inside = (q @ k.mT) * decay
    q_decayed = q * g.exp().unsqueeze(-1)
    total = g[..., -1]
    k_rest = k * (total.unsqueeze(-1) - g).exp().unsqueeze(-1)
    shrink = total.exp()[..., None, None]
    state = q.new_zeros(batch, heads, dim, v.shape[-1]) if initial_state is None else initial_state.float()
    states, values = [], []
    for index in range(q.shape[2]):
        states.append(state)
        value = u[:, :, index] - w[:, :, index] @ state
        values.append(value)
        state = shrink[:, :, index] * state + k_rest[:, :, index].mT @ value
    out = q_decayed @ torch.stack(states, dim=2) + inside @ torch.stack(values, dim=2)
    return out.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :tokens], state
