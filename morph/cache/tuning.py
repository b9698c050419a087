"""Which mix of recency, frequency and value keeps the right entries: small copies of the cache try several.

Each candidate plays a sample of the traffic on a cache without memory behind it, as large as the sample is. The one
that saved the most FLOPs lately sets the real one's exponents.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from morph.cache.context_cache import ContextCache
from morph.cache.cost import PrefillCost
from morph.cache.eviction import GreedyDual
from morph.cache.snapshot import BlockData, path_key
from morph.cache.tree import WIDTH
from morph.memory.pool import UnitPool
from morph.memory.tables import UnitLayout

CANDIDATES = ((0.0, 0.0), (0.0, 1.0), (1.0, 0.5), (1.0, 1.0), (1.0, 2.0))
"""(frequency, worth) of `GreedyDual`; the first one is LRU."""
LEAD = 1.05
"""How much better than the current choice another must be."""
ROOT_TOKENS = 1024
"""Prompts that begin with the same so many tokens are sampled together, so that what they share is seen."""


class _Counted(PrefillCost):
    """Cost of layouts of which a copy knows the number of attention blocks alone."""

    def __init__(self, cost: PrefillCost) -> None:
        self.attention, self.ssm, self.blocks, self.mlp = cost.attention, cost.ssm, cost.blocks, cost.mlp
        self.count = 0

    def saved(self, bits: Sequence[bool], tokens: int, beyond: int = 0) -> float:
        """See `PrefillCost.saved`; the blocks of the layout are those of the prompt at hand."""
        return self.flops(self.count, tokens) - self.flops(self.count, beyond)


@dataclass
class _Copy:
    cache: ContextCache
    cost: _Counted
    evictor: GreedyDual
    saved: float = 0.0


@dataclass
class Tuner:
    """Chooses the exponents of a cache's evictor.

    Args:
        evictor: of the real cache. units: what that one may hold.
        largest: units of one request at the longest context.
        sample: one in so many prompts is played (by their first tokens).
        period: prompts between two choices. memory: share of older savings that a choice leaves.
    """

    evictor: GreedyDual
    units: int
    largest: int
    layout: UnitLayout
    cost: PrefillCost
    sample: int = 1
    period: int = 32
    memory: float = 0.9
    _copies: list[_Copy] = field(default_factory=list)
    _seen: int = 0

    def __post_init__(self) -> None:
        units = self.units // self.sample
        for frequency, worth in CANDIDATES:
            evictor = GreedyDual(frequency, worth)
            pool = UnitPool(units + self.largest, self.layout.unit_bytes, "meta")
            cost = _Counted(self.cost)
            self._copies.append(_Copy(ContextCache(pool, cost, units, evictor=evictor), cost, evictor))

    def saw(self, namespace: str, path: bytes, bits: Sequence[bool], places: Sequence[int], limit: int) -> None:
        """A prompt went through.

        Args:
            path: its tokens, encoded. places: where it left checkpoints, ascending. limit: the longest usable prefix.
        """
        if zlib.crc32(path[: ROOT_TOKENS * WIDTH]) % self.sample:
            return
        name = f"{namespace}|{''.join('01'[bool(bit)] for bit in bits)}"
        for copy in self._copies:
            copy.cost.count = sum(map(bool, bits))
            copy.saved += self._play(copy.cache, name, path, bits, places, limit)
        self._seen += 1
        if self._seen % self.period == 0:
            best = max(self._copies, key=lambda copy: copy.saved)
            now = (self.evictor.frequency, self.evictor.worth)
            current = sum(c.saved for c in self._copies if (c.evictor.frequency, c.evictor.worth) == now)
            # A lead of one or two hits is luck.
            if best.saved > LEAD * current:
                self.evictor.frequency, self.evictor.worth = best.evictor.frequency, best.evictor.worth
            for copy in self._copies:
                copy.saved *= self.memory

    def _play(
        self, cache: ContextCache, namespace: str, path: bytes, bits: Sequence[bool], places: Sequence[int], limit: int
    ) -> float:
        """One prompt through one copy; returns the FLOPs that its hit saves. All blocks of a kind stand as one."""
        attention = sum(map(bool, bits))
        whole = (True, True) if attention == len(bits) else (True, False)
        hit = cache.find(namespace, path, limit, whole, 2, gates=False)
        saved = 0.0
        if hit is not None:
            saved = self.cost.flops(attention, hit.tokens)
            cache.used(hit, whole)
            cache.leave(namespace, hit)
        if not places:
            return saved
        heads = attention * self.layout.kv_heads
        states = (len(bits) - attention) * self.layout.state_units
        shared = hit.node.snapshots.get(path_key(whole)) if hit is not None else None
        known = hit.tokens // self.layout.page_tokens if hit is not None and shared is not None else 0
        pages = self.layout.pages(places[-1])
        new = max(0, pages - known)
        own = cache.pool.alloc(heads * new).reshape(heads, new)
        below = shared.blocks[0].units[:, :known] if shared is not None else own[:, :0]
        # Publishing may evict what the prompt itself builds upon.
        cache.pool.retain(below.ravel())
        for place in places:
            count = self.layout.pages(place)
            units = np.concatenate([below, own], axis=1)[:, :count]
            cache.pool.retain(units.ravel())
            blocks = [BlockData(True, units), BlockData(bool(whole[1]), cache.pool.alloc(states))]
            cache.publish(namespace, path[: place * WIDTH], whole, blocks)
        cache.pool.release(np.concatenate([own.ravel(), below.ravel()]))
        return saved
