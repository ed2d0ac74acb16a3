"""Keeps the checkpoints of a prefix cache in a radix tree, and chooses which of them give way when there is no room."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from heapq import heappop, heappush
from itertools import count

import numpy as np

from memory.blocks.arrays import Int64s
from memory.hybrid import HybridMemory
from memory.interface import Sequence
from memory.prefix.outside import Outside
from memory.prefix.radix_tree import Node, RadixTree, marked_above, relatives
from memory.prefix.saved import as_owner
from memory.prefix.victims import Ranking
from memory.sequences.interrupts import uninterrupted
from memory.storage.folder_writing import Entry

_RECLAIMED_SHARE = 64
"""Checkpoints are closed until 1/64 of the budget is freed, even if less is missing. To find those of least worth costs
a look at all of them, and a full memory lacks a little room at almost every step."""
_BOOKS_SHARE = 4
"""Tokens of cached prefixes take at most a quarter of the bytes that their checkpoints may take."""
_TOKEN_BYTES = 16
"""Host memory for a token of a cached prefix: in the tree, and in the checkpoint."""


class Kept:
    """Holds checkpoints at the nodes of a tree, each in the budget or outside of it.

    Args:
        max_bytes: bytes that they may take outside.
        now: returns the time in seconds.
    Attributes:
        n_evicted: checkpoints that were closed for lack of room.
        n_expired: checkpoints that were closed at the end of their time to live.
    """

    def __init__(self, memory: HybridMemory, max_bytes: int, now: Callable[[], float]) -> None:
        self.memory = memory
        self.tree = RadixTree()
        self.nodes: dict[Sequence, Node] = {}
        self.outside = Outside(memory, max_bytes)
        self.n_evicted = self.n_expired = 0
        self._ranking = Ranking()
        self._clock = 0
        self._now = now
        self._lot_bytes = memory.budget_bytes // _RECLAIMED_SHARE
        self._most_tokens = (memory.budget_bytes + max_bytes) // _BOOKS_SHARE // _TOKEN_BYTES
        self._lives: dict[Sequence, tuple[float, float]] = {}  # those with a time to live -> it, and their last use
        self._ends: list[tuple[float, int, Sequence]] = []  # a heap; a checkpoint that was used since lives on
        self._numbers = count()

    @property
    def book_bytes(self) -> int:
        """Return the bytes of host memory that the tokens of cached prefixes take."""
        return self.tree.n_tokens * _TOKEN_BYTES

    # Adding and using

    def keep(self, sequence: Sequence, tokens: Int64s, owner: Hashable, held_bytes: int) -> tuple[Node, Sequence, bool]:
        """Return the node of a sequence's tokens, its checkpoint, and whether that was made now.

        Raises as `HybridMemory.checkpoint`, with nothing changed.
        """
        node = self.tree.node_at(tokens, owner)
        if node.mark is not None and not node.mark.is_swapped:
            return node, node.mark, False
        try:
            checkpoint = self.memory.checkpoint(sequence)
        except BaseException:
            self.tree.prune(node)
            raise
        priority = None
        if node.mark is not None:  # the same was computed again, and is in the budget
            priority = self.priority(node.mark)
            self.close(node.mark)
        node.mark = checkpoint
        self.nodes[checkpoint] = node
        self._ranking.add(checkpoint, node.depth - marked_above(node), held_bytes)
        self._count_saved_below(node, node.depth)
        if priority is not None:
            self.prefer(checkpoint, priority)
        return node, checkpoint, True

    def add_outside(self, tokens: Int64s, owner: Hashable, checkpoint: Sequence) -> bool:
        """Add a checkpoint that is outside of the budget; False if these tokens have one already."""
        node = self.tree.node_at(tokens, owner)
        if node.mark is not None:
            return False
        node.mark = checkpoint
        self.nodes[checkpoint] = node
        self.outside.add(checkpoint, node.depth - marked_above(node), self._clock)
        self._count_saved_below(node, node.depth)
        return True

    def add_loaded(self, entries: list[Entry], seconds_to_live: float | None) -> None:
        """Add checkpoints that are outside of the budget; even if it fails, those not added are closed.

        Raises FormatError: one has no owner that can be; then none is added.
        """
        left = entries[::-1]
        try:
            owners = [as_owner(entry.label) for entry in left]
            while left:
                owner, checkpoint = owners.pop(), left[-1].checkpoint
                is_new = self.add_outside(checkpoint.tokens, owner, checkpoint)
                left.pop()
                if not is_new:
                    self.memory.close(checkpoint)
                elif seconds_to_live is not None:
                    self.let_live(checkpoint, seconds_to_live)
        finally:
            for entry in left:
                self.memory.close(entry.checkpoint)

    def touch(self, node: Node) -> None:
        """Note that the checkpoint of a node is used now."""
        self._clock += 1
        if (checkpoint := node.mark) is not None:
            self._ranking_of(checkpoint).use(checkpoint, self._clock)
            if checkpoint in self._lives:
                self._lives[checkpoint] = self._lives[checkpoint][0], self._now()

    def prefer(self, checkpoint: Sequence, priority: float) -> None:
        """Multiply the worth of a checkpoint; with `math.inf` it never gives way."""
        self._ranking_of(checkpoint).prefer(checkpoint, priority)

    def priority(self, checkpoint: Sequence) -> float:
        """Return what `prefer` has set, or 1."""
        return self._ranking_of(checkpoint).priority(checkpoint)

    def let_live(self, checkpoint: Sequence, seconds: float) -> None:
        """Let a checkpoint live so long after its last use; `math.inf`: for ever."""
        if math.isinf(seconds):
            self._lives.pop(checkpoint, None)
            return
        self._lives[checkpoint] = seconds, self._now()
        heappush(self._ends, (self._now() + seconds, next(self._numbers), checkpoint))

    def bring_back(self, node: Node) -> None:
        """Move the checkpoint of a node back into the budget. Raises as `Outside.bring_back`, with nothing changed."""
        checkpoint = node.mark
        assert checkpoint is not None, "the caller has looked"
        priority = self.priority(checkpoint)
        self.outside.bring_back(checkpoint)
        held_bytes = self.memory.counters.held_bytes(checkpoint)
        self._ranking.add(checkpoint, node.depth - marked_above(node), held_bytes)
        self.prefer(checkpoint, priority)
        self.touch(node)

    def _count_saved_below(self, node: Node, start: int) -> None:
        """Note that the nearest checkpoints below a node save the tokens from `start` on."""
        below = list(node.children.values())
        while below:
            child = below.pop()
            if child.mark is not None:
                self._ranking_of(child.mark).saves(child.mark, child.depth - start)
            else:
                below.extend(child.children.values())

    def _ranking_of(self, checkpoint: Sequence) -> Ranking:
        return self.outside.ranking if checkpoint in self.outside.ranking else self._ranking

    # Giving way

    def reclaim(self, missing_bytes: int) -> bool:
        """See `PrefixCache.reclaim`."""
        free_bytes = self.memory.free_bytes
        lot_bytes = max(missing_bytes, self._lot_bytes)
        chosen, n_promised = list[Sequence](), 0
        for checkpoint, n_bytes in self._ranking.ascending(self._clock, self.memory.counters.private_bytes):
            if n_promised >= (lot_bytes if n_bytes else missing_bytes):
                break
            chosen.append(checkpoint)
            n_promised += n_bytes
        n_gone = 0
        for checkpoint in chosen:
            # Two that share blocks only with each other free more than was promised for each.
            if self.memory.free_bytes - free_bytes >= lot_bytes:
                break
            self._give_way(checkpoint)
            n_gone += 1
        return n_gone > 0

    def _give_way(self, checkpoint: Sequence) -> None:
        """Move a checkpoint out of the budget; close it if that does not pay, or if there is no room outside."""
        node = self.nodes[checkpoint]
        saved, priority = node.depth - marked_above(node), self._ranking.priority(checkpoint)
        if self.outside.take(checkpoint, relatives(node), saved, self._clock, self._drop):
            self._ranking.remove(checkpoint)
            self.prefer(checkpoint, priority)
        else:
            self._drop(checkpoint)

    def _drop(self, checkpoint: Sequence) -> None:
        """Close a checkpoint for lack of room."""
        self.n_evicted += 1
        self.evict(checkpoint)

    def bound_books(self) -> None:
        """Close checkpoints of least worth until the tokens of all take no more host memory than they may."""
        for ranking in (self._ranking, self.outside.ranking):
            if self.tree.n_tokens <= self._most_tokens:
                return
            for checkpoint in [checkpoint for checkpoint, _ in ranking.ascending(self._clock, self._own_tokens)]:
                if self.tree.n_tokens > self._most_tokens:
                    self._drop(checkpoint)

    def _own_tokens(self, checkpoints: list[Sequence]) -> Int64s:
        return np.array([len(self.nodes[checkpoint].tokens) for checkpoint in checkpoints], np.int64)

    def expire(self) -> None:
        """Close checkpoints whose time to live has ended."""
        now = self._now() if self._ends else 0.0
        while self._ends and self._ends[0][0] <= now:
            _, _, checkpoint = heappop(self._ends)
            if checkpoint not in self._lives:
                continue
            seconds, used_at = self._lives[checkpoint]
            if used_at + seconds > now:
                heappush(self._ends, (used_at + seconds, next(self._numbers), checkpoint))
            else:
                self.n_expired += 1
                self.evict(checkpoint)

    def close(self, checkpoint: Sequence) -> Node:
        """Close a checkpoint, and return the node that it was the mark of."""
        node = self.nodes.pop(checkpoint)
        node.mark = None
        self._lives.pop(checkpoint, None)
        self._ranking_of(checkpoint).remove(checkpoint)
        self.memory.close(checkpoint)
        return node

    def evict(self, checkpoint: Sequence) -> None:
        """Close a checkpoint, and remove the nodes that only led to it."""
        node = self.close(checkpoint)
        self._count_saved_below(node, marked_above(node))
        self.tree.prune(node)

    def forget(self, tokens: Int64s, owner: Hashable, behind: int) -> int:
        """See `PrefixCache.forget`."""
        n_closed = 0
        with uninterrupted():
            for node in reversed(self.tree.walk(tokens, owner)[1]):
                if node.children or node.depth <= behind:
                    break
                if node.mark is not None:
                    self.evict(node.mark)
                    n_closed += 1
        return n_closed
