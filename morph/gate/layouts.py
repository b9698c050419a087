"""Layouts to measure: nested static ones, random ones, and neighbours of given ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def nested_layouts(ranking: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """Static layouts with attention in the first `count` blocks of the ranking; bool `[counts, blocks]`."""
    layouts = torch.zeros(len(counts), len(ranking), dtype=torch.bool)
    for row, count in enumerate(counts):
        layouts[row, list(ranking[:count])] = True
    return layouts


def random_layouts(ranking: Sequence[int], rows: int, generator: torch.Generator, spread: float = 0.35) -> torch.Tensor:
    """Layouts of uniform count, bool `[rows, blocks]`: half at random places, half near the ranking's.

    Args:
        ranking: most sensitive first. spread: noise on the ranking, as a share of its length.
    """
    blocks = len(ranking)
    place = torch.empty(blocks)
    place[torch.tensor(ranking)] = torch.arange(blocks, dtype=torch.float32)
    counts = torch.randint(1, blocks, (rows,), generator=generator)
    noise = torch.randn(rows, blocks, generator=generator) * blocks * spread
    key = torch.where(
        (torch.arange(rows) % 2 == 0)[:, None], torch.rand(rows, blocks, generator=generator), place + noise
    )
    rank = key.argsort(dim=1).argsort(dim=1)
    return rank < counts[:, None]


def flipped(layouts: torch.Tensor, rate: float, generator: torch.Generator) -> torch.Tensor:
    """A neighbour of each layout, bool `[rows, blocks]`: each block flipped with chance `rate`, at least one."""
    flips = torch.rand(layouts.shape, generator=generator) < rate
    sure = torch.randint(layouts.shape[1], (len(layouts),), generator=generator)
    flips[torch.arange(len(layouts)), sure] = True
    return layouts ^ flips
