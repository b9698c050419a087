"""Causal attention over the tokens of one sequence, its keys in unit pages or in plain rows.

FlashAttention-2 (Dao, 2023): a tile of queries walks over tiles of keys with a running maximum. With a window, tiles
that lie before it are not visited.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from morph.kernels.cuda.online_softmax import fold


# Lengths differ from prompt to prompt: a kernel of its own for each divisor would compile while requests wait.
@triton.jit(do_not_specialize=["n", "start", "before"])
def _attend(
    q, kv, values, table, out, stride_q, stride_k, stride_v, stride_out, max_pages, n, start, before, scale,
    UNIT: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PT: tl.constexpr, PAGED: tl.constexpr,
    WINDOW: tl.constexpr, IEEE: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    # The longest tiles first, so that none is left alone at the end.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    kv_head = head // GROUP
    i = tile * BM + tl.arange(0, BM)
    d = tl.arange(0, D)
    known = i < n
    query = tl.load(q + i.to(tl.int64)[:, None] * stride_q + head * D + d[None, :], mask=known[:, None], other=0.0)
    if PAGED:
        query = query.to(kv.dtype.element_ty)
    at = start + i
    best = tl.full((BM,), -1e30, tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    t = tl.arange(0, BT)
    end = tl.minimum(start + tile * BM + BM, start + n)
    low = start - before
    if WINDOW > 0:
        low = tl.maximum(low, start + tile * BM - WINDOW + 1)
    if PAGED:
        low = low // BT * BT
    # Tiles that every row of the query tile sees whole need no mask.
    whole = low
    if WINDOW == 0:
        whole = low + tl.maximum(start + tile * BM + 1 - low, 0) // BT * BT
    for t0 in range(low, whole, BT):
        if PAGED:
            base = kv + tl.load(table + kv_head * max_pages + t0 // PT).to(tl.int64) * UNIT + (t0 % PT) * D
            k = tl.load(base + t[:, None] * D + d[None, :])
            v = tl.load(base + PT * D + t[:, None] * D + d[None, :])
        else:
            line = (t0 + t - (start - before)).to(tl.int64)[:, None]
            k = tl.load(kv + line * stride_k + kv_head * D + d[None, :])
            v = tl.load(values + line * stride_v + kv_head * D + d[None, :])
        scores = tl.dot(query, tl.trans(k), input_precision="ieee" if IEEE else "tf32") * scale
        best, total, acc = fold(scores, v, best, total, acc, IEEE)
    for t0 in range(whole, end, BT):
        there = t0 + t < end
        if PAGED:
            base = kv + tl.load(table + kv_head * max_pages + t0 // PT).to(tl.int64) * UNIT + (t0 % PT) * D
            k = tl.load(base + t[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
            v = tl.load(base + PT * D + t[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
        else:
            line = (t0 + t - (start - before)).to(tl.int64)[:, None]
            k = tl.load(kv + line * stride_k + kv_head * D + d[None, :], mask=there[:, None], other=0.0)
            v = tl.load(values + line * stride_v + kv_head * D + d[None, :], mask=there[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee" if IEEE else "tf32") * scale
        seen = there[None, :] & ((t0 + t)[None, :] <= at[:, None])
        if WINDOW > 0:
            seen = seen & ((t0 + t)[None, :] > at[:, None] - WINDOW)
        best, total, acc = fold(tl.where(seen, scores, float("-inf")), v, best, total, acc, IEEE)
    o = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + i.to(tl.int64)[:, None] * stride_out + head * D + d[None, :], o, mask=known[:, None])


def _tile(rows: int, dim: int) -> tuple[int, int, int]:
    """Query rows per program, warps, stages."""
    if rows <= 16:
        return 16, 4, 5
    return (64, 4, 4) if rows <= 64 else (128, 8 if dim > 64 else 4, 4)


def paged_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    table_row: torch.Tensor,
    max_pages: int,
    start: int,
    scale: float,
    kv_heads: int,
    dim: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """See `Kernels.prefill_attention`. pages: the pool in the dtype of keys, `[units, elements]`."""
    heads, tokens = out.shape[1] // dim, pages.shape[1] // (2 * dim)
    bm, warps, stages = _tile(q.shape[0], dim)
    _attend[(triton.cdiv(q.shape[0], bm), heads)](
        q, pages, pages, table_row, out, q.stride(0), 0, 0, out.stride(0), max_pages, q.shape[0], start, start,
        scale * 1.4426950408889634, UNIT=pages.shape[1], GROUP=heads // kv_heads, D=dim, PT=tokens, PAGED=True,
        WINDOW=0, IEEE=pages.dtype is torch.float32, BM=bm, BT=min(64, tokens), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def window_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    before: int,
    window: int,
    scale: float,
    dim: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Row i (position start + i) attends to the last `window` tokens, itself included.

    Args:
        q: `[rows, heads · dim]`. k, v: `[before + rows, kv_heads · dim]`, from position start - before on. out: as q.
    """
    heads, group = q.shape[1] // dim, q.shape[1] // k.shape[1]
    bm, warps, stages = _tile(min(q.shape[0], 64), dim)
    _attend[(triton.cdiv(q.shape[0], bm), heads)](
        q, k, v, k, out, q.stride(0), k.stride(0), v.stride(0), out.stride(0), 0, q.shape[0], start, before,
        scale * 1.4426950408889634, UNIT=0, GROUP=group, D=dim, PT=1, PAGED=False, WINDOW=window,
        IEEE=k.dtype is torch.float32, BM=bm, BT=64, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
