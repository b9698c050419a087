"""Where the Triton kernels run in tests: the GPU, else the CPU under Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (extra `cuda`)")

from triton.runtime import interpreter

from morph.kernels.cuda.backend import CudaKernels
from morph.kernels.interface import SSMParams
from morph.kernels.torch_backend import TorchKernels
from tests.kernels.memory import Pool


def _mend_interpreter() -> None:
    """Two gaps of triton's interpreter, on the CPU only.

    numpy 2.4 no longer converts its one-element arrays to loop bounds, and it multiplies the bit patterns of bfloat16
    as if they were integers.
    """
    original, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != interpreter.tl.bfloat16:
            return handle
        values = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(values, interpreter.tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    interpreter._patch_lang_tensor = patch
    interpreter.InterpreterBuilder.create_dot = create_dot


_mend_interpreter()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BOUND = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest relative difference from the reference, which keeps float32 activations."""


def pair(dtype: torch.dtype, kv_heads: int) -> tuple[CudaKernels, TorchKernels]:
    """The CUDA backend on the test device, and the reference on CPU."""
    return CudaKernels(DEVICE, dtype, kv_heads), TorchKernels("cpu", dtype, kv_heads)


def on_device(pool: Pool) -> Pool:
    """A copy of the pool on the test device."""
    base = pool.table._base if pool.table._base is not None else pool.table
    assert base.dim() == 3
    return Pool(pool.storage.clone().to(DEVICE), base.to(DEVICE, copy=True)[:, 1], pool.dtype, pool.dim)


def params_on_device(params: SSMParams) -> SSMParams:
    """The same parameters on the test device."""
    names = ("conv_weight", "ab_bias", "gain", "mix", "cos", "sin")
    return replace(params, **{n: None if (t := getattr(params, n)) is None else t.to(DEVICE) for n in names})


def close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Assert that the difference is within the bound of the dtype, relative to the largest value; NaN never is."""
    got, want = got.float().cpu(), want.float().cpu()
    error = float((got - want).abs().max() / want.abs().max().clamp_min(1e-3))
    assert error < BOUND[dtype], error
