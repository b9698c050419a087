"""Paged attention of one query per (request, block), its keys split among programs (flash-decoding).

Dao et al., "Flash-Decoding for long-context inference" (2023): each split keeps a running maximum, a sum and a
weighted value; a second kernel combines them in the order of the splits, so the result does not depend on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from morph.kernels.cuda.online_softmax import fold

LEAST_PAGES = 2
"""Pages below which a split is not worth its own program."""


@triton.jit
def _split(
    q, pages, table, rows, slots, positions, count, part, stats, stride_q, stride_table, max_pages, scale,
    UNIT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr, D: tl.constexpr,
    PT: tl.constexpr, BT: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr, IEEE: tl.constexpr,
    MAPPED: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    i = tl.program_id(2)
    if i >= tl.load(count):
        return
    row = i
    if MAPPED:
        row = tl.load(rows + i)
    slot = tl.load(slots + row).to(tl.int64)
    length = tl.load(positions + row) + 1
    held = (length + PT - 1) // PT
    per = tl.maximum((held + SPLITS - 1) // SPLITS, LEAST)
    first = split * per
    if first >= held:
        return
    end = tl.minimum((first + per) * PT, length)
    g = tl.arange(0, GP)
    d = tl.arange(0, D)
    head = kv_head * GROUP + g
    mine = g < GROUP
    query = tl.load(
        q + i.to(tl.int64) * stride_q + head[:, None] * D + d[None, :], mask=mine[:, None] & (d[None, :] < D), other=0.0
    )
    query = query.to(pages.dtype.element_ty)
    best = tl.full((GP,), -1e30, tl.float32)
    total = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, D), tl.float32)
    units = table + slot * stride_table + kv_head * max_pages
    t = tl.arange(0, BT)
    inside = t[:, None] * D + d[None, :]
    # Whole tiles carry no mask, which lets the compiler copy the next ones while it multiplies; one tile may be left.
    whole = end // BT * BT
    for t0 in range(first * PT, whole, BT):
        unit = tl.load(units + t0 // PT).to(tl.int64)
        base = pages + unit * UNIT + (t0 % PT) * D
        k = tl.load(base + inside)
        v = tl.load(base + PT * D + inside)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee" if IEEE else "tf32") * scale
        best, total, acc = fold(scores, v, best, total, acc, IEEE)
    if whole < end:
        unit = tl.load(units + whole // PT).to(tl.int64)
        base = pages + unit * UNIT + (whole % PT) * D
        known = whole + t < end
        k = tl.load(base + inside, mask=known[:, None], other=0.0)
        v = tl.load(base + PT * D + inside, mask=known[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee" if IEEE else "tf32") * scale
        scores = tl.where(known[None, :], scores, float("-inf"))
        best, total, acc = fold(scores, v, best, total, acc, IEEE)
    to = (i.to(tl.int64) * HEADS + head) * SPLITS + split
    tl.store(part + to[:, None] * D + d[None, :], acc, mask=mine[:, None] & (d[None, :] < D))
    tl.store(stats + to * 2, best, mask=mine)
    tl.store(stats + to * 2 + 1, total, mask=mine)


@triton.jit
def _combine(
    part, stats, rows, positions, count, out, stride_out, HEADS: tl.constexpr, D: tl.constexpr, PT: tl.constexpr,
    SPLITS: tl.constexpr, LEAST: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    head = tl.program_id(1)
    if i >= tl.load(count):
        return
    row = i
    if MAPPED:
        row = tl.load(rows + i)
    held = (tl.load(positions + row) + PT) // PT
    per = tl.maximum((held + SPLITS - 1) // SPLITS, LEAST)
    used = (held + per - 1) // per
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, D)
    base = (i.to(tl.int64) * HEADS + head) * SPLITS
    best = tl.load(stats + (base + s) * 2, mask=s < used, other=-1e30)
    total = tl.load(stats + (base + s) * 2 + 1, mask=s < used, other=0.0)
    values = tl.load(part + (base + s)[:, None] * D + d[None, :], mask=(s < used)[:, None], other=0.0)
    weight = tl.where(s < used, tl.exp2(best - tl.max(best, axis=0)), 0.0)
    o = tl.sum(values * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    tl.store(out + i.to(tl.int64) * stride_out + head * D + d, o.to(out.dtype.element_ty))


def splits_for(rows: int, kv_heads: int, max_pages: int, processors: int = 132) -> int:
    """How many programs share a (row, kv head): enough for every processor when few rows take attention.

    At least four, because a batch of many rows may have few on this path.
    """
    wanted = max(4, 16 * processors // max(1, rows * kv_heads))
    return min(64, triton.next_power_of_2(wanted), triton.next_power_of_2(triton.cdiv(max_pages, LEAST_PAGES)))


def scratch(rows: int, heads: int, dim: int, splits: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Partial results of `decode_attention`, float32."""
    return (
        torch.empty((rows, heads, splits, dim), device=device),
        torch.empty((rows, heads, splits, 2), device=device),
    )


def decode_attention(
    q: torch.Tensor,
    pages: torch.Tensor,
    table: torch.Tensor,
    max_pages: int,
    slots: torch.Tensor,
    positions: torch.Tensor,
    count: torch.Tensor,
    scale: float,
    kv_heads: int,
    dim: int,
    out: torch.Tensor,
    part: torch.Tensor,
    stats: torch.Tensor,
    rows: torch.Tensor | None = None,
    launch: tuple[int, int, int] = (64, 4, 5),
) -> torch.Tensor:
    """One query per row over the keys 0…position, for i < count.

    Args:
        q: `[*, heads · dim]` or wider. pages: the pool in the dtype of keys, `[units, elements]`.
        table: int32 `[slots, width]` of one block. slots, positions: int32, at `rows[i]` (at i without rows).
        part, stats: from `scratch`, for at least as many rows as `out` has.
        launch: keys per tile, warps, stages (the read of the page number takes two of them, two are buffers).
    """
    heads, splits = part.shape[1], part.shape[2]
    tokens = pages.shape[1] // (2 * dim)
    group = heads // kv_heads
    mapped = rows is not None
    _split[(splits, kv_heads, out.shape[0])](
        q, pages, table, rows if rows is not None else count, slots, positions, count, part, stats, q.stride(0),
        table.stride(0), max_pages, scale * 1.4426950408889634, UNIT=pages.shape[1], HEADS=heads, GROUP=group,
        GP=max(16, triton.next_power_of_2(group)), D=dim, PT=tokens, BT=min(launch[0], tokens), SPLITS=splits,
        LEAST=LEAST_PAGES, IEEE=pages.dtype is torch.float32, MAPPED=mapped, num_warps=launch[1], num_stages=launch[2],
    )  # fmt: skip
    _combine[(out.shape[0], heads)](
        part, stats, rows if rows is not None else count, positions, count, out, out.stride(0), HEADS=heads, D=dim,
        PT=tokens, SPLITS=splits, LEAST=LEAST_PAGES, MAPPED=mapped, num_warps=4,
    )  # fmt: skip
    return out
