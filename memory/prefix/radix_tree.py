"""Holds the nodes of a radix tree over token ids: tokens that several prompts begin with are in it once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from memory.blocks.arrays import EMPTY, Int64s
from memory.interface import Sequence


@dataclass
class Node:
    """Holds the tokens from the parent's depth to its own, and the checkpoint at their end, if there is one.

    Attributes:
        mark: the checkpoint.
        owner: of the tree; set at its root only.
    """

    tokens: Int64s
    depth: int
    parent: Node | None
    mark: Sequence | None = None
    children: dict[int, Node] = field(default_factory=dict)
    owner: Hashable = None


NOTHING_SEEN = Node(EMPTY, 0, None)


def split(node: Node, n: int) -> Node:
    """Put a node with the first n tokens of `node` between it and its parent, and return the new one."""
    assert node.parent is not None, "the root has no tokens"
    upper = Node(node.tokens[:n].copy(), node.depth - len(node.tokens) + n, node.parent)
    node.parent.children[int(upper.tokens[0])] = upper
    node.tokens, node.parent = node.tokens[n:].copy(), upper  # a view would keep all tokens in host memory
    upper.children[int(node.tokens[0])] = node
    return upper


def marked_above(node: Node) -> int:
    """Return the position of the nearest checkpoint above a node; 0 if there is none."""
    above = node.parent
    while above is not None and above.mark is None:
        above = above.parent
    return 0 if above is None else above.depth


def first_marked(node: Node | None) -> Iterator[Node]:
    """Generate the first node with a checkpoint from `node` downwards, always through the child of the least depth."""
    while node is not None:
        if node.mark is not None:
            yield node
            return
        node = min(node.children.values(), key=lambda child: child.depth, default=None)
