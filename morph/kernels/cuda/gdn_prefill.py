"""Gated DeltaNet over the tokens of one sequence: conv and norm in one kernel, the chunk scan, the window beside it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch.nn import functional as F

from morph.kernels.cuda.attention_prefill import window_attention
from morph.kernels.gated_delta import chunk_gated_delta_rule
from morph.kernels.gated_delta.fla import MAX_HEAD_DIM, fla_chunk_rule, has_fla
from morph.kernels.interface import SSMParams
from morph.kernels.torch_backend import kv_pages, rotate, split_heads


# Lengths differ from prompt to prompt: a kernel of its own for each divisor would compile while requests wait.
@triton.jit(do_not_specialize=["n"])
def _conv_norm(
    x, w, tail, q, k, v, n, stride_x, stride_tap, HAS_TAIL: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    REPEAT: tl.constexpr, D: tl.constexpr, TAPS: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    channel = head * D + d
    y = tl.zeros((BT, D), tl.float32)
    for tap in tl.static_range(TAPS + 1):
        at = t - TAPS + tap
        inside = (at >= 0) & (at < n)
        part = tl.load(
            x + at.to(tl.int64)[:, None] * stride_x + channel[None, :],
            mask=inside[:, None] & (channel[None, :] >= 0), other=0.0,
        ).to(tl.float32)  # fmt: skip
        if HAS_TAIL:
            old = tl.load(
                tail + (at + TAPS)[:, None] * stride_tap + channel[None, :],
                mask=((at < 0) & (at >= -TAPS))[:, None] & (channel[None, :] >= 0), other=0.0,
            )  # fmt: skip
            part += old
        y += part * tl.load(w + channel * (TAPS + 1) + tap)[None, :]
    keep = (t < n)[:, None] & (d[None, :] < D)
    line = t.to(tl.int64)[:, None]
    if head < HEADS + KV_HEADS:
        y = y * tl.rsqrt(tl.sum(y * y, axis=1) + 1e-6)[:, None]
    y = y.to(q.dtype.element_ty)
    if head < HEADS:
        tl.store(q + (line * HEADS + head) * D + d[None, :], y, mask=keep)
    else:
        to = k if head < HEADS + KV_HEADS else v
        kv_head = (head - HEADS) % KV_HEADS
        for r in tl.static_range(REPEAT):
            tl.store(to + (line * (KV_HEADS * REPEAT) + kv_head * REPEAT + r) * D + d[None, :], y, mask=keep)


def conv_norm(
    x: torch.Tensor, params: SSMParams, tail: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Causal conv, then L2 norm of q and k: q `[rows, heads, d]`, k and v `[rows, state_heads, d]` of `dtype`.

    Args:
        x: `[rows, >= qkv]`. tail: float32 `[taps, qkv]`, inputs before x, or None = zeros.
    """
    rows, dim = x.shape[0], params.head_dim
    q = torch.empty((rows, params.heads, dim), dtype=dtype, device=x.device)
    k = torch.empty((rows, params.state_heads, dim), dtype=dtype, device=x.device)
    v = torch.empty_like(k)
    block = 16
    _conv_norm[(triton.cdiv(rows, block), params.heads + 2 * params.kv_heads)](
        x, params.conv_weight, x if tail is None else tail, q, k, v, rows, x.stride(0),
        0 if tail is None else tail.stride(0), HAS_TAIL=tail is not None, HEADS=params.heads, KV_HEADS=params.kv_heads,
        REPEAT=params.state_heads // params.kv_heads, D=dim, TAPS=params.conv_weight.shape[1] - 1, BT=block,
        num_warps=2,
    )  # fmt: skip
    return q, k, v


def _chunk_rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, initial: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scan of one sequence: fla-core's kernels where they run, else batched matmuls or the reference."""
    args = (q[None], k[None], v[None], g[None], beta[None], initial)
    half = q.dtype is torch.bfloat16
    with torch.no_grad():
        if q.is_cuda and half and q.shape[-1] <= MAX_HEAD_DIM and has_fla(q.device):
            o, final = fla_chunk_rule(*args, True, None)
        else:
            o, final = chunk_gated_delta_rule(*args, output_final_state=True)
    assert final is not None
    return o[0], final


def _window(
    x: torch.Tensor, params: SSMParams, paged: torch.Tensor, table_row: torch.Tensor, known: int, start: int
) -> torch.Tensor:
    """Sliding-window attention `[rows, heads · d]`, `paged` as `kv_pages` makes it; fills the ring."""
    rows, dim, window, dtype = x.shape[0], params.head_dim, params.window, paged.dtype
    at = torch.arange(start, start + rows, device=x.device)
    q, k, v = split_heads(x[:, : params.qkv_size], params)
    q, k = (rotate(part.float(), params.cos, params.sin, at).to(dtype).flatten(1) for part in (q, k))
    v = v.to(dtype).flatten(1)
    tokens = paged.shape[2]
    ring_pages = -(-window // tokens)
    ring = table_row[params.state_heads :][: params.kv_heads * ring_pages].long().view(-1, ring_pages)
    before = min(known, window - 1)
    if before:
        place = torch.arange(start - before, start, device=x.device) % window
        old = paged[ring[:, place // tokens], :, place % tokens]  # [kv_heads, before, 2, d]
        k = torch.cat([old[:, :, 0].transpose(0, 1).flatten(1), k])
        v = torch.cat([old[:, :, 1].transpose(0, 1).flatten(1), v])
    out = torch.empty((rows, params.heads * dim), dtype=dtype, device=x.device)
    window_attention(q, k, v, start, before, window, dim**-0.5, dim, out)
    kept = at[-window:] % window
    units, where = ring[:, kept // tokens], (kept % tokens).expand(params.kv_heads, -1)
    paged[units, 0, where] = k[-len(kept) :].unflatten(1, (-1, dim)).transpose(0, 1)
    paged[units, 1, where] = v[-len(kept) :].unflatten(1, (-1, dim)).transpose(0, 1)
    return out


def gdn_prefill(
    x: torch.Tensor,
    params: SSMParams,
    storage: torch.Tensor,
    dtype: torch.dtype,
    table_row: torch.Tensor,
    conv_tail: torch.Tensor,
    has_state: bool,
    start: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """See `Kernels.gdn_prefill`. dtype: of the scan's products and of the ring."""
    rows, dim, taps = x.shape[0], params.head_dim, params.conv_weight.shape[1] - 1
    units = table_row[: params.state_heads].long()
    states = storage.view(torch.float32).view(-1, dim, dim)
    q, k, v = conv_norm(x, params, conv_tail if has_state else None, dtype)
    ab = x[:, params.qkv_size : params.qkv_size + 2 * params.state_heads].float() + params.ab_bias
    a, b = ab.chunk(2, dim=-1)
    g, beta = F.logsigmoid(a), torch.sigmoid(b)
    initial = states[units][None] if has_state else None
    if params.state_heads == params.heads:
        o, final = _chunk_rule(q, k, v, g, beta, initial)
    else:
        # One query of the group at a time: all read the same states.
        parts = [
            _chunk_rule(part.contiguous(), k, v, g, beta, initial)
            for part in q.unflatten(1, (params.state_heads, -1)).unbind(2)
        ]
        o, final = torch.stack([part[0] for part in parts], dim=2).flatten(1, 2), parts[0][1]
    states[units] = final[0]
    o = o.float() * params.gain[:, None]
    if params.window:
        assert params.mix is not None
        share = torch.sigmoid(params.mix)[:, None]
        near = _window(x, params, kv_pages(storage, dtype), table_row, start if has_state else 0, start)
        o = share * near.view(rows, params.heads, dim) + (1 - share) * o
    if taps:
        old = conv_tail.clone() if has_state else torch.zeros_like(conv_tail)
        conv_tail.copy_(torch.cat([old, x[-taps:, : params.qkv_size].to(old.dtype)])[-taps:])
    return out.copy_(o.flatten(1))
