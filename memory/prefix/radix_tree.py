"""Defines a radix tree over token ids. Leading tokens that several prompts have in common are stored once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TypeGuard

import numpy as np

from hybridmem.memory.blocks.arrays import EMPTY, Int64s
from hybridmem.memory.interface import Sequence
from hybridmem.memory.sequences.token_buffer import common_prefix

_MOST_RELATIVES = 64
"""The most relatives of a checkpoint that are looked at.

The time for each grows with its number of pages. Checkpoints beyond this limit keep copies of their own.
"""
_MOST_LOOKS = 256
"""The most nodes that are searched for relatives, because thousands of prompts may have a prefix in common."""


@dataclass(eq=False)
class Node:
    """Holds the tokens from its parent's depth to its own depth, and the checkpoint at their end, if there is one.

    Attributes:
        mark: the checkpoint, or None.
        owner: the owner of the tree. Only the root has this attribute set.
    """

    tokens: Int64s
    depth: int
    parent: Node | None
    mark: Sequence | None = None
    children: dict[int, Node] = field(default_factory=dict)
    owner: Hashable = None


NOTHING_SEEN = Node(EMPTY, 0, None)


def split(node: Node, n: int) -> Node:
    """Put a new node, with the first n tokens of `node`, between `node` and its parent. Return the new node."""
    assert node.parent is not None, "the root has no tokens"
    upper = Node(node.tokens[:n].copy(), node.depth - len(node.tokens) + n, node.parent)
    node.parent.children[int(upper.tokens[0])] = upper
    # A view would keep all tokens of the old array in host memory.
    node.tokens, node.parent = node.tokens[n:].copy(), upper
    upper.children[int(node.tokens[0])] = node
    return upper


def marked_above(node: Node) -> int:
    """Return the position of the nearest checkpoint above a node; 0 if there is none."""
    above = node.parent
    while above is not None and above.mark is None:
        above = above.parent
    return 0 if above is None else above.depth


def relatives(node: Node) -> list[Sequence]:
    """Return checkpoints in the budget that share blocks with a node's checkpoint: its ancestor and its cousins.

    The ancestor is the nearest checkpoint above the node. The cousins have the same ancestor, and their tokens differ
    from the node's after it.
    """
    found, n_looks = list[Sequence](), _MOST_LOOKS
    came_from, at = node, node
    while at.parent is not None:  # At the root, prompts have no tokens in common, so nothing is shared.
        waiting = [child for child in at.children.values() if child is not came_from]
        while waiting and n_looks and len(found) < _MOST_RELATIVES:
            child, n_looks = waiting.pop(), n_looks - 1
            if _is_inside(child.mark):
                found.append(child.mark)
            else:
                waiting.extend(child.children.values())
        came_from, at = at, at.parent
        if _is_inside(at.mark):
            return [at.mark, *found]
    return found


def _is_inside(mark: Sequence | None) -> TypeGuard[Sequence]:
    return mark is not None and not mark.is_swapped


def first_marked(node: Node | None) -> Iterator[Node]:
    """Generate the first node with a checkpoint from `node` downwards, always through the child of the least depth."""
    while node is not None:
        if node.mark is not None:
            yield node
            return
        node = min(node.children.values(), key=lambda child: child.depth, default=None)


class RadixTree:
    """Holds one tree for each owner.

    Attributes:
        roots: owner -> the root of the owner's tree. A root has no tokens.
        n_tokens: the number of tokens of all nodes.
    """

    def __init__(self) -> None:
        self.roots: dict[Hashable, Node] = {}
        self.n_tokens = 0

    def nodes(self) -> Iterator[Node]:
        """Generate all nodes, parents before children."""
        waiting = [*self.roots.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def walk(self, tokens: Int64s, owner: Hashable) -> tuple[int, list[Node], Node | None]:
        """Return the number of matching tokens, the nodes that end within them, and the node to search below.

        If the matching tokens end inside of a node, that node is the one to search below. If they end between nodes, it
        is the last node of the path. It is None if there are no nodes below.
        """
        node, at = self.roots.get(owner, NOTHING_SEEN), 0
        path: list[Node] = []
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            n_common = common_prefix(child.tokens, tokens[at:])
            at += n_common
            if n_common < len(child.tokens):
                return at, path, child
            path.append(child)
            node = child
        return at, path, node if node.children else None

    def node_at(self, tokens: Int64s, owner: Hashable) -> Node:
        """Return the node that ends with these tokens. Make it if there is none."""
        node, at = self.roots.setdefault(owner, Node(EMPTY, 0, None, owner=owner)), 0
        while at < len(tokens):
            rest = tokens[at:]
            child = node.children.get(int(rest[0]))
            if child is None:
                node.children[int(rest[0])] = leaf = Node(rest.copy(), len(tokens), node)
                self.n_tokens += len(rest)
                return leaf
            n_common = common_prefix(child.tokens, rest)
            if n_common < len(child.tokens):
                child = split(child, n_common)
            node, at = child, child.depth
        return node

    def prune(self, node: Node | None) -> None:
        """Remove a node without a checkpoint, and the nodes above it that lead to no other checkpoint."""
        while node is not None and node.parent is not None and node.mark is None and len(node.children) < 2:
            parent, first = node.parent, int(node.tokens[0])
            if node.children:  # The node has one child, which takes over its tokens.
                (child,) = node.children.values()
                child.tokens, child.parent = np.concatenate([node.tokens, child.tokens]), parent
                parent.children[first] = child
                return
            del parent.children[first]
            self.n_tokens -= len(node.tokens)
            node = parent
        if node is not None and node.parent is None and not node.children:
            del self.roots[node.owner]


def marks_below(tree: RadixTree, tokens: Int64s, owner: Hashable) -> list[Sequence]:
    """Return the checkpoints after these tokens, those made last at the end. Cost: a look at all of them."""
    n_matched, path, beyond = tree.walk(tokens, owner)
    if n_matched < len(tokens):
        return []
    waiting = [beyond] if beyond is not None and beyond not in path else []
    waiting += path[-1].children.values() if path and beyond is path[-1] else []
    found = list[Sequence]()
    while waiting:
        node = waiting.pop()
        waiting.extend(node.children.values())
        if node.mark is not None:
            found.append(node.mark)
    return sorted(found, key=lambda mark: mark.id)


def is_shared(node: Node) -> bool:
    """True if several prompts continue from a node's own checkpoint: they differ before the next one."""
    waiting = [node]
    while waiting:
        at = waiting.pop()
        if len(at.children) > 1:
            return True
        waiting.extend(child for child in at.children.values() if child.mark is None)
    return False
