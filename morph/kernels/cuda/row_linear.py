"""Products of a subset of rows: rows through an index list, their number read on the device.

Programs beyond the live count return before they load a weight, so a path that no row takes costs a launch and no
bytes. Both directions are here: gather on the way into a mixer, scatter on the way out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    """Tile sizes and launch parameters of a row-mapped product."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


@triton.jit
def _row_linear(
    x, w, bias, out, mul, rows, count, stride_x, stride_out, stride_mul, n, k,
    GATHER: tl.constexpr, SCATTER: tl.constexpr, HAS_BIAS: tl.constexpr, SILU_MUL: tl.constexpr,
    EVEN_K: tl.constexpr, IEEE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    live = tl.load(count)
    # Row tiles of the same weights are neighbours in launch order and share them in L2.
    first = tl.program_id(0) * BM
    if first >= live:
        return
    i = first + tl.arange(0, BM)
    known = i < live
    if GATHER or SCATTER:  # noqa: SIM108
        mapped = tl.load(rows + i, mask=known, other=0).to(tl.int64)
    else:
        mapped = i.to(tl.int64)
    source = mapped if GATHER else i.to(tl.int64)
    target = mapped if SCATTER else i.to(tl.int64)
    col = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = col < n
    at = tl.arange(0, BK)
    x_at = x + source[:, None] * stride_x + at[None, :]
    w_at = w + tl.where(inside, col, 0).to(tl.int64)[None, :] * k + at[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k0 in range(0, k, BK):
        if EVEN_K:
            a = tl.load(x_at, mask=known[:, None], other=0.0)
            b = tl.load(w_at)
        else:
            a = tl.load(x_at, mask=known[:, None] & (at + k0 < k)[None, :], other=0.0)
            b = tl.load(w_at, mask=(at + k0 < k)[:, None], other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee" if IEEE else "tf32")
        x_at += BK
        w_at += BK
    if HAS_BIAS:
        acc += tl.load(bias + col, mask=inside, other=0.0)[None, :]
    keep = known[:, None] & inside[None, :]
    if SILU_MUL:
        other = tl.load(mul + i.to(tl.int64)[:, None] * stride_mul + col[None, :], mask=keep, other=0.0)
        acc = acc / (1.0 + tl.exp(-acc)) * other.to(tl.float32)
    tl.store(out + target[:, None] * stride_out + col[None, :], acc.to(out.dtype.element_ty), mask=keep)


def default_tile(m: int, n: int, k: int, processors: int = 132) -> Tile:
    """A tile for a buffer of `m` rows: wide enough in k to stream, narrow in n so that all processors work."""
    bm = min(64, max(16, triton.next_power_of_2(m)))
    bk = 64 if k % 128 else 128
    bn = 64 if triton.cdiv(n, 64) >= processors else 32
    return Tile(bm, bn, bk, 4, 4 if bm <= 64 else 3)


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    count: torch.Tensor,
    rows: torch.Tensor | None = None,
    gather: bool = False,
    scatter: bool = False,
    bias: torch.Tensor | None = None,
    silu_mul: torch.Tensor | None = None,
    limit: int | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """out[t(i)] = x[s(i)] · weightᵀ (+ bias) for i < count; s and t are `rows[i]` where asked, else i.

    Args:
        x: `[*, k]`, unit column stride, dtype of the weight. weight: `[n, k]` contiguous. out: `[*, n]`.
        count: int32 `[1]` on the device. rows: int32, at least `count` of them.
        silu_mul: `[*, n]`, read at i: the result becomes silu(result) · silu_mul[i]; may be `out` without scatter.
        limit: the most that `count` can be (the launch's size); default: rows of the buffer that i indexes.
    """
    n, k = weight.shape
    m = limit or (out.shape[0] if gather else x.shape[0])
    t = tile or default_tile(m, n, k)
    assert rows is not None or not (gather or scatter)
    _row_linear[(triton.cdiv(m, t.m), triton.cdiv(n, t.n))](
        x, weight, weight if bias is None else bias, out, out if silu_mul is None else silu_mul,
        count if rows is None else rows, count, x.stride(0), out.stride(0),
        0 if silu_mul is None else silu_mul.stride(0), n, k, GATHER=gather, SCATTER=scatter,
        HAS_BIAS=bias is not None, SILU_MUL=silu_mul is not None, EVEN_K=k % t.k == 0,
        IEEE=weight.dtype is torch.float32, BM=t.m, BN=t.n, BK=t.k, num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip
    return out
