"""The cache: finds what a prompt can start from, keeps what requests leave behind, gives memory back when asked.

Its units lie in the pool of the running requests, held by reference counts. So an entry that is evicted while requests
still read its pages frees nothing that they need, and one that shares pages with another costs only what is its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from morph.cache.cost import PrefillCost
from morph.cache.eviction import Evictor, GreedyDual
from morph.cache.snapshot import BlockData, Snapshot, path_key
from morph.cache.tree import WIDTH, Node, RadixTree, Walk, encode
from morph.memory.pool import UnitPool, Units


@dataclass
class Hit:
    """Where a request may start.

    Attributes:
        node: holds the data; pinned until `leave`.
        tokens: tokens that need not be computed, at most `node.tokens`; fewer only where all blocks are attention.
        matched: tokens that some stored path shares with the prompt: a place that more than one prompt goes through.
    """

    node: Node
    tokens: int
    matched: int

    def block(self, bits: Sequence[bool]) -> BlockData | None:
        """Data of the last of these blocks under these bits, or None: nobody took that way."""
        return self.node.blocks.get(path_key(bits))

    def sums(self, bits: Sequence[bool]) -> Any:
        """Gate sums of the block after these bits: they depend on what lies below it, not on its own mixer."""
        key = path_key(bits)
        for bit in (0, 1):
            data = self.node.blocks.get(key << 1 | bit)
            if data is not None and data.sums is not None:
                return data.sums
        return None


@dataclass
class Counts:
    """What happened since the start; `kinds` counts lookups of admitted requests by outcome."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    stored: int = 0
    evicted: int = 0
    kinds: Counter[str] = field(default_factory=Counter)


class ContextCache:
    """Snapshots of sequences, per namespace in a radix tree.

    Args:
        pool: where the units lie; the cache holds references.
        most_units: units that it may hold at most.
        least_tokens: shorter prefixes are not worth an entry.
        most_aside: bytes of conv tails and gate sums, which lie beside the pool.
    """

    def __init__(
        self,
        pool: UnitPool,
        cost: PrefillCost,
        most_units: int,
        least_tokens: int = 16,
        evictor: Evictor | None = None,
        most_aside: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool, self.cost = pool, cost
        self.most_units, self.least_tokens, self.most_aside = most_units, least_tokens, most_aside
        self.evictor = evictor or GreedyDual()
        self.clock = clock
        self.counts = Counts()
        self._trees: dict[str, RadixTree] = {}
        self._snapshots: dict[int, tuple[Snapshot, RadixTree]] = {}
        self._references: npt.NDArray[np.int32] = np.zeros(pool.num_units + 1, dtype=np.int32)
        self._held = self._aside = 0

    # ---- lookup

    def find(
        self,
        namespace: str,
        tokens: Sequence[int] | bytes,
        limit: int,
        bits: Sequence[bool],
        num_blocks: int,
        gates: bool,
    ) -> Hit | None:
        """The deepest usable position, pinned; None where there is none.

        Args:
            limit: most tokens that may be skipped.
            bits: decisions that are known already, block 0 first.
            gates: further blocks are decided by gates, which need the running sums.
        """
        tree = self._trees.get(namespace)
        if tree is None:
            return None
        walk = tree.walk(encode(tokens))
        key, complete = path_key(bits), len(bits) == num_blocks
        best: Hit | None = None
        if complete and all(bits):
            best = self._cut_back(tree, walk, key, limit)
        if best is None:
            for node in reversed(walk.nodes):
                if not self.least_tokens <= node.tokens <= limit or not node.snapshots:
                    continue
                hit = Hit(node, node.tokens, walk.matched)
                if key in node.snapshots if complete else self._leads_on(hit, key, bits, gates):
                    best = hit
                    break
        if best is not None:
            best.node.pins += 1
        return best

    @staticmethod
    def _leads_on(hit: Hit, key: int, bits: Sequence[bool], gates: bool) -> bool:
        """True when the position has some way on from these bits."""
        if bits and key not in hit.node.blocks:
            return False
        return not gates or hit.sums(bits) is not None

    def _cut_back(self, tree: RadixTree, walk: Walk, key: int, limit: int) -> Hit | None:
        """All-attention: keys and values of a longer sequence serve any prefix that it shares with the prompt."""
        places = [(walk.nodes[-1], walk.nodes[-1].tokens)] if walk.beyond is None else [(walk.beyond, walk.matched)]
        for node, shared in places + [(node, node.tokens) for node in reversed(walk.nodes)]:
            if min(shared, limit) < self.least_tokens:
                return None
            for below in tree.below(node):
                if key in below.snapshots:
                    return Hit(below, min(shared, limit, below.tokens), walk.matched)
        return None

    def matched(self, namespace: str, tokens: Sequence[int] | bytes) -> int:
        """Tokens that some stored path shares with these."""
        tree = self._trees.get(namespace)
        return tree.walk(encode(tokens)).matched if tree is not None else 0

    def leave(self, namespace: str, hit: Hit) -> None:
        """The request has all that it wanted of the position."""
        hit.node.pins -= 1
        assert hit.node.pins >= 0, "a position was left twice"
        if not hit.node.pins and (tree := self._trees.get(namespace)) is not None:
            tree.prune(hit.node)

    def used(self, hit: Hit, bits: Sequence[bool]) -> None:
        """A request ran from the position under this layout: worth keeping."""
        snapshot = hit.node.snapshots.get(path_key(bits))
        if snapshot is not None:
            snapshot.hits += 1
            self._look(snapshot)
            self.evictor.touch(snapshot, self.clock())

    # ---- storing

    def publish(
        self, namespace: str, tokens: Sequence[int] | bytes, bits: Sequence[bool], blocks: list[BlockData]
    ) -> bool:
        """Take over what a request left after `tokens`; False when it was there already or is too short to pay.

        The references to the units in `blocks` pass to the cache either way.
        """
        path = encode(tokens)
        if len(path) < self.least_tokens * WIDTH or self.most_units <= 0:
            self.discard(blocks)
            return False
        tree = self._trees.setdefault(namespace, RadixTree())
        node = tree.node_at(path)
        key = path_key(bits)
        if key in node.snapshots:
            self.discard(blocks)
            known = node.snapshots[key]
            for old, new in zip(known.blocks, blocks, strict=True):
                if old.sums is None:
                    old.sums = new.sums
                    self._aside += _bytes(new.sums)
            self.evictor.touch(known, self.clock())
            return False
        kept: list[BlockData] = []
        fresh: list[BlockData] = []
        spare: list[BlockData] = []
        for depth, data in enumerate(blocks, 1):
            there = node.blocks.setdefault(key >> (len(bits) - depth), data)
            # Another layout with the same bits so far: one copy is enough.
            (fresh if there is data else spare).append(data)
            there.users += 1
            kept.append(there)
        self._hold(fresh)
        self.discard(spare)
        above = self._nearest_above(node, key)
        snapshot = Snapshot(node, key, node.tokens, kept)
        snapshot.gain = self.cost.saved(bits, node.tokens, above.tokens if above is not None else 0)
        node.snapshots[key] = snapshot
        self._snapshots[id(snapshot)] = (snapshot, tree)
        self.counts.stored += 1
        self._look(snapshot)
        now = self.clock()
        self.evictor.touch(snapshot, now)
        if above is not None:
            # Its pages are shared from now on; only its states are its own.
            self._look(above)
            self.evictor.touch(above, now)
        self._shrink(lambda: self._held <= self.most_units and self._aside <= self.most_aside)
        return True

    def discard(self, blocks: Sequence[BlockData]) -> None:
        """Give back references that nobody will take over."""
        self.pool.release(_units(blocks))

    @staticmethod
    def _nearest_above(node: Node, key: int) -> Snapshot | None:
        up = node.parent
        while up is not None:
            if key in up.snapshots:
                return up.snapshots[key]
            up = up.parent
        return None

    def _hold(self, blocks: Sequence[BlockData]) -> None:
        """Count the references of one position's blocks, which have no unit in common."""
        units = _units(blocks)
        self._held += int(np.count_nonzero(self._references[units] == 0))
        self._references[units] += 1
        self._aside += sum(_bytes(data.tail) + _bytes(data.sums) for data in blocks)

    def _let_go(self, blocks: Sequence[BlockData]) -> None:
        units = _units(blocks)
        self._references[units] -= 1
        self._held -= int(np.count_nonzero(self._references[units] == 0))
        self._aside -= sum(_bytes(data.tail) + _bytes(data.sums) for data in blocks)
        self.pool.release(units)

    def _look(self, snapshot: Snapshot) -> None:
        """Count the units that are the snapshot's own."""
        units = _units([data for data in snapshot.blocks if data.users == 1])
        snapshot.units = int(np.count_nonzero(self._references[units] == 1))

    # ---- eviction

    def make_room(self, units: int) -> bool:
        """Evict until so many units are available in the pool; False, and nothing goes, when they cannot be had."""
        missing = units - self.pool.available_units
        if missing <= 0:
            return True
        if missing > self._held or missing > self.pool.exclusive(self._references):
            return False
        return self._shrink(lambda: self.pool.available_units >= units)

    def _shrink(self, done: Callable[[], bool]) -> bool:
        if done():
            return True
        victims = iter(self.evictor.victims((s for s, _ in self._snapshots.values()), self.clock()))
        for snapshot in victims:
            if snapshot.gone or snapshot.node.pins:
                continue
            self._drop(snapshot)
            self.counts.evicted += 1
            if done():
                break
        close: Callable[[], None] | None = getattr(victims, "close", None)
        if close is not None:
            close()
        return done()

    def _drop(self, snapshot: Snapshot) -> None:
        snapshot.gone = True
        _, tree = self._snapshots.pop(id(snapshot))
        node, depth = snapshot.node, len(snapshot.blocks)
        del node.snapshots[snapshot.key]
        left: list[BlockData] = []
        for number, data in enumerate(snapshot.blocks, 1):
            data.users -= 1
            if not data.users:
                del node.blocks[snapshot.key >> (depth - number)]
                left.append(data)
        self._let_go(left)
        tree.prune(node)

    def reset(self) -> int:
        """Drop all entries that no request reads from; returns how many went."""
        before = len(self._snapshots)
        self._shrink(lambda: not self._snapshots)
        self._trees = {name: tree for name, tree in self._trees.items() if tree.size > 1}
        return before - len(self._snapshots)

    # ---- books

    @property
    def held_units(self) -> int:
        """Units that the cache refers to, shared ones counted once."""
        return self._held

    def stats(self) -> dict[str, Any]:
        """Counters and gauges; plain numbers."""
        counts = self.counts
        return {
            "cache_entries": len(self._snapshots),
            "cache_nodes": sum(tree.size for tree in self._trees.values()),
            "cache_aside_bytes": self._aside,
            "cache_prompt_tokens": counts.prompt_tokens,
            "cache_hit_tokens": counts.hit_tokens,
            "cache_stored": counts.stored,
            "cache_evicted": counts.evicted,
            "units_cached": self._held,
            **{f"cache_{kind}": counts.kinds[kind] for kind in ("hit", "miss", "restart", "adopted")},
        }

    def check(self) -> None:
        """Raise AssertionError when the books do not balance."""
        references = np.zeros_like(self._references)
        aside, found = 0, 0
        for tree in self._trees.values():
            size = 0
            for node in tree:
                size += 1
                found += len(node.snapshots)
                users: Counter[int] = Counter()
                for key, snapshot in node.snapshots.items():
                    assert snapshot.node is node and snapshot.key == key and not snapshot.gone
                    users.update(id(data) for data in snapshot.blocks)
                assert len(node.blocks) == len(users), "a block's data belongs to no snapshot"
                for data in node.blocks.values():
                    assert data.users == users[id(data)], "a block's data has other users than it counts"
                    np.add.at(references, data.units.ravel(), 1)
                    aside += _bytes(data.tail) + _bytes(data.sums)
                holds = node.snapshots or node.pins or node.parent is None
                assert holds or len(node.children) > 1, "a node holds nothing and parts nothing"
            assert size == tree.size, f"{size} nodes, {tree.size} counted"
        assert found == len(self._snapshots), f"{found} snapshots in the trees, {len(self._snapshots)} known"
        assert np.array_equal(references, self._references), "units and their references differ"
        assert self._held == int(np.count_nonzero(references)), "held units are miscounted"
        assert aside == self._aside, f"{aside} bytes aside, {self._aside} counted"
        held = np.flatnonzero(references)
        assert all(self.pool.references(int(unit)) >= 1 for unit in held), "a cached unit is free"


def _units(blocks: Sequence[BlockData]) -> Units:
    return np.concatenate([data.units.ravel() for data in blocks]) if blocks else no_units()


def _bytes(tensor: Any) -> int:
    return 0 if tensor is None else int(tensor.nbytes)


def no_units() -> Units:
    """Of a block that keeps none."""
    return np.empty(0, dtype=np.int32)
