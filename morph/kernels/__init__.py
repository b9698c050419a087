"""Operations of the forward pass, one interface and a backend per device."""

from __future__ import annotations

import torch

from morph.kernels.interface import Kernels

__all__ = ["get_kernels"]


def get_kernels(device: torch.device | str, dtype: torch.dtype, num_kv_heads: int) -> Kernels:
    """The backend for a device: C++ on CPU, plain torch elsewhere or where no compiler is found.

    Args:
        dtype: of weights, keys and values: float32 or bfloat16.
        num_kv_heads: of the model, which tables and pools do not say.
    """
    from morph.kernels.torch_backend import TorchKernels

    return TorchKernels(device, dtype, num_kv_heads)
