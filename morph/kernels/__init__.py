"""Operations of the forward pass, one interface and a backend per device."""

from __future__ import annotations

import functools
import logging
import os
from ctypes import CDLL

import torch

from morph.kernels.interface import Kernels
from morph.kernels.torch_backend import TorchKernels

__all__ = ["get_kernels", "native_library"]

_log = logging.getLogger(__name__)


def get_kernels(device: torch.device | str, dtype: torch.dtype, num_kv_heads: int) -> Kernels:
    """The backend for a device: C++ on CPU (plain torch where no compiler is found), Triton and cuBLAS on CUDA.

    The environment variable MORPH_KERNELS forces `torch` on any device or `native` on the CPU; `auto` is the default.

    Args:
        dtype: of weights, keys and values: float32 or bfloat16.
        num_kv_heads: of the model, which tables and pools do not say.

    Raises:
        KernelBuildError: `native` is forced and cannot be built.
        UnsupportedModel: a CUDA device that is not there or is too old.
        ValueError: MORPH_KERNELS has another value.
    """
    if torch.device(device).type == "cuda" and os.environ.get("MORPH_KERNELS", "auto") != "torch":
        from morph.kernels.cuda.backend import CudaKernels

        return CudaKernels(device, dtype, num_kv_heads)
    if torch.device(device).type != "cpu" or (library := native_library()) is None:
        return TorchKernels(device, dtype, num_kv_heads)
    from morph.kernels.native_backend import NativeKernels

    return NativeKernels(library, dtype, num_kv_heads)


def native_library() -> CDLL | None:
    """The compiled CPU kernels, or None where MORPH_KERNELS says torch or they cannot be built.

    Raises:
        KernelBuildError: `native` is forced and cannot be built.
        ValueError: MORPH_KERNELS has another value.
    """
    choice = os.environ.get("MORPH_KERNELS", "auto")
    if choice not in ("auto", "torch", "native"):
        raise ValueError(f"MORPH_KERNELS is {choice!r}; use torch, native or auto")
    if choice == "torch":
        return None
    from morph.kernels.build import load_library

    return load_library() if choice == "native" else _library()


@functools.cache
def _library() -> CDLL | None:
    """The native kernels, or None after one warning."""
    from morph.kernels.build import KernelBuildError, load_library

    try:
        return load_library()
    except (KernelBuildError, OSError) as error:
        _log.warning("native CPU kernels are off, generation will be many times slower: %s", error)
        return None
