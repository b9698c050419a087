"""QK-norm, RoPE and the write of keys and values into their unit pages, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


# Lengths differ from prompt to prompt: a kernel of its own for each divisor would compile while requests wait.
@triton.jit(do_not_specialize=["limit"])
def _rope_write_kv(
    qkv, cos, sin, positions, slots, rows, count, q_norm, k_norm, pages, table, stride_qkv, stride_table, max_pages,
    eps, limit, UNIT: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PT: tl.constexpr,
    HAS_NORM: tl.constexpr, MAPPED: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    live = limit
    if MAPPED:
        live = tl.load(count)
    if tl.program_id(0) * BR >= live:
        return
    i = tl.program_id(0) * BR + tl.arange(0, BR)
    known = i < live
    row = i
    if MAPPED:
        row = tl.load(rows + i, mask=known, other=0)
    position = tl.load(positions + row, mask=known, other=0)
    half = tl.arange(0, D // 2)
    at = qkv + i.to(tl.int64)[:, None] * stride_qkv + head * D + half[None, :]
    keep = known[:, None] & (half[None, :] < D)
    first = tl.load(at, mask=keep, other=0.0).to(tl.float32)
    second = tl.load(at + D // 2, mask=keep, other=0.0).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if HAS_NORM:
            gain = q_norm if head < HEADS else k_norm
            square = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
            scale = tl.rsqrt(square / D + eps)[:, None]
            first = first * scale * tl.load(gain + half)[None, :]
            second = second * scale * tl.load(gain + D // 2 + half)[None, :]
        angle = position.to(tl.int64)[:, None] * (D // 2) + half[None, :]
        c = tl.load(cos + angle, mask=keep, other=0.0)
        s = tl.load(sin + angle, mask=keep, other=0.0)
        rotated = first * c - second * s
        second = second * c + first * s
        first = rotated
        tl.store(at, first.to(qkv.dtype.element_ty), mask=keep)
        tl.store(at + D // 2, second.to(qkv.dtype.element_ty), mask=keep)
    if head >= HEADS:
        which = (head - HEADS) // KV_HEADS
        kv_head = (head - HEADS) % KV_HEADS
        slot = tl.load(slots + row, mask=known, other=0).to(tl.int64)
        unit = tl.load(table + slot * stride_table + kv_head * max_pages + position // PT, mask=known, other=0)
        to = unit.to(tl.int64) * UNIT + which * PT * D + (position % PT) * D
        to = pages + to[:, None] + half[None, :]
        tl.store(to, first.to(pages.dtype.element_ty), mask=keep)
        tl.store(to + D // 2, second.to(pages.dtype.element_ty), mask=keep)


def rope_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    pages: torch.Tensor,
    table: torch.Tensor,
    max_pages: int,
    kv_heads: int,
    dim: int,
    rows: torch.Tensor | None = None,
    count: torch.Tensor | None = None,
) -> None:
    """See `Kernels.rope_write_kv_`.

    Args:
        qkv: `[rows, (heads + 2 kv_heads) · dim]`. pages: the pool in the dtype of keys, `[units, elements]`.
        rows, count: qkv row i is batch row `rows[i]` (of positions and slots) for i < count; None = i itself.
    """
    heads = qkv.shape[1] // dim - 2 * kv_heads
    if qkv.shape[0] == 0:
        return
    block = 1 if rows is not None else 16
    _rope_write_kv[(triton.cdiv(qkv.shape[0], block), heads + 2 * kv_heads)](
        qkv, cos, sin, positions, slots, positions if rows is None else rows, positions if count is None else count,
        cos if q_norm is None else q_norm, cos if k_norm is None else k_norm, pages, table, qkv.stride(0),
        table.stride(0), max_pages, eps, qkv.shape[0], UNIT=pages.shape[1], HEADS=heads, KV_HEADS=kv_heads, D=dim,
        PT=pages.shape[1] // (2 * dim), HAS_NORM=q_norm is not None, MAPPED=rows is not None, BR=block, num_warps=1,
    )  # fmt: skip
