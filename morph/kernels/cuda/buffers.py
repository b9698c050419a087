"""Fixed buffers of decode steps: what changes between two replays of a graph is data in here.

A row list says for each (block, path) which rows of the batch take it, a count how many do. Rows beyond the batch are
in no list, so nothing of them reaches the pool: they need neither a page nor a slot of their own.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from morph.config import ModelConfig
from morph.kernels.interface import PathRows

ATTENTION, SSM = 0, 1
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256)


def bucket_of(rows: int, capacity: int) -> int:
    """The smallest captured batch size that holds `rows` rows.

    Raises:
        ValueError: more rows than slots.
    """
    if not 0 < rows <= capacity:
        raise ValueError(f"a decode batch of {rows} rows, the engine has {capacity} slots")
    at = bisect.bisect_left(SIZES, rows)
    if at < len(SIZES):
        return min(SIZES[at], capacity)
    return min(-(-rows // 64) * 64, capacity)


@dataclass(frozen=True, eq=False)
class RowLists:
    """Row lists of one batch on the device.

    Attributes:
        lists: int32 `[blocks, 2, capacity]`, attention then ssm; entries beyond the count are 0.
        counts: int32 `[blocks, 2]`.
        uniform: `attention` or `ssm` when every row takes that path in every adaptive block, else None.
    """

    lists: torch.Tensor
    counts: torch.Tensor
    uniform: str | None

    @classmethod
    def build(
        cls,
        paths: Sequence[tuple[PathRows | None, PathRows | None]],
        kinds: Sequence[str],
        capacity: int,
        device: torch.device,
    ) -> RowLists:
        """From (attention, ssm) per block. Blocks that share a path object share the copy of its rows."""
        lists = torch.zeros((len(paths), 2, capacity), dtype=torch.int32, device=device)
        counts = [[0 if path is None else path.count for path in pair] for pair in paths]
        everyone = torch.arange(capacity, dtype=torch.int32, device=device)
        for block, pair in enumerate(paths):
            for which, path in enumerate(pair):
                if path is not None:
                    source = everyone[: path.count] if path.rows is None else path.rows
                    lists[block, which, : path.count] = source
        taken = {
            which
            for pair, kind in zip(paths, kinds, strict=True)
            if kind == "adaptive"
            for which, path in enumerate(pair)
            if path is not None
        }
        uniform = None if len(taken) > 1 else ("ssm" if taken == {SSM} else "attention")
        return cls(lists, torch.tensor(counts, dtype=torch.int32).to(device), uniform)


@dataclass(frozen=True, eq=False)
class Buffers:
    """Inputs, row lists and activations of a step, for up to `capacity` rows.

    Attributes:
        tokens: int64 `[rows]`, last token of each row; `best` of the step before may be copied here on the device.
        positions, slots: int32 `[rows]`; slot -1 = a padding row.
        live: int32 `[1]`, rows of the batch. everyone: int32 `[rows]`, 0, 1, 2, …
        hidden: float32 `[rows, hidden]`, the residual stream.
        logits: float32 `[rows, vocab]`. best: int64 `[rows]`, likeliest tokens.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    live: torch.Tensor
    everyone: torch.Tensor
    lists: torch.Tensor
    counts: torch.Tensor
    hidden: torch.Tensor
    normed: torch.Tensor
    mixed: torch.Tensor
    delta: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    inputs: torch.Tensor
    recurred: torch.Tensor
    mlp: torch.Tensor
    act: torch.Tensor
    logits: torch.Tensor
    best: torch.Tensor

    @classmethod
    def make(
        cls, config: ModelConfig, weights: Any, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> Buffers:
        """Zeroed buffers for a model's weights."""

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def floats(columns: int, kind: torch.dtype = dtype) -> torch.Tensor:
            return torch.zeros((capacity, columns), dtype=kind, device=device)

        inputs = max((block.ssm.inputs.n for block in weights.blocks if block.ssm is not None), default=1)
        return cls(
            tokens=ints(capacity, dtype=torch.int64), positions=ints(capacity), slots=ints(capacity) - 1, live=ints(1),
            everyone=torch.arange(capacity, dtype=torch.int32, device=device),
            lists=ints(config.num_blocks, 2, capacity), counts=ints(config.num_blocks, 2),
            hidden=floats(config.hidden_size, torch.float32), normed=floats(config.hidden_size),
            mixed=floats(config.hidden_size), delta=floats(config.hidden_size), qkv=floats(config.qkv_size),
            attended=floats(config.q_size), inputs=floats(inputs), recurred=floats(config.q_size),
            mlp=floats(2 * config.intermediate_size), act=floats(config.intermediate_size),
            logits=floats(weights.head.n, torch.float32), best=ints(capacity, dtype=torch.int64),
        )  # fmt: skip

    def fill(self, batch: RowLists) -> None:
        """Take over a batch's row lists."""
        self.lists.copy_(batch.lists)
        self.counts.copy_(batch.counts)

    def clear(self) -> None:
        """No row is live: a step over these buffers changes neither pool nor sums."""
        self.live.zero_()
        self.counts.zero_()
        self.slots.fill_(-1)
        self.positions.zero_()

    def set_rows(self, tokens: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, bucket: int) -> None:
        """Take over what a step is fed with; the rest of the bucket becomes padding."""
        rows = len(slots)
        self.tokens[:rows].copy_(tokens, non_blocking=True)
        self.positions[:rows].copy_(positions, non_blocking=True)
        self.slots[:rows].copy_(slots, non_blocking=True)
        if rows < bucket:
            self.tokens[rows:bucket].zero_()
            self.positions[rows:bucket].zero_()
            self.slots[rows:bucket].fill_(-1)
        self.live.fill_(rows)
