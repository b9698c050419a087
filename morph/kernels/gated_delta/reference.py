"""Gated delta rule in plain torch, on any device (Yang et al., 2024, "Gated Delta Networks").

Per head, with S of shape [d_k, d_v] in float32: S <- e^g S;  v' = beta (v - k^T S);  S <- S + k v'^T;  o = q^T S.

`sequential_gated_delta_rule` is the float64 oracle, `recurrent_gated_delta_rule` the same steps in float32 and
`chunk_gated_delta_rule` the matmul form that training and serving use.
"""

from __future__ import annotations

import torch

NORM_EPS = 1e-6
"""Added to the sum of squares of q and k before the root."""


def l2_normalise(x: torch.Tensor) -> torch.Tensor:
    """x / sqrt(sum(x^2) + 1e-6) over the last dim, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, tail: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Depthwise causal conv without activation.

    Args:
        x: `[batch, tokens, channels]`.
        weight: `[channels, width]`, the last tap meets the current token.
        tail: `[batch, width - 1, channels]`, the inputs before `x`, oldest first; None = zeros.

    Returns:
        y `[batch, tokens, channels]` and the tail after the last token, float32 both.
    """
    x, weight = x.float(), weight.float()
    width, tokens = weight.shape[1], x.shape[1]
    if tail is None:
        tail = x.new_zeros(x.shape[0], width - 1, x.shape[2])
    padded = torch.cat([tail.float(), x], dim=1)
    y = padded[:, :tokens] * weight[:, 0]
    for tap in range(1, width):
        y = y + padded[:, tap : tap + tokens] * weight[:, tap]
    return y, padded[:, tokens:]


def sequential_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence, token by token in float64: what everything else is compared with.

    Args:
        q, k, v: `[batch, tokens, heads, head_dim]`.
        g: log decay `[batch, tokens, heads]`, <= 0. beta: write strength, same shape.
        initial_state: `[batch, heads, head_dim, head_dim]` (d_k, d_v) or None = zeros.

    Returns:
        o `[batch, tokens, heads, head_dim]` and the state after the last token, float64 both.
    """
    return _recurrence(q, k, v, g, beta, initial_state, torch.float64)


def recurrent_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`sequential_gated_delta_rule` in float32: decode."""
    return _recurrence(q, k, v, g, beta, initial_state, torch.float32)


def _recurrence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    batch, tokens, heads, dim = k.shape
    state = q.new_zeros(batch, heads, dim, v.shape[-1]) if initial_state is None else initial_state.to(dtype)
    out = []
    for t in range(tokens):
        state = state * g[:, t].exp()[..., None, None]
        written = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + k[:, t, :, :, None] * written[:, :, None, :]
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(out, dim=1), state


def invert_unit_lower(a: torch.Tensor) -> torch.Tensor:
    """(I + a)^-1 of strictly lower triangular `a` `[..., size, size]`, size a power of two; differentiable.

    Diagonal blocks are inverted and merged two by two: [[A, 0], [C, B]]^-1 = [[A', 0], [-B' C A', B']]. All matmuls,
    and stable for near-identical keys, where a power series of `a` overflows (its terms grow as binomials).
    """
    size = a.shape[-1]
    if size == 1:
        return torch.ones_like(a)
    if size == 2:
        return torch.eye(2, dtype=a.dtype, device=a.device) - a
    half = size // 2
    inverse = invert_unit_lower(torch.stack([a[..., :half, :half], a[..., half:, half:]], dim=-3))
    top, bottom = inverse[..., 0, :, :], inverse[..., 1, :, :]
    corner = -(bottom @ a[..., half:, :half] @ top)
    upper = torch.cat([top, torch.zeros_like(corner)], dim=-1)
    return torch.cat([upper, torch.cat([corner, bottom], dim=-1)], dim=-2)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence over chunks of tokens, all matmuls in float32, differentiable (WY form).

    Inside a chunk with cumulative log decays G, the written values solve
    (I + A) V' = beta V - beta e^G (K S), A_ij = beta_i e^(G_i - G_j) k_i.k_j for j < i.

    Args:
        q, k, v: `[batch, tokens, heads, head_dim]`, q and k L2-normalised.
        g: log decay `[batch, tokens, heads]`, <= 0. beta: write strength, same shape.
        initial_state: float32 `[batch, heads, head_dim, head_dim]` or None = zeros.
        chunk: tokens per chunk, a power of two.

    Returns:
        o float32 `[batch, tokens, heads, head_dim]` and the state after the last token, float32.
    """
    if chunk < 1 or chunk & (chunk - 1):
        raise ValueError(f"chunk {chunk} is not a power of two")
    batch, tokens, heads, dim = k.shape
    value_dim = v.shape[-1]
    pad = -tokens % chunk

    def cut(x: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, heads, ...]` -> `[batch, heads, chunks, chunk, ...]`."""
        if pad:
            # Padding has k = v = 0, g = 0, beta = 0: it neither writes nor decays.
            x = torch.cat([x, x.new_zeros(batch, pad, *x.shape[2:])], dim=1)
        return x.unflatten(1, (-1, chunk)).movedim(3, 1)

    q, k, v, beta = cut(q.float()), cut(k.float()), cut(v.float()), cut(beta.float()).unsqueeze(-1)
    # float64: a token that decays by e^-1000 must not cost the differences between later tokens their digits.
    total = cut(g.double()).cumsum(-1)
    rows = torch.arange(chunk, device=q.device)
    lower = rows[:, None] >= rows[None, :]
    # Masked before exp: above the diagonal the differences are positive and may overflow, also in the gradient.
    gap = (total.unsqueeze(-1) - total.unsqueeze(-2)).float().masked_fill(~lower, -torch.inf)
    decay = gap.exp()
    since_start = total.float().exp().unsqueeze(-1)
    until_end = (total[..., -1:] - total).float().exp().unsqueeze(-1)
    inverse = invert_unit_lower(((beta * (k @ k.mT)) * decay).tril(-1))
    own = inverse @ (beta * v)
    read = inverse @ (beta * since_start * k)
    inside = (q @ k.mT) * decay
    q_start, k_end = q * since_start, (k * until_end).mT
    shrink = since_start[..., -1, :].unsqueeze(-1)
    state = q.new_zeros(batch, heads, dim, value_dim) if initial_state is None else initial_state.float()
    states, written = [], []
    for index in range(q.shape[2]):
        states.append(state)
        values = own[:, :, index] - read[:, :, index] @ state
        written.append(values)
        state = shrink[:, :, index] * state + k_end[:, :, index] @ values
    out = q_start @ torch.stack(states, dim=2) + inside @ torch.stack(written, dim=2)
    return out.movedim(1, 3).flatten(1, 2)[:, :tokens], state
