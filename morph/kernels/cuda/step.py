"""One decode step as a sequence of kernels over fixed buffers, with nothing that waits for the host.

Run eagerly it is what the tests check; captured, it is a CUDA graph that serves every mix of layouts.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from morph.config import ModelConfig
from morph.kernels.cuda import attention_decode
from morph.kernels.cuda.attention_decode import decode_attention
from morph.kernels.cuda.backend import CudaLinear
from morph.kernels.cuda.buffers import ATTENTION, SSM, Buffers
from morph.kernels.cuda.gdn_decode import Scratch, gdn_decode
from morph.kernels.cuda.norm import add_rms_norm
from morph.kernels.cuda.rope import rope_write_kv
from morph.kernels.cuda.row_linear import row_linear
from morph.kernels.cuda.swiglu import silu_mul


class DecodeStep:
    """The kernels of a step.

    Args:
        weights: `ModelWeights` packed by `CudaKernels`. memory: `PageTables`.
        cos, sin: float32 `[max_context, head_dim / 2]`.
        sums: float64 `[slots, blocks, hidden]`.
        capacity: most rows of a batch.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Any,
        memory: Any,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sums: torch.Tensor,
        dtype: torch.dtype,
        capacity: int,
    ) -> None:
        self.config, self.weights, self.memory, self.dtype = config, weights, memory, dtype
        self.cos, self.sin, self.sums = cos, sin, sums
        device = memory.table.device
        self.buffers = Buffers.make(config, weights, capacity, dtype, device)
        self.pages = memory.pool.storage.view(dtype)
        self.max_pages = memory.layout.max_pages
        sizes = {size: self._splits(size) for size in range(1, capacity + 1)}
        rows = max(sizes, key=lambda size: size * sizes[size])
        part, stats = attention_decode.scratch(rows * sizes[rows], config.num_heads, config.head_dim, 1, device)
        self._part, self._stats = part.view(-1), stats.view(-1)
        self._scratch = Scratch.make(capacity, config.num_heads, config.num_kv_heads, config.head_dim, device)
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _splits(self, rows: int) -> int:
        return attention_decode.splits_for(rows, self.config.num_kv_heads, self.max_pages)

    def run(self, rows: int, uniform: str | None = None) -> None:
        """A step over the first `rows` rows of the buffers: `logits` and `best` are made, memory moves on by a token.

        Args:
            uniform: `attention` or `ssm` when no row takes the other path in any adaptive block: products are then
                dense. None = by the row lists.
        """
        b, config, eps = self.buffers, self.config, self.config.rms_norm_eps
        h, normed, mixed, delta = b.hidden[:rows], b.normed[:rows], b.mixed[:rows], b.delta[:rows]
        h.copy_(self.weights.embedding.weight.index_select(0, b.tokens[:rows]))
        for block, weights in enumerate(self.weights.blocks):
            sums = self.sums[:, block] if config.is_adaptive else None
            add_rms_norm(h, delta if block else None, weights.input_norm, eps, normed, sums, b.slots)
            kind = config.block_kinds[block]
            whole = uniform if kind == "adaptive" else kind
            if whole == "attention":
                self._attention(weights.attention, block, rows, whole=True)
            elif whole == "ssm":
                self._ssm(weights.ssm, block, rows, whole=True)
            else:
                # The two paths meet in different rows of `mixed` only, so the graph may run them side by side.
                self._fork()
                with nullcontext() if self._side is None else torch.cuda.stream(self._side):
                    self._ssm(weights.ssm, block, rows, whole=False)
                self._attention(weights.attention, block, rows, whole=False)
                self._join()
            add_rms_norm(h, mixed, weights.post_norm, eps, normed)
            mlp = b.mlp[:rows]
            _dense(normed, weights.gate_up, mlp)
            inner = weights.down.k
            silu_mul(mlp[:, :inner], mlp[:, inner:], b.act[:rows])
            _dense(b.act[:rows], weights.down, delta)
        add_rms_norm(h, delta, self.weights.norm, eps, normed)
        b.logits[:rows].copy_(torch.mm(normed, self.weights.head.weight.t()))
        torch.argmax(b.logits[:rows], dim=-1, out=b.best[:rows])

    def _fork(self) -> None:
        if self._side is not None:
            self._side.wait_stream(torch.cuda.current_stream())

    def _join(self) -> None:
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def _rows(self, block: int, which: int, whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
        b = self.buffers
        return (b.everyone, b.live) if whole else (b.lists[block, which], b.counts[block, which : which + 1])

    def _attention(self, mixer: Any, block: int, rows: int, whole: bool) -> None:
        b, config = self.buffers, self.config
        members, count = self._rows(block, ATTENTION, whole)
        normed, qkv, heads, mixed = b.normed[:rows], b.qkv[:rows], b.attended[:rows], b.mixed[:rows]
        if whole:
            _dense(normed, mixer.qkv, qkv)
        else:
            row_linear(normed, mixer.qkv.weight, qkv, count, members, gather=True)
        table = self.memory.table[:, block]
        rope_write_kv(
            qkv, self.cos, self.sin, b.positions, b.slots, mixer.q_norm, mixer.k_norm, config.rms_norm_eps, self.pages,
            table, self.max_pages, config.num_kv_heads, config.head_dim, members, count,
        )  # fmt: skip
        splits = self._splits(rows)
        places = rows * config.num_heads * splits
        part = self._part[: places * config.head_dim].view(rows, config.num_heads, splits, config.head_dim)
        stats = self._stats[: places * 2].view(rows, config.num_heads, splits, 2)
        decode_attention(
            qkv, self.pages, table, self.max_pages, b.slots, b.positions, count, config.head_dim**-0.5,
            config.num_kv_heads, config.head_dim, heads, part, stats, members,
        )  # fmt: skip
        if whole:
            _dense(heads, mixer.out, mixed)
        else:
            row_linear(heads, mixer.out.weight, mixed, count, members, scatter=True)

    def _ssm(self, mixer: Any, block: int, rows: int, whole: bool) -> None:
        b = self.buffers
        members, count = self._rows(block, SSM, whole)
        normed, heads, mixed = b.normed[:rows], b.recurred[:rows], b.mixed[:rows]
        inputs = b.inputs[:rows, : mixer.inputs.n]
        if whole and inputs.is_contiguous():
            _dense(normed, mixer.inputs, inputs)
        else:
            row_linear(normed, mixer.inputs.weight, inputs, count, members, gather=True)
        gdn_decode(
            inputs, mixer.params, self.memory.pool.storage, self.dtype, self.memory.table[:, block], b.slots,
            b.positions, count, self.memory.conv_tails[:, block], self._scratch, heads, members,
        )  # fmt: skip
        down = inputs[:, mixer.inputs.n - mixer.gate_up.k :]
        row_linear(down, mixer.gate_up.weight, heads, count, bias=mixer.gate_up.bias, silu_mul=heads)
        if whole:
            _dense(heads, mixer.out, mixed)
        else:
            row_linear(heads, mixer.out.weight, mixed, count, members, scatter=True)


def _dense(x: torch.Tensor, weight: CudaLinear, out: torch.Tensor) -> None:
    torch.mm(x, weight.weight.t(), out=out)
