"""Nodes of a radix tree over token ids: what two lists of tokens share is written once, up to where they part."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from memory.blocks.arrays import EMPTY, Int64s
from memory.interface import Sequence


@dataclass
class Node:
    """Tokens from the parent's depth to this one's, and the checkpoint that stands at their end, if any."""

    tokens: Int64s
    depth: int
    parent: Node | None
    mark: Sequence | None = None
    children: dict[int, Node] = field(default_factory=dict)
    owner: Hashable = None  # of the tree, at its root


NOTHING_SEEN = Node(EMPTY, 0, None)


def split(node: Node, n: int) -> Node:
    """A node of the first n tokens of `node`, between it and its parent."""
    assert node.parent is not None, "the root has no tokens"
    upper = Node(node.tokens[:n].copy(), node.depth - len(node.tokens) + n, node.parent)
    node.parent.children[int(upper.tokens[0])] = upper
    node.tokens, node.parent = node.tokens[n:].copy(), upper  # a view would keep what the other part was
    upper.children[int(node.tokens[0])] = node
    return upper


def marked_above(node: Node) -> int:
    """Where the nearest checkpoint above a node stands; 0 if there is none."""
    above = node.parent
    while above is not None and above.mark is None:
        above = above.parent
    return 0 if above is None else above.depth


def first_marked(node: Node | None) -> Iterator[Node]:
    """The checkpoints nearest below, one on each way down from the shortest child on."""
    while node is not None:
        if node.mark is not None:
            yield node
            return
        node = min(node.children.values(), key=lambda child: child.depth, default=None)
