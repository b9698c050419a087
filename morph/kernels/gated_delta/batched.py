"""The chunked form for inference on an accelerator: all chunks of all heads in batched matmuls of the inputs' dtype.

No gradient and nothing to compile: batches of ever new shapes, as when layouts are measured, run at once, where kernels
that are tuned per shape would be tuned anew. States, decays and the inverse are float32.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

SMALL = 16
"""Size up to which (I + A)^-1 is a product of powers; above it blocks are merged, stable for similar keys."""


def _inverse(a: torch.Tensor) -> torch.Tensor:
    """(I + A)^-1 of strictly lower triangular A, float32 `[batch, n, n]`, n a power of two times at most `SMALL`."""
    n = a.shape[-1]
    if n <= SMALL:
        x = torch.eye(n, dtype=a.dtype, device=a.device) - a
        power, done = a @ a, 2
        while done < n:
            x = torch.baddbmm(x, x, power)
            done *= 2
            if done < n:
                power = power @ power
        return x
    h = n // 2
    top, bottom = _inverse(torch.cat([a[:, :h, :h], a[:, h:, h:]])).chunk(2)
    out = a.new_zeros(a.shape)
    out[:, :h, :h], out[:, h:, h:] = top, bottom
    out[:, h:, :h] = torch.bmm(torch.bmm(bottom, a[:, h:, :h]), top).neg_()
    return out


@torch.no_grad()
def batched_chunk_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    chunk: int = 64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final states of whole sequences.

    Args:
        q, k, v: `[batch, tokens, heads, head_dim]`, q and k L2-normalised; their dtype is that of the matmuls.
        g: log decay `[batch, tokens, heads]`, <= 0. beta: write strength, same shape.
        initial_state: float32 `[batch, heads, head_dim, head_dim]` or None = zeros.

    Returns:
        o in the dtype of q, `[batch, tokens, heads, head_dim]`; states float32 `[batch, heads, head_dim, head_dim]`.
    """
    dtype = q.dtype
    batch, tokens, heads, dim = q.shape
    pad = -tokens % chunk
    count = (tokens + pad) // chunk

    def cut(x: torch.Tensor) -> torch.Tensor:
        # [chunks * batch * heads, chunk, dim]; padded tokens have beta 0 and decay 1: they change nothing.
        x = F.pad(x, (0, 0, 0, 0, 0, pad)).view(batch, count, chunk, heads, -1)
        return x.permute(1, 0, 3, 2, 4).reshape(count * batch * heads, chunk, -1)

    q, k, v = cut(q), cut(k), cut(v)
    decay_sum = cut(g.float()[..., None]).squeeze(-1).cumsum(-1)
    write = cut(beta.float()[..., None])
    rows = torch.arange(chunk, device=q.device)
    seen = rows[:, None] >= rows[None, :]
    decay = (decay_sum[..., None] - decay_sum[:, None, :]).masked_fill_(~seen, -torch.inf).exp_()
    keys = k.transpose(1, 2)
    inverse = _inverse(torch.bmm(k, keys).float().mul_(decay).mul_(write).tril_(-1)).to(dtype)
    inside = torch.bmm(q, keys).mul_(decay.to(dtype))
    del decay
    since_start = decay_sum.exp()[..., None]
    u = torch.bmm(inverse, v * write.to(dtype))
    w = torch.bmm(inverse, k * (write * since_start).to(dtype))
    del inverse
    to_end = (decay_sum[:, -1:] - decay_sum).exp()[..., None].to(dtype)
    k_end = (k * to_end).view(count, batch * heads, chunk, dim)
    shrink = since_start[:, -1].view(count, batch * heads, 1, 1)
    u, w = (x.view(count, batch * heads, chunk, dim) for x in (u, w))
    state = torch.zeros(batch * heads, dim, dim, device=q.device)
    if initial_state is not None:
        state = initial_state.float().reshape(batch * heads, dim, dim).clone()
    states = torch.empty(count, batch * heads, dim, dim, device=q.device, dtype=dtype)
    values = torch.empty_like(u)
    for n in range(count):
        states[n].copy_(state)
        torch.baddbmm(u[n], w[n], states[n], alpha=-1, out=values[n])
        state = torch.addcmul(torch.bmm(k_end[n].transpose(1, 2), values[n]).float(), state, shrink[n])
    out = torch.bmm(inside, values.view(-1, chunk, dim))
    out = torch.baddbmm(out, q * since_start.to(dtype), states.view(-1, dim, dim))
    out = out.view(count, batch, heads, chunk, dim).permute(1, 0, 3, 2, 4).reshape(batch, count * chunk, heads, dim)
    return out[:, :tokens], state.view(batch, heads, dim, dim)
