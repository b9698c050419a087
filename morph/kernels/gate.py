"""A gate's prediction in one call: ten microseconds of arithmetic, of which torch operations would make a hundred."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from morph.kernels import native_library

GateFunction = Callable[[torch.Tensor, torch.Tensor, int], float]
"""Running sums float64 `[hidden]`, last normed input float32 `[hidden]`, prompt tokens -> û."""


def _native() -> Callable[..., float] | None:
    library = native_library()
    if library is None:
        return None
    function = library.morph_gate
    pointer = ctypes.c_void_p
    function.argtypes = [
        *(pointer, pointer, ctypes.c_long, ctypes.c_long, pointer, pointer, pointer),
        *(ctypes.c_float, ctypes.c_long),
    ]
    function.restype = ctypes.c_float
    return function


def native_gate(fc1: torch.Tensor, bias1: torch.Tensor, fc2: torch.Tensor, bias2: float) -> GateFunction | None:
    """The gate of these float32 weights as one native call, or None where there are no native kernels.

    Args:
        fc1: `[width, 2 * hidden + 1]`. bias1, fc2: `[width]`.
    """
    function = _native()
    if function is None or fc1.device.type != "cpu":
        return None
    kept = [tensor.to(torch.float32).contiguous() for tensor in (fc1, bias1, fc2)]
    weights = [tensor.data_ptr() for tensor in kept]
    hidden, width = fc1.shape[1] // 2, fc1.shape[0]

    def predict(sums: torch.Tensor, last: torch.Tensor, n: int, kept: list[torch.Tensor] = kept) -> float:
        assert (
            sums.device.type == "cpu" and sums.dtype is torch.float64 and sums.is_contiguous() and last.is_contiguous()
        )
        return function(sums.data_ptr(), last.data_ptr(), hidden, n, *weights, bias2, width)

    return predict
