"""Which layouts one step of distillation trains."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from morph.config import ModelConfig

Bits = list[bool]


def free_blocks(config: ModelConfig) -> list[int]:
    """Blocks whose mixer a layout chooses."""
    return [index for index, kind in enumerate(config.block_kinds) if kind == "adaptive"]


def with_attention(config: ModelConfig, chosen: Sequence[int]) -> Bits:
    """The layout with attention in these free blocks; static blocks keep their mixer."""
    wanted = set(chosen)
    return [kind == "attention" or (kind == "adaptive" and i in wanted) for i, kind in enumerate(config.block_kinds)]


def step_layouts(config: ModelConfig, count: int, ranking: Sequence[int], rng: np.random.Generator) -> list[Bits]:
    """`count` layouts: all-ssm, then one by sensitivity ranking, the rest at random.

    A random layout draws the *number* of attention blocks uniformly and then their places; independent bits would
    hardly ever be far from one half. The ranked one has attention in the blocks that need it most.

    Args:
        ranking: free blocks, the one that loses most by its ssm first.
    """
    free = free_blocks(config)
    layouts = [with_attention(config, ())]
    while len(layouts) < count:
        # 1 … all but one: all-attention has nothing to train, all-ssm is there already.
        number = int(rng.integers(1, max(2, len(free))))
        chosen = ranking[:number] if len(layouts) == 1 else rng.permutation(free)[:number].tolist()
        layouts.append(with_attention(config, chosen))
    return layouts[:count]
