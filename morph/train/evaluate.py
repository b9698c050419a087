"""Measurements during training on held-out text: KL of fixed layouts, and which blocks miss their attention most."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from morph.train.layouts import free_blocks, with_attention
from morph.train.steps import distill
from morph.train.trunk import Trunk

SHARES = (0.0, 0.25, 0.5, 0.75)


def evaluate_layouts(
    trunk: Trunk, tokens: torch.Tensor, ranking: Sequence[int], rows: int, chunk: int
) -> dict[str, float]:
    """KL to the base in nats per token, by number of attention blocks: `{"0": …, "8": …}`.

    Args:
        tokens: `[batch, tokens]`. ranking: free blocks, the most sensitive first. rows: sequences at a time.
    """
    free = len(free_blocks(trunk.layout_config))
    counts = sorted({round(share * free) for share in SHARES})
    layouts = [with_attention(trunk.layout_config, ranking[:count]) for count in counts]
    total = torch.zeros(len(layouts), device=trunk.device)
    for part in tokens.split(rows):
        for index, layout in enumerate(layouts):
            result = distill(trunk, part, None, [layout], 1.0, chunk, train=False)
            total[index] += result.kl[0] * len(part)
    return {str(count): float(value) for count, value in zip(counts, total / len(tokens), strict=True)}


def rank_blocks(trunk: Trunk, tokens: torch.Tensor, rows: int, chunk: int) -> list[int]:
    """Free blocks by the KL of running the ssm in that block alone, the most sensitive first."""
    free = free_blocks(trunk.layout_config)
    losses = torch.zeros(len(free), device=trunk.device)
    for part in tokens.split(rows):
        for place, block in enumerate(free):
            layout = with_attention(trunk.layout_config, [other for other in free if other != block])
            losses[place] += distill(trunk, part, None, [layout], 1.0, chunk, train=False).kl[0] * len(part)
    order = torch.argsort(losses, descending=True, stable=True).tolist()
    return [free[place] for place in order]
