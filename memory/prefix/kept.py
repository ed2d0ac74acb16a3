"""Keeps the checkpoints of a prefix cache in a radix tree, and chooses which give way when there is no room."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from pathlib import Path

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.errors import HybridMemoryError
from hybridmem.memory.hybrid import HybridMemory, coordinator_of
from hybridmem.memory.interface import Sequence
from hybridmem.memory.prefix.changing import Changes, Changing
from hybridmem.memory.prefix.eviction_rank import Ranking
from hybridmem.memory.prefix.outside import Outside
from hybridmem.memory.prefix.radix_tree import Node, RadixTree, marked_above, relatives
from hybridmem.memory.prefix.saved import as_owner

_RECLAIMED_SHARE = 64
"""Checkpoints give way until 1/64 of the budget is free, even if less is missing.

Finding those of least worth means looking at all, and without this reserve a full memory would do so at almost every
step.
"""
_BOOKS_SHARE = 4
"""Tokens of cached prefixes take at most a quarter of the bytes that their checkpoints may take."""
_TOKEN_BYTES = 16
"""Bytes of host memory for each token of a cached prefix: 8 in the tree, and 8 in the checkpoint."""


@dataclass(slots=True, eq=False)
class Record:
    """Says what was decided about a checkpoint.

    Attributes:
        owner: the owner of its tokens.
        priority: a factor on its worth. A checkpoint of infinite worth never gives way.
        seconds: the checkpoint is closed if it was not used for this time.
        used_at, clock: the time of its last use, in seconds, and by the rankings' clock.
    """

    owner: Hashable
    priority: float = 1
    seconds: float = math.inf
    used_at: float = 0
    clock: int = 0


class Kept:
    """Holds checkpoints at the nodes of a tree, each in the budget or outside of it.

    Its records say which checkpoints there are. The tree, the rankings and the heap of expiry times follow from them.

    Args:
        max_bytes: the most bytes that checkpoints may take outside of the budget.
        now: returns the time in seconds.
    Attributes:
        records: the record of each checkpoint.
        n_evicted: how many checkpoints were closed for lack of room.
        n_expired: how many checkpoints were closed because their time to live had ended.
    """

    def __init__(self, memory: HybridMemory, max_bytes: int, now: Callable[[], float]) -> None:
        self.memory = memory
        self.tree = RadixTree()
        self.records: dict[Sequence, Record] = {}
        self._changes = Changes()
        self.nodes: dict[Sequence, Node] = {}
        self.outside = Outside(memory, max_bytes)
        self.n_evicted = self.n_expired = 0
        self._ranking = Ranking()
        self._clock = 0
        self._now = now
        self._lot_bytes = memory.budget_bytes // _RECLAIMED_SHARE
        self._most_tokens = (memory.budget_bytes + max_bytes) // _BOOKS_SHARE // _TOKEN_BYTES
        # This is a heap of times. A checkpoint that was used after its entry was made lives on.
        self._ends: list[tuple[float, int, Sequence]] = []
        self._numbers = count()
        self._made: list[Sequence] = []  # These checkpoints were made, but may have no record yet.

    @property
    def book_bytes(self) -> int:
        """Return the bytes of host memory that the tokens of cached prefixes take."""
        return self.tree.n_tokens * _TOKEN_BYTES

    def changing(self) -> Changing:
        """Return a context manager, in whose block the records and all that follows from them may change."""
        self.mend()
        return self._changes.open()

    def mend(self) -> None:
        """Compute the books anew if an exception has left a change half done. Otherwise do nothing."""
        if self._changes.are_left:
            self._rebuild()
            self._changes.forget_left()

    # The methods below add checkpoints and note their use.

    def keep(self, sequence: Sequence, tokens: Int64s, owner: Hashable, held_bytes: int) -> tuple[Node, Sequence, bool]:
        """Return the node of a sequence's tokens, the checkpoint there, and whether the checkpoint was made now.

        The errors are those of `HybridMemory.checkpoint`. Then nothing has changed.
        """
        node = self.tree.node_at(tokens, owner)
        if node.mark is not None and not node.mark.is_swapped:
            return node, node.mark, False
        try:
            checkpoint = coordinator_of(self.memory).copy(sequence, True, True, self._made)
        except HybridMemoryError:
            self.tree.prune(node)
            raise
        priority = 1.0
        if node.mark is not None:  # The checkpoint's tokens were computed again, and the new copy is in the budget.
            priority = self.records[node.mark].priority
            self.close(node.mark)
        self.records[checkpoint] = Record(owner, priority)
        self._made.clear()
        self._mark(node, checkpoint)
        self._ranking.add(checkpoint, node.depth - marked_above(node), held_bytes, priority)
        self._count_saved_below(node, node.depth)
        return node, checkpoint, True

    def _mark(self, node: Node, checkpoint: Sequence) -> None:
        node.mark = checkpoint
        self.nodes[checkpoint] = node

    def add_outside(self, tokens: Int64s, owner: Hashable, checkpoint: Sequence) -> bool:
        """Add a checkpoint that is outside of the budget. Return False if these tokens already have a checkpoint."""
        node = self.tree.node_at(tokens, owner)
        if node.mark is not None:
            return False
        self.records[checkpoint] = Record(owner, clock=self._clock)
        self._mark(node, checkpoint)
        self._rank_outside(checkpoint)
        self._count_saved_below(node, node.depth)
        return True

    def _rank_outside(self, checkpoint: Sequence) -> None:
        node, record = self.nodes[checkpoint], self.records[checkpoint]
        self.outside.add(checkpoint, node.depth - marked_above(node), record.clock, record.priority)

    def load(self, folder: str | Path, seconds_to_live: float | None) -> None:
        """Add the checkpoints of a folder, which are outside of the budget. After an error, those not added are closed.

        Raises FormatError as `PrefixCache.load` does, or if an owner is of a wrong type. Then no checkpoint is added.
        """
        left = self.memory.folders.load(folder, self._made)[::-1]
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
            self._made.clear()

    def touch(self, node: Node) -> None:
        """Set the last use of a node's checkpoint to now."""
        self._clock += 1
        if (checkpoint := node.mark) is not None:
            self._ranking_of(checkpoint).use(checkpoint, self._clock)
            record = self.records[checkpoint]
            record.clock = self._clock
            if record.seconds < math.inf:
                record.used_at = self._now()

    def prefer(self, checkpoint: Sequence, priority: float) -> None:
        """Set the factor on a checkpoint's worth. With `math.inf` the checkpoint never gives way."""
        self.records[checkpoint].priority = priority
        self._ranking_of(checkpoint).prefer(checkpoint, priority)

    def let_live(self, checkpoint: Sequence, seconds: float) -> None:
        """Let a checkpoint live for this time after its last use. With `math.inf` it lives for ever."""
        record = self.records[checkpoint]
        record.seconds = seconds
        if seconds < math.inf:
            record.used_at = self._now()
            heappush(self._ends, (record.used_at + seconds, next(self._numbers), checkpoint))

    def bring_back(self, node: Node) -> None:
        """Move the checkpoint of a node back into the budget. The errors are those of `Outside.bring_back`."""
        checkpoint = node.mark
        assert checkpoint is not None, "the caller has looked"
        self.outside.bring_back(checkpoint)
        self._rank_inside(checkpoint)
        self.touch(node)

    def _rank_inside(self, checkpoint: Sequence) -> None:
        node, record = self.nodes[checkpoint], self.records[checkpoint]
        held_bytes = self.memory.counters.held_bytes(checkpoint)
        self._ranking.add(checkpoint, node.depth - marked_above(node), held_bytes, record.priority)
        self._ranking.use(checkpoint, record.clock)

    def _count_saved_below(self, node: Node, start: int) -> None:
        """Tell the rankings that the nearest checkpoints below a node save the tokens from `start` on."""
        below = list(node.children.values())
        while below:
            child = below.pop()
            if child.mark is not None:
                self._ranking_of(child.mark).saves(child.mark, child.depth - start)
            else:
                below.extend(child.children.values())

    def _ranking_of(self, checkpoint: Sequence) -> Ranking:
        return self.outside.ranking if checkpoint in self.outside.ranking else self._ranking

    # The methods below make checkpoints give way.

    def reclaim(self, missing_bytes: int) -> bool:
        """Make checkpoints give way. See `PrefixCache.reclaim`."""
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
            # Two checkpoints that share blocks only with each other free more bytes than was computed for each alone.
            if self.memory.free_bytes - free_bytes >= lot_bytes:
                break
            self._give_way(checkpoint)
            n_gone += 1
        return n_gone > 0

    def _give_way(self, checkpoint: Sequence) -> None:
        """Move a checkpoint out of the budget. Close it if that does not pay, or if there is no room outside."""
        node = self.nodes[checkpoint]
        if self.outside.take(checkpoint, relatives(node), node.depth - marked_above(node), self._clock, self._drop):
            self._ranking.remove(checkpoint)
            self.records[checkpoint].clock = self._clock
            self._rank_outside(checkpoint)
        else:
            self._drop(checkpoint)

    def _drop(self, checkpoint: Sequence) -> None:
        """Close a checkpoint for lack of room."""
        self.n_evicted += 1
        self.evict(checkpoint)

    def bound_books(self) -> None:
        """Close checkpoints of least worth until the tokens of all others are within the limit of host memory."""
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
            record = self.records.get(checkpoint)
            if record is None or record.seconds == math.inf:
                continue
            if (ends_at := record.used_at + record.seconds) > now:
                heappush(self._ends, (ends_at, next(self._numbers), checkpoint))
            else:
                self.n_expired += 1
                self.evict(checkpoint)

    def close(self, checkpoint: Sequence) -> Node:
        """Close a checkpoint, and return the node at which it was."""
        node = self.nodes.pop(checkpoint)
        node.mark = None
        self._ranking_of(checkpoint).remove(checkpoint)
        self.memory.close(checkpoint)
        del self.records[checkpoint]
        return node

    def evict(self, checkpoint: Sequence) -> None:
        """Close a checkpoint, and remove those nodes that led only to it."""
        node = self.close(checkpoint)
        self._count_saved_below(node, marked_above(node))
        self.tree.prune(node)

    def forget(self, tokens: Int64s, owner: Hashable, behind: int) -> int:
        """Close the checkpoints of prefixes of these tokens. See `PrefixCache.forget`."""
        n_closed = 0
        for node in reversed(self.tree.walk(tokens, owner)[1]):
            if node.children or node.depth <= behind:
                break
            if node.mark is not None:
                self.evict(node.mark)
                n_closed += 1
        return n_closed

    def _rebuild(self) -> None:
        """Compute everything that follows from the records. An interrupted call can be repeated."""
        still_open = {*self.memory.sequences}
        for checkpoint in self._made:
            if checkpoint not in self.records and checkpoint in still_open:
                self.memory.close(checkpoint)
        self._made.clear()
        for checkpoint in self.records.keys() - still_open:
            del self.records[checkpoint]
        self.tree, self._ranking = RadixTree(), Ranking()
        self.nodes.clear()
        self.outside.reset()
        for checkpoint, record in [*self.records.items()]:
            node = self.tree.node_at(checkpoint.tokens, record.owner)
            # An interrupt came when two checkpoints of the same tokens were noted, before the older one was closed.
            if (other := node.mark) is not None:
                self.memory.close(other)
                del self.records[other]
            node.mark = checkpoint
        for node in self.tree.nodes():
            if node.mark is not None:
                self.nodes[node.mark] = node
                self._rank_outside(node.mark) if node.mark.is_swapped else self._rank_inside(node.mark)
        self._clock = max((record.clock for record in self.records.values()), default=0)
        self._ends = [
            (record.used_at + record.seconds, next(self._numbers), checkpoint)
            for checkpoint, record in self.records.items()
            if record.seconds < math.inf
        ]
        heapify(self._ends)
