"""RMSNorm with the residual addition and the gates' running sums in one pass over the row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rms_norm(
    h, delta, weight, out, sums, slots, stride_h, stride_delta, stride_out, stride_sums, d, eps,
    HAS_DELTA: tl.constexpr, HAS_SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    keep = at < d
    x = tl.load(h + row * stride_h + at, mask=keep, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta + row * stride_delta + at, mask=keep, other=0.0).to(tl.float32)
        tl.store(h + row * stride_h + at, x, mask=keep)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / d + eps)
    gain = tl.load(weight + at, mask=keep, other=0.0)
    y = (x * scale * gain).to(out.dtype.element_ty)
    tl.store(out + row * stride_out + at, y, mask=keep)
    if HAS_SUMS:
        slot = tl.load(slots + row).to(tl.int64)
        # Padding rows have slot -1 and belong to nobody.
        mine = at < tl.where(slot >= 0, d, 0)
        to = sums + slot * stride_sums + at
        tl.store(to, tl.load(to, mask=mine, other=0.0) + y.to(tl.float64), mask=mine)


def add_rms_norm(
    h: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    sums: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
) -> torch.Tensor:
    """h += delta in place (if any), then out = h / sqrt(mean(h²) + eps) · weight, rounded to `out`'s dtype.

    Args:
        h: `[rows, d]`. delta: `[rows, d]` of any float dtype, or None. weight: float32 `[d]`.
        sums: float64 `[slots, d]`, a view of one block: row `slots[i]` gains what was written to `out[i]`.
        slots: int32 `[rows]`, distinct but for -1 = no sum.
    """
    rows, d = h.shape
    if rows == 0:
        return out
    block = triton.next_power_of_2(d)
    _add_rms_norm[(rows,)](
        h, h if delta is None else delta, weight, out, h if sums is None else sums, h if slots is None else slots,
        h.stride(0), 0 if delta is None else delta.stride(0), out.stride(0), 0 if sums is None else sums.stride(0),
        d, eps, HAS_DELTA=delta is not None, HAS_SUMS=sums is not None, BLOCK=block,
        num_warps=8 if block >= 4096 else 4,
    )  # fmt: skip
    return out
