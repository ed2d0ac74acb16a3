"""When bodies move, and which rows must run from which state: positions and addresses only, no tensors.

    position 0 ......... body_at ............... head_at .... start ............ end
                          | tail rows, verbatim ------------ | new rows of the step |

A step needs each sequence's state at `start`, runs the new rows, and leaves a head at `end`. If `end` is far enough
beyond the body, a new body is made on the way: among the old rows or, in a long prompt, among the new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memory.blocks.arrays import Int64s
from memory.interface import Packed, Stretch

Fold = Literal["keep", "replay", "defer"]
"""The `FoldMode` of recurrences, as `HybridMemory(fold=...)` is given it."""

NOTHING = -1
"""No block; as the address of a start state: the state at position 0."""


class FoldMode(Enum):
    """How a new body is made, and what a step begins with.

    KEEP and REPLAY hold a head: a state at the newest position, with which a step begins. A new body is a head that was
    kept when it passed that position, or is run again from the old body over the rows between. DEFER holds none: each
    step reads the body behind the tail, and leaves a new body on its way. NONE is for attention, which reads its body
    and its tail as they are.
    """

    KEEP = "keep"
    REPLAY = "replay"
    DEFER = "defer"
    NONE = "none"


@dataclass(frozen=True)
class FoldPoints:
    """The positions at which tokens may leave the tail, or a page its sequence: the multiples of `fold_tokens`.

    Where a sequence has folded depends on the furthest position that it has reached and on nothing else, so reruns
    agree on it and prefixes can be shared.

    Attributes:
        window_tokens: newest tokens that never fold, counted from the furthest position reached.
        fold_tokens: distance of two fold points.
    """

    window_tokens: int
    fold_tokens: int

    def count(self, peaks: Int64s) -> Int64s:
        """Return (N,) how many fold points sequences have passed that have reached `peaks`."""
        return np.maximum(0, peaks - self.window_tokens) // self.fold_tokens

    def last(self, peaks: Int64s) -> Int64s:
        """Return (N,) the last of these fold points: the greatest one <= peak - window_tokens, or 0."""
        return self.count(peaks) * self.fold_tokens


@dataclass(frozen=True)
class TailRules:
    """Where the body of a sequence belongs, how a new one is made, and how many rows a tail has.

    Attributes:
        points: where bodies may stand; the window is that of rollback.
        mode: with KEEP, points as far apart as the window is long make one kept state enough.
        tail_rows: rows of a sequence's ring. The first rollback_window + fold_tokens - 1 are what a tail can hold; the
            rest lets a short step write in place.
    """

    points: FoldPoints
    mode: FoldMode
    tail_rows: int

    @staticmethod
    def of(fold: Fold, rollback_window: int) -> TailRules:
        """Return what recurrences of a memory with this `fold` and window follow.

        Keep: points a window apart, so a ring of two windows. Replay: an eighth of the window, so a ring of 1.2
        windows. Defer: half the window, so that what a step reads of the tail, and writes of bodies, both stay small.
        Without a window there is no tail, and nothing to defer.
        """
        mode, window = FoldMode(fold), rollback_window
        if window == 0:
            return TailRules(FoldPoints(0, 1), FoldMode.REPLAY, tail_rows=0)
        apart = {FoldMode.KEEP: window, FoldMode.REPLAY: max(4, window // 8), FoldMode.DEFER: max(4, window // 2)}
        return TailRules._with_ring(mode, window, apart[mode])

    @staticmethod
    def of_attention(rollback_window: int, fold_tokens: int) -> TailRules:
        """Return what attention follows whose rows fold `fold_tokens` at a time."""
        return TailRules._with_ring(FoldMode.NONE, rollback_window, fold_tokens)

    @staticmethod
    def _with_ring(mode: FoldMode, rollback_window: int, fold_tokens: int) -> TailRules:
        n_held = rollback_window + fold_tokens - 1
        return TailRules(FoldPoints(rollback_window, fold_tokens), mode, n_held + max(1, n_held // 32))

    @property
    def rollback_window(self) -> int:
        """Tokens that can always be taken back, counted from the furthest position reached."""
        return self.points.window_tokens

    @property
    def fold_tokens(self) -> int:
        """Distance of two body positions."""
        return self.points.fold_tokens

    @property
    def keeps(self) -> bool:
        """Whether heads are kept where the body will move next."""
        return self.mode is FoldMode.KEEP

    @property
    def has_heads(self) -> bool:
        """Whether there is a state at the newest position."""
        return self.mode is FoldMode.KEEP or self.mode is FoldMode.REPLAY

    @property
    def defers(self) -> bool:
        """Whether recurrences read the body behind the tail."""
        return self.mode is FoldMode.DEFER

    def body_at(self, peaks: Int64s) -> Int64s:
        """Return (N,) where the body of a sequence belongs that has reached `peaks`."""
        return self.points.last(peaks)

    def held_blocks(self, stretch: Stretch) -> tuple[Int64s, Int64s]:
        """Return (4, N) states and (4, N) tails that sequences hold before, in and after a step.

        The last row is what forks share for good: none.

        Of a sequence that was taken back nothing is known but its tail: a head or a kept state may be there or not.
        """
        starts, ends, is_fresh = stretch.starts, stretch.ends, stretch.peaks == stretch.starts
        old_body, new_body = self.body_at(stretch.peaks), self.body_at(np.maximum(stretch.peaks, ends))
        (old_head, old_kept), (new_head, new_kept) = self._shortcuts(starts, old_body), self._shortcuts(ends, new_body)
        moves = (new_body > old_body) & ~(old_kept & (new_body == old_body + self.fold_tokens))
        leaves = self.keeps & (new_body + self.fold_tokens > starts) & (new_body + self.fold_tokens < ends)
        before = is_fresh * _count(old_body > 0, old_head, old_kept)
        fresh = is_fresh * _count(moves, self.has_heads & (ends > new_body) & ~old_head, leaves)
        after = (is_fresh | (ends >= stretch.peaks)) * _count(new_body > 0, new_head, new_kept)
        none = np.zeros_like(starts)
        has_tail, grows = self.tail_rows > 0, ends - old_body > self.tail_rows
        was_there = has_tail & (starts > 0)
        tails = np.stack([was_there, has_tail * (1 + (was_there & grows)), none + has_tail, none]).astype(np.int64)
        return np.stack([before, np.maximum(before + fresh, after), after, none]), tails

    def _shortcuts(self, lengths: Int64s, body_at: Int64s) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return whether sequences that were fed to these lengths have a head, and a kept state.

        A head where one is kept becomes it.
        """
        has_kept = self.keeps & (body_at + self.fold_tokens <= lengths)
        return self.has_heads & (lengths > body_at) & ~(has_kept & (lengths % self.fold_tokens == 0)), has_kept


def _count(*are_there: NDArray[np.bool_]) -> Int64s:
    counts: Int64s = np.sum(are_there, axis=0)
    return counts


@dataclass(frozen=True)
class Columns:
    """One value for each sequence, by slot or by request: positions of states, and ids of blocks.

    Positions count the tokens that a state has seen. After `drop` these are more than the sequence has, for a state
    still contains the dropped tokens: position p of the sequence is p + offset of its states.

        the sequence   0 ............... start ........ length
        its states     0 ......... end ............ length + offset

    `kept` is the state at a later body position, at most one. It and the head are shortcuts: the body and the tail are
    enough.

    Attributes:
        table: (9, n): body_at, head_at, kept_at, offset, floor, then the ids of body, head, kept and tail. The floor is
            the earliest position of the sequence that has a state: before it, position + offset is that of a dropped
            token. It is at least 1 once tokens were dropped, for at position 0 nothing is remembered at all.
    """

    table: Int64s

    @staticmethod
    def empty(n: int) -> Columns:
        return Columns(np.repeat(EMPTY_COLUMN[:, None], n, axis=1))

    def __len__(self) -> int:
        return len(self.table[0])

    @property
    def body_at(self) -> Int64s:
        row: Int64s = self.table[0]
        return row

    @property
    def head_at(self) -> Int64s:
        row: Int64s = self.table[1]
        return row

    @property
    def kept_at(self) -> Int64s:
        row: Int64s = self.table[2]
        return row

    @property
    def offset(self) -> Int64s:
        row: Int64s = self.table[3]
        return row

    @property
    def floor(self) -> Int64s:
        row: Int64s = self.table[4]
        return row

    @property
    def body(self) -> Int64s:
        row: Int64s = self.table[5]
        return row

    @property
    def head(self) -> Int64s:
        row: Int64s = self.table[6]
        return row

    @property
    def kept(self) -> Int64s:
        row: Int64s = self.table[7]
        return row

    @property
    def tail(self) -> Int64s:
        row: Int64s = self.table[8]
        return row

    @property
    def states(self) -> Int64s:
        """(3, n): ids of body, head and kept."""
        rows: Int64s = self.table[5:8]
        return rows

    @property
    def ids(self) -> Int64s:
        """(4, n): ids of body, head, kept and tail."""
        rows: Int64s = self.table[5:]
        return rows

    def take(self, slots: Int64s) -> Columns:
        return Columns(self.table.take(slots, axis=1))

    def put(self, slots: Int64s, values: Columns) -> None:
        self.table[:, slots] = values.table


EMPTY_COLUMN: Int64s = np.array([0, NOTHING, NOTHING, 0, 0, NOTHING, NOTHING, NOTHING, NOTHING])
"""The column of a slot that holds nothing."""


@dataclass(frozen=True)
class StateAddresses:
    """(S,) byte addresses of each request's states; NOTHING where there is none."""

    old_body: Int64s
    old_head: Int64s
    old_kept: Int64s
    new_body: Int64s
    new_head: Int64s
    new_kept: Int64s


@dataclass(frozen=True)
class Pass:
    """Runs that do not depend on each other, one for each of `requests`: rows [begin, end) from one state to another.

    Attributes:
        is_replay: the rows are old ones, from tails, and their outputs are not wanted.
        source, target: byte addresses of the state before and after.
    """

    is_replay: bool
    requests: Int64s
    begin: Int64s
    end: Int64s
    source: Int64s
    target: Int64s


def schedule(packed: Packed, before: Columns, after: Columns, states: StateAddresses) -> list[Pass]:
    """Return the passes of a step, in the order in which they must run.

    Every new row is in exactly one pass that is no replay.
    """
    starts, ends, fold = packed.starts, packed.ends, after.body_at
    from_kept = before.kept_at > before.body_at
    at, source = (
        np.where(from_kept, before.kept_at, before.body_at),
        np.where(from_kept, states.old_kept, states.old_body),
    )
    from_head = (before.head_at >= at) & (before.head_at <= starts)
    at, source = np.where(from_head, before.head_at, at), np.where(from_head, states.old_head, source)
    passes: list[Pass] = []

    def add(is_replay: bool, mask: NDArray[np.bool_], begin: Int64s, end: Int64s, target: Int64s) -> None:
        passes.append(Pass(is_replay, mask.nonzero()[0], begin[mask], end[mask], source[mask], target[mask]))

    # 1. Old rows up to the new body, unless it was kept. States beyond it cannot help: they run from the old body,
    #    beside the rest.
    mask = fold > before.body_at
    if np.count_nonzero(mask) and (mask := mask & (fold <= starts) & (before.kept_at != fold)).any():
        is_beside = mask & (at >= fold)
        rest_at, rest_source = np.where(is_beside, at, fold), np.where(is_beside, source, states.new_body)
        at, source = np.where(is_beside, before.body_at, at), np.where(is_beside, states.old_body, source)
        add(True, mask, at, fold, states.new_body)
        at, source = np.where(mask, rest_at, at), np.where(mask, rest_source, source)
    # 2. Old rows up to the first new one.
    mask = at < starts
    if np.count_nonzero(mask):
        add(True, mask, at, starts, states.new_head)
        source = np.where(mask, states.new_head, source)
    # 3. New rows up to the new body, and then up to where a state is kept on the way.
    at = starts
    for position, target in ((fold, states.new_body), (after.kept_at, states.new_kept)):
        mask = position > at
        if np.count_nonzero(mask):
            add(False, mask, at, position, target)
            at, source = np.where(mask, position, at), np.where(mask, target, source)
    # 4. New rows to the end.
    mask = ends > at
    if np.count_nonzero(mask):
        add(False, mask, at, ends, states.new_head)
    return passes
