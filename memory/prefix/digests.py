"""Identifies prefixes by a digest of their tokens, so that other processes can know what a prefix cache holds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.interface import Sequence
from hybridmem.memory.prefix.lookup import Tier
from hybridmem.memory.prefix.radix_tree import Node, is_shared
from hybridmem.memory.prefix.saved import as_label

DIGEST_BYTES = 16


@dataclass(frozen=True)
class Resumable:
    """Says that a cache can continue from a prefix.

    Attributes:
        n_tokens: the length of the prefix.
        digest: the digest of its owner and tokens, as `digests_at` computes it.
        checkpoint, owner: the checkpoint at the end of the prefix, and the checkpoint's owner.
        tier: where the checkpoint is.
        is_shared: True if several prompts have this prefix in common and differ after it.
    """

    n_tokens: int
    digest: bytes
    checkpoint: Sequence
    owner: Hashable
    tier: Tier
    is_shared: bool = False


def digests_at(tokens: Int64s, positions: Iterable[int], owner: Hashable = None) -> Iterator[tuple[int, bytes]]:
    """Generate (position, digest of the tokens before it), ascending, for each position that is within the tokens.

    Cost: one pass of SHA-256 over 8 bytes per token, whatever the number of positions.
    """
    hasher, at = _begin(owner), 0
    for position in sorted({position for position in positions if 0 < position <= len(tokens)}):
        hasher.update(_bytes(tokens[at:position]))
        at = position
        yield position, hasher.copy().digest()[:DIGEST_BYTES]


@dataclass(frozen=True)
class _Way:
    """Holds a node on the way down a tree, and a digest of all tokens before it, to compute further digests."""

    node: Node
    before: hashlib._Hash
    above: _Way | None

    def digest_at(self, position: int) -> bytes:
        """Return the digest of the first `position` tokens on the path from the root."""
        way = self
        while (start := way.node.depth - len(way.node.tokens)) >= position:
            assert way.above is not None, "there are tokens before this node"
            way = way.above
        hasher = way.before.copy()
        hasher.update(_bytes(way.node.tokens[: position - start]))
        return hasher.digest()[:DIGEST_BYTES]


def resumable_prefixes(roots: dict[Hashable, Node], tier_of: Callable[[Sequence], Tier]) -> Iterator[Resumable]:
    """Generate the prefixes from which a cache can continue: each checkpoint's own, and the shortest it rolls back to.

    Cost: one pass over all tokens, and for each checkpoint another pass over the node in which its horizon lies.
    """
    for owner, root in roots.items():
        ways = [_Way(child, _begin(owner), None) for child in root.children.values()]
        while ways:
            way = ways.pop()
            node, mark = way.node, way.node.mark
            if mark is not None:
                about = mark, owner, tier_of(mark)
                if 0 < mark.horizon < node.depth:
                    yield Resumable(mark.horizon, way.digest_at(mark.horizon), *about)
                yield Resumable(node.depth, way.digest_at(node.depth), *about, is_shared(node))
            if node.children:
                hasher = way.before.copy()
                hasher.update(_bytes(node.tokens))
                ways.extend(_Way(child, hasher, way) for child in node.children.values())


def _begin(owner: Hashable) -> hashlib._Hash:
    return hashlib.sha256(f"hybrid-memory prefix 1 {as_label(owner)}\n".encode())


def _bytes(tokens: Int64s) -> bytes:
    return np.ascontiguousarray(tokens, "<i8").tobytes()
