"""The cache's books under random use, and its choices."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from morph.cache.context_cache import ContextCache, Hit
from morph.cache.cost import PrefillCost
from morph.cache.eviction import POLICIES, GreedyDual, LeastRecent, make_evictor
from morph.cache.placement import cuts, first_message
from morph.cache.snapshot import BlockData, path_key
from morph.memory.pool import UnitPool
from tests.tiny import tiny_config

BLOCKS = 3


class Sums:
    """Stands for a tensor of 8 bytes."""

    nbytes = 8


def new_cache(units: int = 60, most: int | None = None, **options: Any) -> ContextCache:
    ticks = itertools.count()
    values: dict[str, Any] = {"least_tokens": 1, "clock": lambda: float(next(ticks))}
    cost = PrefillCost(tiny_config(num_blocks=BLOCKS))
    return ContextCache(UnitPool(units, 1), cost, units if most is None else most, **(values | options))


def data(cache: ContextCache, bits: tuple[bool, ...], tokens: int, sums: bool = True) -> list[BlockData] | None:
    """What a request would leave: a page of one head per 2 tokens, or 2 units of states."""
    blocks = []
    for bit in bits:
        count = -(-tokens // 2) if bit else 2
        if cache.pool.available_units < count:
            cache.discard(blocks)
            return None
        units = cache.pool.alloc(count)
        blocks.append(BlockData(bit, units[None] if bit else units, None, Sums() if sums else None))
    return blocks


def store(cache: ContextCache, tokens: list[int], bits: str, namespace: str = "", sums: bool = True) -> bool:
    layout = tuple(bit == "1" for bit in bits)
    blocks = data(cache, layout, len(tokens), sums)
    assert blocks is not None
    return cache.publish(namespace, tokens, layout, blocks)


def find(
    cache: ContextCache, tokens: list[int], bits: str, limit: int | None = None, gates: bool = False
) -> Hit | None:
    layout = tuple(bit == "1" for bit in bits)
    hit = cache.find("", tokens, len(tokens) - 1 if limit is None else limit, layout, BLOCKS, gates)
    if hit is not None:
        cache.leave("", hit)
    return hit


class Books(RuleBasedStateMachine):
    """Random storing, finding, holding, evicting: nothing leaks, is freed twice or handed out while it is read."""

    @initialize(
        policy=st.sampled_from(POLICIES), most=st.sampled_from([10, 40, 60]), aside=st.sampled_from([100, 10_000])
    )
    def start(self, policy: Any, most: int, aside: int) -> None:
        self.cache = new_cache(60, most, evictor=make_evictor(policy), most_aside=aside)
        self.hits: list[tuple[str, Hit, list[np.ndarray]]] = []
        self.running: list[list[BlockData]] = []

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        bits=st.tuples(*[st.booleans()] * BLOCKS),
        namespace=st.sampled_from(["", "a"]),
        sums=st.booleans(),
    )
    def publish(self, tokens: list[int], bits: tuple[bool, ...], namespace: str, sums: bool) -> None:
        blocks = data(self.cache, bits, len(tokens), sums)
        if blocks is not None:
            self.cache.publish(namespace, tokens, bits, blocks)
            assert self.cache.held_units <= self.cache.most_units or self.hits

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=2, max_size=9),
        bits=st.lists(st.booleans(), max_size=BLOCKS),
        namespace=st.sampled_from(["", "a"]),
    )
    def find(self, tokens: list[int], bits: list[bool], namespace: str) -> None:
        hit = self.cache.find(namespace, tokens, len(tokens) - 1, bits, BLOCKS, gates=len(bits) < BLOCKS)
        if hit is None:
            return
        assert 1 <= hit.tokens <= len(tokens) - 1 and hit.tokens <= hit.node.tokens
        if len(bits) == BLOCKS:
            assert path_key(bits) in hit.node.snapshots
            assert hit.tokens == hit.node.tokens or all(bits)
            self.cache.used(hit, bits)
        units = [block.units.ravel().copy() for block in hit.node.blocks.values()]
        self.hits.append((namespace, hit, units))

    @rule()
    def leave(self) -> None:
        if self.hits:
            namespace, hit, _ = self.hits.pop()
            self.cache.leave(namespace, hit)

    @rule(units=st.integers(1, 60))
    def make_room(self, units: int) -> None:
        before = self.cache.pool.available_units, self.cache.counts.evicted
        if self.cache.make_room(units):
            assert self.cache.pool.available_units >= units
        if before[0] >= units:
            assert self.cache.counts.evicted == before[1], "evicted without need"

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        if not self.hits:
            assert self.cache.held_units == 0

    @invariant()
    def balanced(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        self.cache.pool.check()
        for _, _, units in self.hits:
            for unit in np.concatenate([*units, np.empty(0, np.int32)]):
                assert self.cache.pool.references(int(unit)) >= 1, "a unit that is being read was freed"
        assert self.cache.pool.free_units + self.cache.held_units == self.cache.pool.num_units


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_deepest_usable_position_is_found() -> None:
    cache = new_cache(200)
    store(cache, [1, 2], "100")
    store(cache, [1, 2, 3, 4], "100")
    store(cache, [1, 2, 3, 4, 5, 6], "010")
    hit = find(cache, [1, 2, 3, 4, 5, 6, 7], "100")
    assert hit is not None and (hit.tokens, hit.matched) == (4, 6)
    assert find(cache, [1, 2, 3, 9], "100").tokens == 2  # type: ignore[union-attr]
    assert find(cache, [1, 2, 3, 4], "100").tokens == 2, "the last token must run"  # type: ignore[union-attr]
    assert find(cache, [1, 2, 3, 4, 5], "001") is None
    assert find(cache, [1, 2, 3, 4, 5], "100", limit=3).tokens == 2  # type: ignore[union-attr]
    undecided = find(cache, [1, 2, 3, 4, 5, 6, 7], "", gates=True)
    assert undecided is not None and undecided.tokens == 6
    assert find(cache, [1, 2, 3, 4, 5, 6, 7], "1", gates=True).tokens == 4  # type: ignore[union-attr]


def test_keys_and_values_without_states_serve_any_shorter_prefix() -> None:
    cache = new_cache(200)
    store(cache, [1, 2, 3, 4, 5, 6], "111")
    assert find(cache, [1, 2, 3, 4, 9, 9], "111").tokens == 4  # type: ignore[union-attr]
    assert find(cache, [1, 2, 3, 4, 5, 6], "111").tokens == 5  # type: ignore[union-attr]
    assert find(cache, [1, 2, 3, 4, 9, 9], "110") is None
    store(cache, [1, 2, 3, 8, 8, 8], "011")
    assert find(cache, [1, 2, 3, 8, 8, 9], "111").tokens == 3  # type: ignore[union-attr]


def test_layouts_share_what_agrees() -> None:
    cache = new_cache(200)
    store(cache, [1, 2, 3, 4], "110")
    held = cache.held_units
    store(cache, [1, 2, 3, 4], "101")
    # Block 0 is the same in both; blocks 1 and 2 are not.
    assert cache.held_units == held + 2 + 2
    assert not store(cache, [1, 2, 3, 4], "101"), "known already"
    cache.check()


def test_namespaces_share_nothing() -> None:
    cache = new_cache(200)
    store(cache, [1, 2, 3, 4], "100", "tenant")
    assert find(cache, [1, 2, 3, 4, 5], "100") is None


def test_gates_need_sums() -> None:
    cache = new_cache(200)
    store(cache, [1, 2, 3], "100", sums=False)
    assert find(cache, [1, 2, 3, 4], "", gates=True) is None
    assert find(cache, [1, 2, 3, 4], "100") is not None
    assert not store(cache, [1, 2, 3], "100"), "the entry was there; its sums are new"
    assert find(cache, [1, 2, 3, 4], "", gates=True) is not None
    cache.check()


def test_a_position_that_is_read_is_not_evicted() -> None:
    cache = new_cache(200)
    store(cache, [1, 2, 3], "000")
    hit = cache.find("", [1, 2, 3, 4], 3, (False,) * BLOCKS, BLOCKS, False)
    assert hit is not None and cache.reset() == 0
    cache.leave("", hit)
    assert cache.reset() == 1 and cache.held_units == 0


def test_lru_drops_the_oldest_and_value_the_cheapest() -> None:
    lru, value = new_cache(200, evictor=LeastRecent()), new_cache(200, evictor=GreedyDual())
    for cache in (lru, value):
        store(cache, [1] * 40, "000")
        store(cache, [2, 2], "000")
        cache.make_room(cache.pool.available_units + 1)
    assert find(lru, [1] * 41, "000") is None and find(lru, [2, 2, 2], "000") is not None
    assert find(value, [1] * 41, "000") is not None and find(value, [2, 2, 2], "000") is None


def test_nothing_is_evicted_for_a_request_that_would_not_fit_anyway() -> None:
    cache = new_cache(20)
    store(cache, [1, 2], "000")
    running = cache.pool.alloc(10)
    assert not cache.make_room(15) and cache.counts.evicted == 0
    assert cache.make_room(10) and cache.counts.evicted == 1
    cache.pool.release(running)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_limit_holds(policy: Any) -> None:
    cache = new_cache(400, 30, evictor=make_evictor(policy))
    for i in range(40):
        store(cache, [i, i, i, i], "010")
        assert cache.held_units <= 30
    cache.check()


def test_places_of_checkpoints() -> None:
    tokens = [5] * 1000
    for end in (100, 300, 600, 900):
        tokens[end] = 0
    assert cuts(tokens, 0, 999, {0}, 0) == [101, 601, 901, 999]
    assert cuts(tokens, 0, 999, {0}, 450) == [101, 450, 901, 999]
    assert cuts(tokens, 0, 999, {0}, 0, most=1) == [999]
    assert cuts(tokens, 590, 999, {0}, 0) == [901, 999], "601 is next to where it starts"
    assert cuts(tokens, 999, 999, {0}, 0) == []
    assert cuts(tokens, 0, 999, {0}, 990) == [101, 901, 990, 999], "a short question about a long text"
    assert cuts(tokens, 980, 999, {0}, 990) == [999], "too little to save"
    assert first_message(tokens, {0}) == 101 and first_message([1] * 9, {0}) == 9
    assert first_message([1, 0, *[2] * 70, 0, 3], {0}) == 73
