"""What a prefill leaves behind at one position, while it is being made."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from morph.cache.snapshot import BlockData


@dataclass
class Checkpoint:
    """Grows by one block at a time; published when the pass that writes it is through.

    Attributes:
        tokens: the position: tokens before it.
        blocks: data of the blocks so far; the units are referenced.
        sums: float64 `[hidden]` of the next block, once its rows up to here are summed.
    """

    tokens: int
    blocks: list[BlockData] = field(default_factory=list)
    sums: torch.Tensor | None = None
