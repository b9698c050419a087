"""SwiGLU and the ssm output gate, elementwise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _silu_mul(gate, up, out, stride_gate, stride_up, stride_out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    keep = at < n
    g = tl.load(gate + row * stride_gate + at, mask=keep, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride_up + at, mask=keep, other=0.0).to(tl.float32)
    y = g / (1.0 + tl.exp(-g)) * u
    tl.store(out + row * stride_out + at, y.to(out.dtype.element_ty), mask=keep)


def silu_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = silu(gate) · up, all `[rows, n]` with unit column stride; `out` may be `up`."""
    rows, n = up.shape
    if rows == 0:
        return out
    block = min(2048, triton.next_power_of_2(n))
    _silu_mul[(rows, triton.cdiv(n, block))](gate, up, out, gate.stride(0), up.stride(0), out.stride(0), n, BLOCK=block)
    return out
