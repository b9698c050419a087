"""A radix tree over token ids. A node is a position that somebody stored something at, or where paths part."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from morph.cache.snapshot import BlockData, Snapshot

WIDTH = 4
"""Bytes per token id: paths are bytes, so that they compare at the speed of memory."""


def encode(tokens: Sequence[int] | bytes) -> bytes:
    """Token ids as bytes; a path that is encoded already passes through."""
    return tokens if isinstance(tokens, bytes) else array("i", tokens).tobytes()


def common_tokens(one: bytes, two: bytes) -> int:
    """Length in tokens of the longest common prefix."""
    size = min(len(one), len(two)) // WIDTH
    a, b = np.frombuffer(one, np.int32, size), np.frombuffer(two, np.int32, size)
    differing = np.flatnonzero(a != b)
    return int(differing[0]) if len(differing) else size


@dataclass(eq=False, slots=True)
class Node:
    """A position in the tree.

    Attributes:
        edge: token ids between the parent and this node, encoded.
        tokens: tokens from the root.
        blocks: data of one block by the `path_key` of its bit and those below it: layouts share what agrees.
        snapshots: complete layouts by their key.
        pins: hits in flight that read from here.
    """

    parent: Node | None
    edge: bytes
    tokens: int
    children: dict[bytes, Node] = field(default_factory=dict)
    blocks: dict[int, BlockData] = field(default_factory=dict)
    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    pins: int = 0


@dataclass
class Walk:
    """Where a path leads.

    Attributes:
        nodes: those that lie on it whole, the root first.
        beyond: the child whose edge it follows in part, or None.
        matched: tokens that some stored path shares with it.
    """

    nodes: list[Node]
    beyond: Node | None
    matched: int


class RadixTree:
    """Paths of one namespace."""

    def __init__(self) -> None:
        self.root = Node(None, b"", 0)
        self.size = 1

    def walk(self, path: bytes) -> Walk:
        """Follow a path as far as it is stored."""
        node, at, nodes = self.root, 0, [self.root]
        while at < len(path):
            child = node.children.get(path[at : at + WIDTH])
            if child is None:
                return Walk(nodes, None, at // WIDTH)
            if not path.startswith(child.edge, at):
                return Walk(nodes, child, at // WIDTH + common_tokens(child.edge, path[at : at + len(child.edge)]))
            node, at = child, at + len(child.edge)
            nodes.append(node)
        return Walk(nodes, None, at // WIDTH)

    def node_at(self, path: bytes) -> Node:
        """The node at the end of a path; made, and an edge cut in two, where there is none."""
        found = self.walk(path)
        node, at = found.nodes[-1], found.nodes[-1].tokens * WIDTH
        if at == len(path):
            return node
        if found.beyond is not None:
            node = self._cut(found.beyond, found.matched - node.tokens)
            at = node.tokens * WIDTH
        if at < len(path):
            node = self._grow(node, path[at:])
        return node

    def prune(self, node: Node) -> None:
        """Drop a node that holds nothing any more, and what it alone kept alive."""
        while node.parent is not None and not node.snapshots and not node.pins:
            parent = node.parent
            if len(node.children) > 1:
                return
            if node.children:
                (child,) = node.children.values()
                child.edge, child.parent = node.edge + child.edge, parent
                parent.children[child.edge[:WIDTH]] = child
                self.size -= 1
                return
            del parent.children[node.edge[:WIDTH]]
            self.size -= 1
            node = parent

    def below(self, node: Node, limit: int = 64) -> Iterator[Node]:
        """A node and those below it, at most `limit`."""
        stack = [node]
        while stack and limit:
            node = stack.pop()
            limit -= 1
            yield node
            stack.extend(node.children.values())

    def __iter__(self) -> Iterator[Node]:
        stack = [self.root]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _grow(self, parent: Node, edge: bytes) -> Node:
        node = Node(parent, edge, parent.tokens + len(edge) // WIDTH)
        parent.children[edge[:WIDTH]] = node
        self.size += 1
        return node

    def _cut(self, child: Node, tokens: int) -> Node:
        """A node inside the edge above `child`, `tokens` tokens below its parent."""
        parent, at = child.parent, tokens * WIDTH
        assert parent is not None
        node = Node(parent, child.edge[:at], parent.tokens + tokens)
        parent.children[node.edge[:WIDTH]] = node
        child.edge, child.parent = child.edge[at:], node
        node.children[child.edge[:WIDTH]] = child
        self.size += 1
        return node
