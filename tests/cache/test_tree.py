"""The radix tree against a list of paths."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from morph.cache.snapshot import Snapshot
from morph.cache.tree import RadixTree, common_tokens, encode

PATHS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=20)


def shared(one: list[int], two: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@settings(max_examples=200, deadline=None)
@given(PATHS, st.lists(st.integers(0, 2), max_size=12))
def test_a_walk_finds_the_longest_shared_prefix(paths: list[list[int]], wanted: list[int]) -> None:
    tree = RadixTree()
    for path in paths:
        node = tree.node_at(encode(path))
        assert node.tokens == len(path) and node is tree.node_at(encode(path))
    walk = tree.walk(encode(wanted))
    assert walk.matched == max(shared(path, wanted) for path in [*paths, []])
    assert all(node.tokens <= walk.matched for node in walk.nodes)
    assert [n.tokens for n in walk.nodes] == sorted({n.tokens for n in walk.nodes})
    for path in paths:
        if path == wanted[: len(path)]:
            assert len(path) in {node.tokens for node in walk.nodes}


@settings(max_examples=200, deadline=None)
@given(PATHS, st.randoms(use_true_random=False))
def test_what_is_pruned_leaves_no_trace(paths: list[list[int]], rng: random.Random) -> None:
    tree = RadixTree()
    kept: dict[int, list[int]] = {}
    for path in paths:
        node = tree.node_at(encode(path))
        if node.parent is not None:
            node.snapshots[1] = Snapshot(node, 1, node.tokens, [])
            kept[id(node)] = path
    order = [node for node in tree if node.snapshots]
    rng.shuffle(order)
    for node in order:
        node.snapshots.clear()
        tree.prune(node)
        del kept[id(node)]
        sizes = 0
        for other in tree:
            sizes += 1
            assert other.parent is None or other.snapshots or len(other.children) > 1
        assert sizes == tree.size
        for path in kept.values():
            assert tree.walk(encode(path)).matched == len(path)
    assert tree.size == 1


def test_common_tokens() -> None:
    assert common_tokens(encode([1, 2, 3]), encode([1, 2, 4, 5])) == 2
    assert common_tokens(encode([7]), encode([8])) == 0
    assert common_tokens(encode([]), encode([8])) == 0
    assert common_tokens(encode([1, 2]), encode([1, 2, 3])) == 2
