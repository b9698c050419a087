"""Unit pools with random contents for kernel tests. Everything that a kernel has no business reading is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from morph.kernels.build import KernelBuildError, load_library
from morph.kernels.interface import SSMParams
from morph.kernels.native_backend import NativeKernels
from morph.kernels.torch_backend import TorchKernels, kv_pages

DTYPES = [torch.float32, torch.bfloat16]


def native_kernels(dtype: torch.dtype, num_kv_heads: int, threads: int = 3, gemm: str = "float32") -> NativeKernels:
    """Three threads by default, so that work is cut unevenly even where one core runs the tests."""
    try:
        library = load_library()
    except KernelBuildError as error:
        pytest.skip(str(error))
    if gemm == "fixed" and not library.morph_has_fixed():
        pytest.skip("the processor has no AVX-512 VNNI")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MORPH_CPU_GEMM", gemm)
        return NativeKernels(library, dtype, num_kv_heads, threads)


def both(dtype: torch.dtype, num_kv_heads: int) -> tuple[NativeKernels, TorchKernels]:
    """The native backend and its reference."""
    return native_kernels(dtype, num_kv_heads), TorchKernels("cpu", dtype, num_kv_heads)


def nan(*shape: int) -> torch.Tensor:
    """An output buffer whose every element must be written."""
    return torch.full(shape, float("nan"))


def rope_tables(max_context: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin float32 `[max_context, dim / 2]`."""
    angles = torch.arange(max_context)[:, None] / 10000 ** (torch.arange(dim // 2) / (dim // 2))
    return angles.cos(), angles.sin()


@dataclass
class Pool:
    """NaN everywhere; `table` hands every slot random units, none of them twice and none the sink."""

    storage: torch.Tensor
    table: torch.Tensor
    dtype: torch.dtype
    dim: int

    @classmethod
    def make(cls, slots: int, width: int, dim: int, dtype: torch.dtype) -> Pool:
        """A pool for one block of `slots` requests with `width` units each."""
        units = slots * width + 3
        storage = torch.full((units, dim * dim * 4), 0xFF, dtype=torch.uint8)
        # A view of one block among two, as the engine's table is.
        table = torch.zeros((slots, 2, width), dtype=torch.int32)
        table[:, 1] = (torch.randperm(units - 1)[: slots * width] + 1).int().view(slots, width)
        return cls(storage, table[:, 1], dtype, dim)

    def copy(self) -> Pool:
        """An independent storage with the same table."""
        return Pool(self.storage.clone(), self.table, self.dtype, self.dim)

    def fill_kv(self, slot: int, kv_heads: int, max_pages: int, tokens: int) -> None:
        """Random keys and values for the first `tokens` tokens of a slot."""
        pages = kv_pages(self.storage, self.dtype)
        per_page = pages.shape[2]
        for head in range(kv_heads):
            kv = torch.randn(2, tokens, self.dim).to(self.dtype)
            for first in range(0, tokens, per_page):
                unit = self.table[slot, head * max_pages + first // per_page]
                count = min(per_page, tokens - first)
                pages[unit, :, :count] = kv[:, first : first + count]

    def same_bytes(self, other: Pool) -> bool:
        """True when both storages are equal, NaN bytes included."""
        return torch.equal(self.storage, other.storage)


def ssm_params(
    heads: int, kv_heads: int, dim: int, state_heads: str, window: int, width: int = 4, max_context: int = 512
) -> SSMParams:
    """Random mixer parameters."""
    channels = (heads + 2 * kv_heads) * dim
    states = heads if state_heads == "q" else kv_heads
    cos, sin = rope_tables(max_context, dim)
    return SSMParams(
        conv_weight=torch.randn(channels, width) * 0.3 + torch.eye(width)[-1],
        ab_bias=torch.cat([torch.linspace(0, 5, states), torch.zeros(states)]),
        gain=1 + 0.3 * torch.randn(heads),
        mix=torch.randn(heads) if window else None,
        cos=cos,
        sin=sin,
        window=window,
        heads=heads,
        kv_heads=kv_heads,
        state_heads=states,
        head_dim=dim,
    )
