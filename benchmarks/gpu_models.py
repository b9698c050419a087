"""Models of known shapes with random weights in device memory, their pools filled, for timing decode steps."""

from __future__ import annotations

import math
import os
import pathlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from morph.config import ModelConfig, SSMConfig
from morph.engine.runner import Path
from morph.engine.weights import AttentionWeights, BlockWeights, ModelWeights, SSMWeights
from morph.kernels.cuda.backend import CudaKernels
from morph.kernels.cuda.buffers import RowLists
from morph.kernels.cuda.decoder import CudaDecoder
from morph.kernels.interface import SSMParams
from morph.memory.pool import UnitPool
from morph.memory.tables import PageTables, UnitLayout
from morph.model.rope import rope_tables

Layout = tuple[bool, ...]


def shape(vocab: int, hidden: int, inner: int, blocks: int, heads: int, kv_heads: int, dim: int) -> ModelConfig:
    """A config whose ssm mixers have a window of 64 tokens, the dearer of the two kinds."""
    return ModelConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=inner, num_blocks=blocks, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim, max_context=131072, rope_theta=500000.0, ssm=SSMConfig(window=64),
    )  # fmt: skip


SHAPES = {
    "135m": shape(49152, 576, 1536, 30, 9, 3, 64),
    "1b": shape(128256, 2048, 8192, 16, 32, 8, 64),
    "3b": shape(128256, 3072, 8192, 28, 24, 8, 128),
    "8b": shape(128256, 4096, 14336, 32, 32, 8, 128),
}
"""SmolLM2-135M, Llama-3.2-1B, Llama-3.2-3B, Llama-3.1-8B; embeddings tied in all (the head is read either way)."""


def random_weights(config: ModelConfig, kernels: CudaKernels, cos: torch.Tensor, sin: torch.Tensor) -> ModelWeights:
    """Weights that keep activations near unit size."""
    device, hidden = kernels.device, config.hidden_size

    def pack(n: int, k: int, bias: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
        return kernels.pack_linear(torch.empty(n, k, device=device, dtype=kernels.dtype).normal_(std=k**-0.5), bias)

    def ones(n: int) -> torch.Tensor:
        return torch.ones(n, device=device)

    assert config.ssm is not None
    rank, states, width = config.ssm.gate_rank, config.num_state_heads, config.ssm.conv_width
    blocks = []
    for _ in range(config.num_blocks):
        params = SSMParams.build(
            config, conv_weight=torch.eye(width, device=device)[-1].repeat(config.qkv_size, 1),
            ab_bias=torch.cat([torch.linspace(1, 5, states, device=device), torch.zeros(states, device=device)]),
            gain=ones(config.num_heads), mix=torch.zeros(config.num_heads, device=device), cos=cos, sin=sin,
        )  # fmt: skip
        blocks.append(
            BlockWeights(
                ones(hidden), ones(hidden),
                AttentionWeights(pack(config.qkv_size, hidden), pack(hidden, config.q_size), None, None),
                SSMWeights(
                    pack(config.qkv_size + 2 * states + rank, hidden), params,
                    pack(config.q_size, rank, ones(config.q_size)), pack(hidden, config.q_size),
                ),
                pack(2 * config.intermediate_size, hidden), pack(hidden, config.intermediate_size),
            )
        )  # fmt: skip
    embedding = pack(config.vocab_size, hidden)
    return ModelWeights(embedding, blocks, ones(hidden), embedding)


def random_layouts(config: ModelConfig, count: int, share: float, seed: int = 0) -> list[Layout]:
    """`count` layouts, all different, blocks drawn independently with a share of attention."""
    rng, found = random.Random(seed), dict[Layout, None]()
    while len(found) < count:
        found[tuple(rng.random() < share for _ in range(config.num_blocks))] = None
    return list(found)


def recorded_layouts(config: ModelConfig, path: os.PathLike[str], count: int, seed: int = 0) -> list[Layout]:
    """`count` layouts drawn from recorded gate decisions: a file with one bit string per line.

    A recording of a model with another number of blocks is stretched: a block takes the bit of the block at the same
    relative depth.

    Raises:
        ValueError: the file holds no layout, or a line is no bit string.
    """
    lines = [line.strip() for line in pathlib.Path(path).read_text().splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no layout; write one bit string per line, as answers report them")
    for number, line in enumerate(lines, 1):
        if set(line) - {"0", "1"}:
            raise ValueError(f"line {number} of {path} is {line!r}; write 0 and 1 only")
    blocks = config.num_blocks
    drawn = random.Random(seed).choices(lines, k=count)
    return [tuple(line[i * len(line) // blocks] == "1" for i in range(blocks)) for line in drawn]


@dataclass
class Bench:
    """A model whose batches can be set up and stepped."""

    config: ModelConfig
    kernels: CudaKernels
    weights: ModelWeights
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def make(cls, name: str, device: str = "cuda") -> Bench:
        """A model of one of `SHAPES`."""
        config = SHAPES[name]
        kernels = CudaKernels(device, torch.bfloat16, config.num_kv_heads)
        cos, sin = rope_tables(config, config.max_context, kernels.device)
        return cls(config, kernels, random_weights(config, kernels, cos, sin), cos, sin)

    def batch(self, layouts: Sequence[Layout], context: int) -> Batch:
        """A batch with one request per layout, each with `context` tokens in memory."""
        config, device = self.config, self.kernels.device
        layout = UnitLayout.of(config, torch.bfloat16, context + 8)
        need = sum(
            layout.attention_units(context + 8) if bit else layout.state_units for bits in layouts for bit in bits
        )
        pool = UnitPool(need, layout.unit_bytes, device)
        # Random values, not zeros: hardware is faster on zeros. As float32 states they are of the same size.
        for part in pool.storage.view(torch.bfloat16).split(1 << 14):
            part.normal_(std=0.5)
        tables = PageTables(pool, layout, config, len(layouts), device)
        for bits in layouts:
            slot = tables.acquire()
            assert slot is not None
            for block, bit in enumerate(bits):
                if bit:
                    tables.open_attention(slot, block, context + 8)
                else:
                    tables.open_ssm(slot, block)
        sums = torch.zeros((len(layouts), config.num_blocks, config.hidden_size), dtype=torch.float64, device=device)
        decoder = CudaDecoder(self.kernels, config, self.weights, tables, self.cos, self.sin, sums)
        slots = torch.arange(len(layouts), dtype=torch.int32, device=device)
        paths = []
        for block in range(config.num_blocks):
            pair: list[Path | None] = []
            for path in (True, False):
                rows = [i for i, bits in enumerate(layouts) if bits[block] is path]
                index = torch.tensor(rows, device=device)
                pair.append(Path(index, slots[index], len(rows)) if rows else None)
            paths.append((pair[0], pair[1]))
        return Batch(self, list(layouts), context, decoder, decoder.prepare(paths), slots)


@dataclass
class Batch:
    """A batch in memory."""

    bench: Bench
    layouts: list[Layout]
    context: int
    decoder: CudaDecoder
    lists: RowLists
    slots: torch.Tensor

    def bytes_moved(self) -> dict[str, float]:
        """Bytes that a step must move: weights of the paths present once, keys and values once, states twice."""
        config, weights = self.bench.config, self.bench.weights
        total = {"weights": 2.0 * weights.head.n * weights.head.k, "kv": 0.0, "states": 0.0}
        ring = config.ssm.window if config.ssm else 0
        for block in range(config.num_blocks):
            w = weights.blocks[block]
            assert w.attention is not None and w.ssm is not None
            used = [w.gate_up, w.down]
            attention = sum(bits[block] for bits in self.layouts)
            if attention:
                used += [w.attention.qkv, w.attention.out]
            if attention < len(self.layouts):
                used += [w.ssm.inputs, w.ssm.gate_up, w.ssm.out]
            total["weights"] += sum(2.0 * x.n * x.k for x in used)
            total["kv"] += attention * self.context * 4.0 * config.kv_size
            state = 8.0 * config.num_state_heads * config.head_dim**2 + ring * 4.0 * config.kv_size
            state += 8.0 * 3 * config.qkv_size  # conv tail, read and written
            total["states"] += (len(self.layouts) - attention) * state
        return total

    def step_seconds(self, repeats: int = 12, uniform: bool = True) -> float:
        """Median time of a step's graph.

        Args:
            uniform: let a batch of one layout take the dense products.
        """
        rows = len(self.layouts)
        tokens = torch.arange(rows, device=self.slots.device)
        positions = torch.full_like(self.slots, self.context)
        lists = self.lists if uniform else RowLists(self.lists.lists, self.lists.counts, None)
        assert math.isfinite(float(self.decoder.run(lists, tokens, positions, self.slots).float().abs().max()))
        graph = self.decoder._graph(rows, lists.uniform)
        assert graph is not None
        return replay_seconds(graph, repeats)


def replay_seconds(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Median seconds of a replay, the first ones left out."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 3)]
    for event in events:
        event.record()
        graph.replay()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in pairwise(events[2:]))
    return times[len(times) // 2] / 1e3
