"""CPU backend in C++: thin calls through ctypes into the library that `build` compiles.

Calls release the GIL. Wrappers check next to nothing: shapes are the engine's promise, and a decode step makes
hundreds of calls. Head dims other than 32, 64, 96 and 128, and convs wider than 8, take the torch ops for attention
and Gated DeltaNet.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import functional as F

from morph.config import ModelConfig
from morph.kernels.build import cpu_has
from morph.kernels.interface import Decoder, PackedLinear, SSMParams, page_tokens
from morph.kernels.torch_backend import TorchKernels, head_dim

HEAD_DIMS = (32, 64, 96, 128)
MAX_CONV_WIDTH = 8
PANEL = 32
GEMMS = ("float32", "fixed", "onednn")
"""How rows of prompts are multiplied in bfloat16; see `NativeKernels`."""

_POINTER, _LONG, _INT, _INT64, _DOUBLE = (
    ctypes.c_void_p,
    ctypes.c_long,
    ctypes.c_int,
    ctypes.c_int64,
    ctypes.c_double,
)
_SIGNATURES: dict[str, list[Any]] = {
    "pack": [_POINTER, _INT, _LONG, _LONG, _POINTER, _INT],
    "unpack": [_POINTER, _INT, _LONG, _LONG, _POINTER, _INT],
    "unpack_rows": [_POINTER, _INT, _LONG, _POINTER, _LONG, _POINTER, _INT],
    "linear": [_POINTER, _LONG, _POINTER, _INT, _POINTER, _POINTER, _LONG, _LONG, _LONG, _LONG, _INT],
    "linear_fixed": [_POINTER, _LONG, _POINTER, _POINTER, _POINTER, *[_LONG] * 4, _INT],
    "mlp_fixed": [_POINTER, _LONG, _POINTER, _POINTER, _POINTER, *[_LONG] * 5, _INT],
    "rms_norm": [_POINTER, _POINTER, _DOUBLE, _LONG, _LONG, _POINTER, _INT],
    "add_rms_norm": [_POINTER, _POINTER, _POINTER, _DOUBLE, _LONG, _LONG, _POINTER, _INT],
    "silu_mul": [_POINTER, _LONG, _LONG, _POINTER, _INT],
    "gate_silu_mul": [_POINTER, _POINTER, _LONG, _LONG, _INT],
    "sum_tokens": [_POINTER, _POINTER, _LONG, _LONG, _LONG, _INT],
    "rope_write_kv": [
        *(_POINTER, _LONG, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _DOUBLE),
        *(_POINTER, _INT64, _POINTER, _LONG, _POINTER, _LONG, _LONG, _INT),
        *(_LONG, _LONG, _LONG, _LONG, _INT),
    ],
    "prefill_attention": [
        *(_POINTER, _LONG, _POINTER, _INT64, _POINTER, _LONG, _LONG, _INT),
        *(_LONG, _LONG, _LONG, _LONG, _LONG, _DOUBLE, _POINTER, _INT),
    ],
    "prefill_attention_fixed": [
        *(_POINTER, _LONG, _POINTER, _INT64, _POINTER, _LONG, _LONG),
        *(_LONG, _LONG, _LONG, _LONG, _LONG, _DOUBLE, _POINTER, _INT),
    ],
    "decode_attention": [
        *(_POINTER, _LONG, _POINTER, _INT64, _POINTER, _LONG, _LONG, _LONG, _INT, _POINTER, _POINTER),
        *(_LONG, _LONG, _LONG, _LONG, _DOUBLE, _POINTER, _INT),
    ],
    "decode_step": [_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _POINTER, _POINTER],
    "gdn_prefill": [
        *(_POINTER, _POINTER, _LONG, _LONG, _POINTER, _INT64, _POINTER, _LONG, _INT),
        *(_POINTER, _INT, _LONG, _POINTER, _INT),
    ],
    "gdn_decode": [
        *(_POINTER, _POINTER, _LONG, _LONG, _POINTER, _INT64, _POINTER, _LONG, _LONG, _INT),
        *(_POINTER, _POINTER, _LONG, _POINTER, _POINTER, _INT),
    ],
}


class _GdnParams(ctypes.Structure):
    """Mirrors `GdnParams` in native/gdn.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("conv", "ab_bias", "gain", "mix", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "state_heads", "dim", "width", "window")),
    ]


class NativeLinear:
    """A weight in panels of 32 output features: `[ceil(n / 32)][k][32]`, see native/linear.cpp.

    Attributes:
        pointer, bias_pointer: addresses of `packed` and `bias`, read once.
    """

    def __init__(
        self, packed: torch.Tensor, bias: torch.Tensor | None, n: int, k: int, library: Any, threads: int
    ) -> None:
        self.packed, self.bias = packed, bias
        self.n, self.k = n, k
        self.dtype = packed.dtype
        self.is_bf16 = int(packed.dtype == torch.bfloat16)
        self.pointer = packed.data_ptr()
        self.bias_pointer = None if bias is None else bias.data_ptr()
        self._library, self._threads = library, threads

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, float32 `[count, k]`."""
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty((ids.shape[0], self.k))
        self._library.morph_unpack_rows(
            self.pointer, self.is_bf16, self.k, ids.data_ptr(), ids.shape[0], out.data_ptr(), self._threads
        )
        return out

    def unpack(self) -> torch.Tensor:
        """The weight `[n, k]`, a copy."""
        out = torch.empty((self.n, self.k), dtype=self.dtype)
        self._library.morph_unpack(self.pointer, self.is_bf16, self.n, self.k, out.data_ptr(), self._threads)
        return out


class NativeKernels(TorchKernels):
    """`Kernels` on CPU in C++.

    Decode multiplies float32 activations by the weights as they are. Rows of prompts in bfloat16 may take another
    way, which MORPH_CPU_GEMM forces and `auto` chooses by the processor:
        onednn: bfloat16 activations on AMX.
        fixed: block fixed point on AVX-512 VNNI, twice the rate of float32, rounding less than bfloat16.
        float32: as in decode.

    Args:
        library: from `build.load_library`.
        dtype: of weights, keys and values: float32 or bfloat16.
        num_kv_heads: of the model.
        threads: None = as many as torch uses.
    """

    name = "native"
    activations = torch.float32

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, num_kv_heads: int, threads: int | None = None) -> None:
        super().__init__("cpu", dtype, num_kv_heads)
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"dtype {dtype} has no native kernels; use torch.float32 or torch.bfloat16")
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, f"morph_{name}")
            function.argtypes, function.restype = arguments, None
        self.library: Any = library
        self.threads = threads or torch.get_num_threads()
        self._is_bf16 = int(dtype == torch.bfloat16)
        self._params: WeakKeyDictionary[SSMParams, tuple[Any, torch.Tensor, int]] = WeakKeyDictionary()
        self.gemm = _choose_gemm(library, dtype)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """See `Kernels.pack_linear`."""
        weight = weight.to(self.dtype).contiguous()
        n, k = weight.shape
        packed = torch.empty((-(-n // PANEL) * PANEL * k,), dtype=self.dtype)
        self.library.morph_pack(weight.data_ptr(), self._is_bf16, n, k, packed.data_ptr(), self.threads)
        bias = None if bias is None else bias.to(torch.float32).contiguous()
        return NativeLinear(packed, bias, n, k, self.library, self.threads)

    def linear(self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Kernels.linear`."""
        assert isinstance(weight, NativeLinear) and x.dtype is torch.float32
        rows, n = x.shape[0], weight.n
        if out is None:
            out = torch.empty((rows, n))
        self.library.morph_linear(
            x.data_ptr(), x.stride(0), weight.pointer, weight.is_bf16, weight.bias_pointer, out.data_ptr(), n,
            rows, n, weight.k, self.threads,
        )  # fmt: skip
        return out

    def prefill_linear(self, x: torch.Tensor, weight: PackedLinear, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Kernels.prefill_linear`."""
        assert isinstance(weight, NativeLinear) and x.dtype is torch.float32
        if not weight.is_bf16 or self.gemm == "float32":
            return self.linear(x, weight, out)
        rows, n = x.shape[0], weight.n
        if out is None:
            out = torch.empty((rows, n))
        if self.gemm == "onednn":
            out.copy_(F.linear(x.to(torch.bfloat16), weight.unpack()))
            return out if weight.bias is None else out.add_(weight.bias)
        self.library.morph_linear_fixed(
            x.data_ptr(), x.stride(0), weight.pointer, weight.bias_pointer, out.data_ptr(), n,
            rows, n, weight.k, self.threads,
        )  # fmt: skip
        return out

    def fuses_mlp(self, gate_up: PackedLinear, down: PackedLinear) -> bool:
        """See `Kernels.fuses_mlp`."""
        assert isinstance(gate_up, NativeLinear) and isinstance(down, NativeLinear)
        plain = gate_up.bias is None and down.bias is None and down.k % PANEL == 0
        return self.gemm == "fixed" and bool(gate_up.is_bf16) and plain

    def prefill_mlp(
        self, x: torch.Tensor, gate_up: PackedLinear, down: PackedLinear, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Kernels.prefill_mlp`."""
        if not self.fuses_mlp(gate_up, down):
            return super().prefill_mlp(x, gate_up, down, out)
        assert isinstance(gate_up, NativeLinear) and isinstance(down, NativeLinear)
        rows = x.shape[0]
        if out is None:
            out = torch.empty((rows, down.n))
        self.library.morph_mlp_fixed(
            x.data_ptr(), x.stride(0), gate_up.pointer, down.pointer, out.data_ptr(), out.stride(0),
            rows, gate_up.k, down.k, down.n, self.threads,
        )  # fmt: skip
        return out

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `Kernels.rms_norm`."""
        if out is None:
            out = torch.empty_like(x)
        rows, d = x.shape
        self.library.morph_rms_norm(x.data_ptr(), weight.data_ptr(), eps, rows, d, out.data_ptr(), self.threads)
        return out

    def add_rms_norm_(
        self,
        h: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Kernels.add_rms_norm_`."""
        if out is None:
            out = torch.empty_like(h)
        rows, d = h.shape
        self.library.morph_add_rms_norm(
            h.data_ptr(), delta.data_ptr(), weight.data_ptr(), eps, rows, d, out.data_ptr(), self.threads
        )
        return out

    def silu_mul(self, gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `Kernels.silu_mul`."""
        rows, n = gate_up.shape[0], gate_up.shape[1] // 2
        if out is None:
            out = torch.empty((rows, n))
        self.library.morph_silu_mul(gate_up.data_ptr(), rows, n, out.data_ptr(), self.threads)
        return out

    def gate_silu_mul_(self, o: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """See `Kernels.gate_silu_mul_`."""
        rows, n = o.shape
        self.library.morph_gate_silu_mul(o.data_ptr(), z.data_ptr(), rows, n, self.threads)
        return o

    def sum_tokens_(self, acc: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `Kernels.sum_tokens_`."""
        assert acc.dtype is torch.float64
        rows, d = x.shape
        self.library.morph_sum_tokens(acc.data_ptr(), x.data_ptr(), x.stride(0), rows, d, self.threads)
        return acc

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
        dim = head_dim(storage)
        if dim not in HEAD_DIMS:
            return super().rope_write_kv_(
                qkv, cos, sin, positions, q_norm, k_norm, eps, storage, table, slots, max_pages
            )
        rows, columns = qkv.shape
        self.library.morph_rope_write_kv(
            qkv.data_ptr(), qkv.stride(0), cos.data_ptr(), sin.data_ptr(), positions.data_ptr(),
            None if q_norm is None else q_norm.data_ptr(), None if k_norm is None else k_norm.data_ptr(), eps,
            storage.data_ptr(), storage.stride(0), table.data_ptr(), table.stride(0), slots.data_ptr(), max_pages,
            page_tokens(dim, self.dtype), self._is_bf16, rows, columns // dim - 2 * self.num_kv_heads,
            self.num_kv_heads, dim, self.threads,
        )  # fmt: skip
        return None

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
        """See `Kernels.prefill_attention`."""
        dim = head_dim(storage)
        if dim not in HEAD_DIMS:
            return super().prefill_attention(q, storage, table_row, max_pages, start, scale, out, exact)
        rows, columns = q.shape
        if out is None:
            out = torch.empty((rows, columns))
        if self.gemm == "fixed" and not exact:
            self.library.morph_prefill_attention_fixed(
                q.data_ptr(), q.stride(0), storage.data_ptr(), storage.stride(0), table_row.data_ptr(), max_pages,
                page_tokens(dim, self.dtype), rows, columns // dim, self.num_kv_heads, dim, start, scale,
                out.data_ptr(), self.threads,
            )  # fmt: skip
            return out
        self.library.morph_prefill_attention(
            q.data_ptr(), q.stride(0), storage.data_ptr(), storage.stride(0), table_row.data_ptr(), max_pages,
            page_tokens(dim, self.dtype), self._is_bf16, rows, columns // dim, self.num_kv_heads, dim, start, scale,
            out.data_ptr(), self.threads,
        )  # fmt: skip
        return out

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
        dim = head_dim(storage)
        if dim not in HEAD_DIMS:
            return super().decode_attention(q, storage, table, max_pages, slots, lens, scale, out)
        rows, columns = q.shape
        if out is None:
            out = torch.empty((rows, columns))
        self.library.morph_decode_attention(
            q.data_ptr(), q.stride(0), storage.data_ptr(), storage.stride(0), table.data_ptr(), table.stride(0),
            max_pages, page_tokens(dim, self.dtype), self._is_bf16, slots.data_ptr(), lens.data_ptr(), rows,
            columns // dim, self.num_kv_heads, dim, scale, out.data_ptr(), self.threads,
        )  # fmt: skip
        return out

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
        if not _has_gdn(params):
            return super().gdn_prefill(x_in, params, storage, table_row, conv_tail, has_state, start, out)
        rows = x_in.shape[0]
        if out is None:
            out = torch.empty((rows, params.heads * params.head_dim))
        self.library.morph_gdn_prefill(
            self.gdn_params(params), x_in.data_ptr(), x_in.stride(0), rows, storage.data_ptr(), storage.stride(0),
            table_row.data_ptr(), page_tokens(params.head_dim, self.dtype), self._is_bf16, conv_tail.data_ptr(),
            has_state, start, out.data_ptr(), self.threads,
        )  # fmt: skip
        return out

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
        if not _has_gdn(params):
            return super().gdn_decode(x_in, params, storage, table, slots, conv_tails, positions, out)
        rows = x_in.shape[0]
        if out is None:
            out = torch.empty((rows, params.heads * params.head_dim))
        self.library.morph_gdn_decode(
            self.gdn_params(params), x_in.data_ptr(), x_in.stride(0), rows, storage.data_ptr(), storage.stride(0),
            table.data_ptr(), table.stride(0), page_tokens(params.head_dim, self.dtype), self._is_bf16,
            slots.data_ptr(), conv_tails.data_ptr(), conv_tails.stride(0), positions.data_ptr(), out.data_ptr(),
            self.threads,
        )  # fmt: skip
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
        from morph.kernels.native_decode import NativeDecoder

        ssm = next((block.ssm for block in weights.blocks if block.ssm is not None), None)
        if config.head_dim not in HEAD_DIMS or (ssm is not None and not _has_gdn(ssm.params)):
            return None
        return NativeDecoder(self, config, weights, memory, cos, sin, sums)

    def gdn_params(self, params: SSMParams) -> int:
        """Address of the C struct of these parameters, made once."""
        known = self._params.get(params)
        if known is None:
            conv = params.conv_weight.T.contiguous()
            tensors = (conv, params.ab_bias, params.gain, params.mix, params.cos, params.sin)
            struct = _GdnParams(
                *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
                params.heads, params.kv_heads, params.state_heads, params.head_dim, conv.shape[0], params.window,
            )  # fmt: skip
            known = self._params[params] = (struct, conv, ctypes.addressof(struct))
        return known[2]


def _has_gdn(params: SSMParams) -> bool:
    return params.head_dim in HEAD_DIMS and params.conv_weight.shape[1] <= MAX_CONV_WIDTH


def _choose_gemm(library: ctypes.CDLL, dtype: torch.dtype) -> str:
    """MORPH_CPU_GEMM, or the fastest that the processor and the dtype have.

    Raises:
        ValueError: an unknown name, or `fixed` on a processor without VNNI.
    """
    wanted = os.environ.get("MORPH_CPU_GEMM", "auto")
    if wanted not in ("auto", *GEMMS):
        raise ValueError(f"MORPH_CPU_GEMM is {wanted!r}; use auto, {', '.join(GEMMS[:-1])} or {GEMMS[-1]}")
    has_fixed = bool(library.morph_has_fixed())
    if wanted == "fixed" and not has_fixed:
        raise ValueError("MORPH_CPU_GEMM is 'fixed', which needs AVX-512 VNNI; use auto, float32 or onednn")
    if dtype is not torch.bfloat16:
        return "float32"
    if wanted != "auto":
        return wanted
    if cpu_has("amx_bf16"):
        return "onednn"
    return "fixed" if has_fixed else "float32"
