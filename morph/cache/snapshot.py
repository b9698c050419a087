"""What is kept of a sequence at one token position: units, conv tails and gate sums of every block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from morph.memory.pool import Units

if TYPE_CHECKING:
    from morph.cache.tree import Node


def path_key(bits: Sequence[bool]) -> int:
    """A layout's first blocks as one number: 1, then a binary digit per block; `key >> 1` is that of one block less."""
    key = 1
    for bit in bits:
        key = key << 1 | bool(bit)
    return key


@dataclass(eq=False, slots=True)
class BlockData:
    """One block at one position. It depends on the tokens and on the bits of this block and those below alone.

    Attributes:
        attention: which mixer the block ran.
        units: int32 `[kv_heads, pages]` of keys and values, the last page perhaps filled in part; or `[state_units]`,
            states, then the ring.
        tail: float32 `[conv_width - 1, qkv]` of an ssm block.
        sums: float64 `[hidden]`, sum of the block's normed inputs over all tokens; None where it is not known.
        users: snapshots that hold it.
    """

    attention: bool
    units: Units
    tail: Any = None
    sums: Any = None
    users: int = 0


@dataclass(eq=False, slots=True)
class Snapshot:
    """A complete layout at one position.

    Attributes:
        node: position in the tree. key: `path_key` of the layout.
        tokens: tokens before it. gain: FLOPs that a hit saves over a hit at the nearest shallower snapshot.
        units: how many units leaving would free when it was last looked at.
        hits, used, weight: for the eviction policy.
    """

    node: Node
    key: int
    tokens: int
    blocks: list[BlockData]
    gain: float = 0.0
    units: int = 0
    hits: int = 0
    used: float = 0.0
    weight: float = 0.0
    stamp: int = 0
    gone: bool = field(default=False)
