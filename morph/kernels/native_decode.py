"""A whole decode step of a model in one native call; mirrors native/decode_step.h."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from morph.config import ModelConfig
from morph.kernels.interface import PackedLinear, PathRows, page_tokens
from morph.kernels.native_backend import NativeKernels, NativeLinear

_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64


class _Linear(ctypes.Structure):
    _fields_ = [("weight", _POINTER), ("bias", _POINTER), ("n", _INT64), ("k", _INT64)]


class _Block(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, _Linear) for name in ("qkv", "out", "ssm_inputs", "ssm_gate", "ssm_out")),
        ("gdn", _POINTER),
        *((name, _Linear) for name in ("gate_up", "down")),
        *((name, _POINTER) for name in ("table", "conv_tails", "sums")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *(("blocks", _POINTER), ("norm", _POINTER), ("head", _Linear)),
        *((name, _POINTER) for name in ("cos", "sin", "storage")),
        *((name, _INT64) for name in ("num_blocks", "hidden", "heads", "kv_heads", "dim", "max_pages")),
        *((name, _INT64) for name in ("page_tokens", "unit_bytes", "table_stride", "tail_stride", "sums_stride")),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
        *((name, ctypes.c_int32) for name in ("is_bf16", "threads")),
    ]


class _Path(ctypes.Structure):
    _fields_ = [("rows", _POINTER), ("slots", _POINTER), ("count", _INT64)]


class Paths:
    """Row lists of a batch as C structures; they live as long as the batch's members stay."""

    def __init__(self, paths: Sequence[tuple[PathRows | None, PathRows | None]]) -> None:
        self._kept: list[torch.Tensor] = []
        self.array = (_Path * (2 * len(paths)))()
        seen: dict[int, _Path] = {}
        for block, pair in enumerate(paths):
            for which, path in enumerate(pair):
                if path is None:
                    continue
                if id(path) not in seen:
                    rows = None if path.rows is None else self._keep(path.rows)
                    seen[id(path)] = _Path(rows, self._keep(path.slots), path.count)
                self.array[2 * block + which] = seen[id(path)]

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor.to(torch.int32).contiguous())
        return self._kept[-1].data_ptr()


class NativeDecoder:
    """Decode steps of one model.

    Args:
        weights: `ModelWeights`, packed by `kernels`. memory: page tables of the model's requests.
        cos, sin: float32 `[max_context, head_dim / 2]`.
        sums: float64 `[slots, blocks, hidden]`, running sums of the normed inputs.
    """

    embeds = False

    def __init__(
        self,
        kernels: NativeKernels,
        config: ModelConfig,
        weights: Any,
        memory: Any,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sums: torch.Tensor,
    ) -> None:
        self._kernels, self._weights, self._kept = kernels, weights, [cos, sin, sums]
        self._vocab = weights.head.n
        blocks = (_Block * config.num_blocks)()
        for index, block in enumerate(weights.blocks):
            to = blocks[index]
            to.input_norm, to.post_norm = block.input_norm.data_ptr(), block.post_norm.data_ptr()
            if block.attention is not None:
                attention = block.attention
                to.qkv, to.out = _linear(attention.qkv), _linear(attention.out)
                to.q_norm, to.k_norm = _pointer(attention.q_norm), _pointer(attention.k_norm)
            if block.ssm is not None:
                to.ssm_inputs, to.ssm_gate = _linear(block.ssm.inputs), _linear(block.ssm.gate_up)
                to.ssm_out, to.gdn = _linear(block.ssm.out), kernels.gdn_params(block.ssm.params)
                to.conv_tails = memory.conv_tails[:, index].data_ptr()
            to.gate_up, to.down = _linear(block.gate_up), _linear(block.down)
            to.table = memory.table[:, index].data_ptr()
            to.sums = sums[:, index].data_ptr() if config.is_adaptive else None
        storage = memory.pool.storage
        self._blocks = blocks
        self._model = _Model(
            blocks=ctypes.addressof(blocks), norm=weights.norm.data_ptr(), head=_linear(weights.head),
            cos=cos.data_ptr(), sin=sin.data_ptr(), storage=storage.data_ptr(), num_blocks=config.num_blocks,
            hidden=config.hidden_size, heads=config.num_heads, kv_heads=config.num_kv_heads, dim=config.head_dim,
            max_pages=memory.layout.max_pages, page_tokens=page_tokens(config.head_dim, kernels.dtype),
            unit_bytes=storage.stride(0), table_stride=memory.table.stride(0),
            tail_stride=memory.conv_tails.stride(0), sums_stride=sums.stride(0), eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5, is_bf16=int(kernels.dtype is torch.bfloat16), threads=kernels.threads,
        )  # fmt: skip

    def prepare(self, paths: Sequence[tuple[PathRows | None, PathRows | None]]) -> Paths:
        """See `Decoder.prepare`."""
        return Paths(paths)

    def warm_up(self, sizes: Iterable[int]) -> None:
        """See `Decoder.warm_up`; there is nothing to do."""

    def run(self, prepared: Paths, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """See `Decoder.run`."""
        logits = torch.empty((hidden.shape[0], self._vocab))
        self._kernels.library.morph_decode_step(
            ctypes.addressof(self._model), ctypes.addressof(prepared.array), hidden.shape[0], hidden.data_ptr(),
            positions.data_ptr(), slots.data_ptr(), logits.data_ptr(),
        )  # fmt: skip
        return logits


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _linear(weight: PackedLinear) -> _Linear:
    assert isinstance(weight, NativeLinear)
    return _Linear(weight.pointer, weight.bias_pointer, weight.n, weight.k)
