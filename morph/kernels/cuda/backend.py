"""`Kernels` on a CUDA device: activations in the dtype of the weights, residual stream in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from morph.config import ModelConfig
from morph.errors import UnsupportedModel
from morph.kernels.cuda import attention_decode, attention_prefill, gdn_decode, gdn_prefill, norm, rope, swiglu
from morph.kernels.interface import Decoder, PackedLinear, SSMParams
from morph.kernels.torch_backend import head_dim, kv_pages

LEAST_CAPABILITY = (8, 0)
MLP_ROWS = 8192
"""Rows per tile of the MLP: bounds its activations, and keeps products large."""
SDPA_ROWS = 1024
"""Rows of a prompt without earlier tokens from which torch's attention over gathered keys is the faster way."""


def check_device(device: torch.device) -> None:
    """Raise UnsupportedModel when the device cannot run these kernels.

    Raises:
        UnsupportedModel: no CUDA, or a card older than compute capability 8.0.
    """
    if not torch.cuda.is_available():
        raise UnsupportedModel(f"device {device} was asked for, but torch sees no CUDA device; use device='cpu'")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise UnsupportedModel(
            f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}, the kernels "
            "need 8.0 or newer; use device='cpu', or MORPH_KERNELS=torch for plain torch on this card"
        )


@dataclass(frozen=True, eq=False)
class CudaLinear:
    """A weight `[n, k]`, contiguous, and a float32 bias `[n]`."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def n(self) -> int:
        """Output features."""
        return self.weight.shape[0]

    @property
    def k(self) -> int:
        """Input features."""
        return self.weight.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.weight.dtype

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Embedding lookup, float32 `[count, k]`."""
        return self.weight[ids.long()].float()

    def unpack(self) -> torch.Tensor:
        """The weight, a copy."""
        return self.weight.clone()


def dense(x: torch.Tensor, weight: CudaLinear, out: torch.Tensor | None = None) -> torch.Tensor:
    """x · weightᵀ + bias through cuBLAS; x is rounded to the weight's dtype, the result has `out`'s."""
    x = x.to(weight.dtype)
    bias = None if weight.bias is None else weight.bias.to(weight.dtype)
    if out is not None and out.dtype is weight.dtype and bias is None and out.is_contiguous():
        return torch.mm(x, weight.weight.t(), out=out)
    result = F.linear(x, weight.weight, bias)
    return result if out is None else out.copy_(result)


class CudaKernels:
    """`Kernels` for one device.

    Args:
        device: a CUDA device; the CPU only under Triton's interpreter, for tests.
        dtype: of weights, keys and values: float32 or bfloat16.
        num_kv_heads: of the model.

    Raises:
        UnsupportedModel: the device cannot run the kernels.
    """

    name = "cuda"

    def __init__(self, device: torch.device | str, dtype: torch.dtype, num_kv_heads: int) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda":
            check_device(self.device)
        self.dtype = dtype
        self.activations = dtype
        self.num_kv_heads = num_kv_heads
        self._all = torch.full((1,), 2**31 - 1, dtype=torch.int32, device=self.device)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """See `Kernels.pack_linear`."""
        kept = weight.to(self.device, self.dtype).contiguous()
        return CudaLinear(kept, None if bias is None else bias.to(self.device, torch.float32).contiguous())

    def linear(self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Kernels.linear`; without `out` the result is float32."""
        assert isinstance(weight, CudaLinear)
        result = dense(x, weight, out)
        return result if out is not None else result.float()

    def prefill_linear(self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Kernels.prefill_linear`; the same as `linear`."""
        return self.linear(x, weight, out)

    def fuses_mlp(self, gate_up: PackedLinear, down: PackedLinear) -> bool:
        """See `Kernels.fuses_mlp`."""
        return True

    def prefill_mlp(
        self, x: torch.Tensor, gate_up: PackedLinear, down: PackedLinear, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Kernels.prefill_mlp`."""
        assert isinstance(gate_up, CudaLinear) and isinstance(down, CudaLinear)
        if out is None:
            out = torch.empty((x.shape[0], down.n), dtype=torch.float32, device=x.device)
        for begin in range(0, x.shape[0], MLP_ROWS):
            act = self.silu_mul(dense(x[begin : begin + MLP_ROWS], gate_up))
            out[begin : begin + MLP_ROWS] = dense(act, down)
        return out

    def decoder(
        self,
        config: ModelConfig,
        weights: Any,
        memory: Any,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sums: torch.Tensor,
    ) -> Decoder | None:
        """See `Kernels.decoder`."""
        from morph.kernels.cuda.decoder import CudaDecoder

        return CudaDecoder(self, config, weights, memory, cos, sin, sums)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Kernels.rms_norm`; without `out` the result has the dtype of activations."""
        return norm.add_rms_norm(x, None, weight, eps, torch.empty_like(x, dtype=self.dtype) if out is None else out)

    def add_rms_norm_(
        self,
        h: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Kernels.add_rms_norm_`."""
        return norm.add_rms_norm(h, delta, weight, eps, torch.empty_like(h, dtype=self.dtype) if out is None else out)

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Kernels.silu_mul`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return swiglu.silu_mul(
            gate, up, torch.empty(up.shape, dtype=up.dtype, device=up.device) if out is None else out
        )

    def gate_silu_mul_(self, o: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """See `Kernels.gate_silu_mul_`."""
        return swiglu.silu_mul(z, o, o)

    def sum_tokens_(self, acc: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Kernels.sum_tokens_`. Sums of bfloat16 values in float64 are exact over 30 binary orders of magnitude,
        so their order does not matter; of float32 values it matters at 1e-16."""
        if x.shape[0]:
            acc += x.sum(0, dtype=torch.float64)
        return acc

    def _pages(self, storage: torch.Tensor) -> torch.Tensor:
        return storage.view(self.dtype)

    def head_dim(self, storage: torch.Tensor) -> int:
        """Head dim of a pool.

        Raises:
            UnsupportedModel: the kernels do not have it.
        """
        dim = head_dim(storage)
        if dim & (dim - 1) or dim < 16:
            raise UnsupportedModel(f"head_dim is {dim}; the CUDA kernels want a power of two, use MORPH_KERNELS=torch")
        return dim

    def rope_write_kv_(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        eps: float,
        storage: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        max_pages: int,
    ) -> None:
        """See `Kernels.rope_write_kv_`."""
        rope.rope_write_kv(
            qkv, cos, sin, positions, slots, q_norm, k_norm, eps, self._pages(storage), table, max_pages,
            self.num_kv_heads, self.head_dim(storage),
        )  # fmt: skip

    def prefill_attention(
        self,
        q: torch.Tensor,
        storage: torch.Tensor,
        table_row: torch.Tensor,
        max_pages: int,
        start: int,
        scale: float,
        out: torch.Tensor | None = None,
        exact: bool = False,
    ) -> torch.Tensor:
        """See `Kernels.prefill_attention`; operands are rounded to the dtype of keys."""
        dim = self.head_dim(storage)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if start == 0 and q.shape[0] >= SDPA_ROWS and q.is_cuda and self.dtype is torch.bfloat16:
            return self._whole_prompt(q, kv_pages(storage, self.dtype), table_row, max_pages, scale, out)
        return attention_prefill.paged_attention(
            q, self._pages(storage), table_row, max_pages, start, scale, self.num_kv_heads, dim, out
        )

    def _whole_prompt(
        self,
        q: torch.Tensor,
        paged: torch.Tensor,
        table_row: torch.Tensor,
        max_pages: int,
        scale: float,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Torch's attention over keys and values copied out of their pages, a small share of the work here."""
        rows, dim = q.shape[0], paged.shape[3]
        needed = -(-rows // paged.shape[2])
        units = table_row[: self.num_kv_heads * max_pages].view(-1, max_pages)[:, :needed].long()
        kv = paged[units]  # [kv_heads, pages, 2, page_tokens, d]
        k, v = kv[:, :, 0].flatten(1, 2)[:, :rows], kv[:, :, 1].flatten(1, 2)[:, :rows]
        query = q.to(self.dtype).unflatten(1, (-1, dim)).transpose(0, 1)
        o = F.scaled_dot_product_attention(query[None], k[None], v[None], is_causal=True, scale=scale, enable_gqa=True)
        return out.copy_(o[0].transpose(0, 1).flatten(1))

    def decode_attention(
        self,
        q: torch.Tensor,
        storage: torch.Tensor,
        table: torch.Tensor,
        max_pages: int,
        slots: torch.Tensor,
        lens: torch.Tensor,
        scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Kernels.decode_attention`."""
        dim = self.head_dim(storage)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        splits = attention_decode.splits_for(len(slots), self.num_kv_heads, max_pages)
        part, stats = attention_decode.scratch(len(slots), q.shape[1] // dim, dim, splits, q.device)
        return attention_decode.decode_attention(
            q, self._pages(storage), table, max_pages, slots, lens - 1, self._all, scale, self.num_kv_heads, dim, out,
            part, stats,
        )  # fmt: skip

    def gdn_prefill(
        self,
        x_in: torch.Tensor,
        params: SSMParams,
        storage: torch.Tensor,
        table_row: torch.Tensor,
        conv_tail: torch.Tensor,
        has_state: bool,
        start: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Kernels.gdn_prefill`."""
        self.head_dim(storage)
        if out is None:
            out = torch.empty((x_in.shape[0], params.heads * params.head_dim), dtype=x_in.dtype, device=x_in.device)
        return gdn_prefill.gdn_prefill(x_in, params, storage, self.dtype, table_row, conv_tail, has_state, start, out)

    def gdn_decode(
        self,
        x_in: torch.Tensor,
        params: SSMParams,
        storage: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        conv_tails: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Kernels.gdn_decode`."""
        rows, dim = x_in.shape[0], self.head_dim(storage)
        if out is None:
            out = torch.empty((rows, params.heads * dim), dtype=x_in.dtype, device=x_in.device)
        scratch = gdn_decode.Scratch.make(rows, params.heads, params.kv_heads, dim, x_in.device)
        return gdn_decode.gdn_decode(
            x_in, params, storage, self.dtype, table, slots, positions, self._all, conv_tails, scratch, out
        )
