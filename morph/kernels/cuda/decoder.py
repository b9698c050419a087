"""Decode steps as CUDA graphs: one per (bucket of batch sizes, uniform path or mix), layouts as data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from morph.config import ModelConfig
from morph.kernels.cuda.buffers import RowLists, bucket_of
from morph.kernels.cuda.step import DecodeStep
from morph.kernels.interface import PathRows


class CudaDecoder:
    """Decode steps of one model; see `Decoder`. On the CPU (tests) the same kernels run one by one.

    Args:
        weights: `ModelWeights` packed by `kernels`. memory: page tables of the model's requests.
        cos, sin: float32 `[max_context, head_dim / 2]`.
        sums: float64 `[slots, blocks, hidden]`, running sums of the normed inputs.

    Raises:
        UnsupportedModel: a head_dim that the kernels do not have.
    """

    embeds = True

    def __init__(
        self,
        kernels: Any,
        config: ModelConfig,
        weights: Any,
        memory: Any,
        cos: torch.Tensor,
        sin: torch.Tensor,
        sums: torch.Tensor,
    ) -> None:
        kernels.head_dim(memory.pool.storage)
        self.capacity = memory.table.shape[0]
        self.config = config
        self.step = DecodeStep(config, weights, memory, cos, sin, sums, kernels.dtype, self.capacity)
        self._graphs: dict[tuple[int, str | None], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._current: RowLists | None = None

    def prepare(self, paths: Sequence[tuple[PathRows | None, PathRows | None]]) -> RowLists:
        """See `Decoder.prepare`."""
        return RowLists.build(paths, self.config.block_kinds, self.capacity, self.step.buffers.tokens.device)

    def run(
        self, prepared: RowLists, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """One step: logits float32 `[rows, vocab]`, valid until the next step.

        Args:
            prepared: from `prepare`.
            hidden: int64 `[rows]`, the last tokens (`embeds`); their embeddings are looked up inside.
            positions, slots: int32 `[rows]`.
        """
        rows = len(slots)
        bucket = bucket_of(rows, self.capacity)
        # Captured first: capturing runs steps of its own over empty buffers.
        graph = self._graph(bucket, prepared.uniform)
        buffers = self.step.buffers
        if prepared is not self._current:
            buffers.fill(prepared)
            self._current = prepared
        buffers.set_rows(hidden, positions, slots, bucket)
        if graph is None:
            self.step.run(bucket, prepared.uniform)
        else:
            graph.replay()
        return buffers.logits[:rows]

    def warm_up(self, sizes: Iterable[int]) -> None:
        """See `Decoder.warm_up`: compiles and captures."""
        buckets = sorted({bucket_of(size, self.capacity) for size in sizes}, reverse=True)
        # Without adaptive blocks every batch is alike, see `RowLists.uniform`.
        for uniform in (None, "attention", "ssm") if self.config.is_adaptive else ("attention",):
            for size in buckets:
                self._graph(size, uniform)

    def _graph(self, bucket: int, uniform: str | None) -> torch.cuda.CUDAGraph | None:
        buffers = self.step.buffers
        if buffers.tokens.device.type != "cuda":
            return None
        key = (bucket, uniform)
        if key not in self._graphs:
            # No row is live while kernels are compiled and captured, so memory and sums stay as they are.
            buffers.clear()
            self._current = None
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                self.step.run(bucket, uniform)
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self.step.run(bucket, uniform)
            self._pool = self._pool or graph.pool()
            self._graphs[key] = graph
        return self._graphs[key]
