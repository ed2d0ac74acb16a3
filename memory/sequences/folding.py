"""Decides when rows fold into the body, and over which rows a recurrence must run from which state.

This module computes positions and addresses only, without tensors.

    position 0 ......... body_at ............... head_at .... start ............ end
                          | tail rows, verbatim ------------ | new rows of the step |

A step needs each sequence's state at `start`, runs the new rows, and leaves a head at `end`. If `end` is far enough
beyond the body, the step makes a new body at a position in between: among the old rows or, in a long prompt, among the
new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hybridmem.memory.blocks.arrays import Int64s, NumberT
from hybridmem.memory.interface import Packed, Stretch

Fold = Literal["keep", "replay", "defer"]
"""The fold mode of recurrent layers, as an argument of `HybridMemory(fold=...)`."""

NOTHING = -1
"""The id that means "no block". As the address of a start state it means the state at position 0."""


class FoldMode(Enum):
    """Says how a new body is made, and from which state a step starts.

    KEEP and REPLAY hold a head, which is a state at the newest position, and a step starts from it. With KEEP, the new
    body is a head that was kept when the sequence passed the fold point. With REPLAY, the recurrence runs again over
    the rows from the old body to the new one. DEFER holds no head: each step reads body and tail, and writes a new body
    when it passes a fold point. NONE is for attention, which reads body and tail as they are.
    """

    KEEP = "keep"
    REPLAY = "replay"
    DEFER = "defer"
    NONE = "none"


@dataclass(frozen=True)
class FoldPoints:
    """Computes fold points, the multiples of `fold_tokens`, at which rows may fold or pages may be released.

    Where a sequence has folded depends only on its peak, the furthest position that it has reached. So feeding the same
    tokens again folds at the same positions, and prefixes can be shared.

    Attributes:
        window_tokens: how many of the newest tokens never fold, counted from the peak.
        fold_tokens: the distance from one fold point to the next.
    """

    window_tokens: int
    fold_tokens: int

    def count(self, peaks: Int64s) -> Int64s:
        """Return (N,) the number of fold points that sequences with these peaks have passed."""
        return np.maximum(0, peaks - self.window_tokens) // self.fold_tokens

    def last(self, peaks: Int64s) -> Int64s:
        """Return (N,) the last fold point that each sequence has passed: at most peak - window_tokens, or 0."""
        return self.count(peaks) * self.fold_tokens


@dataclass(frozen=True)
class TailRules:
    """Says where the body of a sequence is, how a new body is made, and how many rows a tail has.

    Attributes:
        points: the fold points. Bodies are always at fold points. The window of `points` is the rollback window.
        mode: the fold mode. With KEEP, fold points are one window apart, so that one kept state is enough.
        tail_rows: how many rows a sequence's ring has. A tail holds at most rollback_window + fold_tokens - 1 rows and
            the overlap. The other rows of the ring let a short step write in place.
        overlap_tokens: the rows of so many tokens before the body's position stay in the tail as well.
    """

    points: FoldPoints
    mode: FoldMode
    tail_rows: int
    overlap_tokens: int = 0

    @staticmethod
    def of(fold: Fold, rollback_window: int) -> TailRules:
        """Return the rules for recurrences in a memory with these values of `fold` and `rollback_window`.

        With "keep", fold points are a window apart, so a ring has two windows. With "replay" they are an eighth of the
        window apart, so a ring has 1.2 windows. With "defer" they are half a window apart, so that a step reads few
        rows of the tail, and bodies are written rarely. If the window is 0, there is no tail, and nothing to defer.
        """
        mode, window = FoldMode(fold), rollback_window
        if window == 0:
            return TailRules(FoldPoints(0, 1), FoldMode.REPLAY, tail_rows=0)
        apart = {FoldMode.KEEP: window, FoldMode.REPLAY: max(4, window // 8), FoldMode.DEFER: max(4, window // 2)}
        return TailRules._with_ring(mode, window, apart[mode])

    @staticmethod
    def of_attention(rollback_window: int, fold_tokens: int, overlap_tokens: int) -> TailRules:
        """Return the rules for attention whose rows fold `fold_tokens` at a time, and whose tails have an overlap."""
        return TailRules._with_ring(FoldMode.NONE, rollback_window, fold_tokens, overlap_tokens)

    @staticmethod
    def _with_ring(mode: FoldMode, rollback_window: int, fold_tokens: int, overlap_tokens: int = 0) -> TailRules:
        """Return rules whose ring is about 3 % larger than the longest tail."""
        n_held = rollback_window + fold_tokens - 1 + overlap_tokens
        tail_rows = n_held + max(1, n_held // 32)
        return TailRules(FoldPoints(rollback_window, fold_tokens), mode, tail_rows, overlap_tokens)

    @property
    def rollback_window(self) -> int:
        """Return the number of tokens that can always be taken back, counted from the peak."""
        return self.points.window_tokens

    @property
    def fold_tokens(self) -> int:
        """Return the distance of two fold points."""
        return self.points.fold_tokens

    @property
    def keeps(self) -> bool:
        """True if a head is kept at the fold point to which the body moves next."""
        return self.mode is FoldMode.KEEP

    @property
    def has_heads(self) -> bool:
        """True if the fold mode holds a state at the newest position."""
        return self.mode is FoldMode.KEEP or self.mode is FoldMode.REPLAY

    @property
    def defers(self) -> bool:
        """True if recurrences read body and tail, without a head."""
        return self.mode is FoldMode.DEFER

    def body_at(self, peaks: Int64s) -> Int64s:
        """Return (N,) the positions of the bodies of sequences with these peaks.

        Bodies of slimmed sequences (`memory.recurrent_state.RecurrentState.slim`) may be further ahead.
        """
        return self.points.last(peaks)

    def next_fold(self, body_at: NumberT) -> NumberT:
        """Return the first fold point after a body, or after each of an array of bodies."""
        return (body_at // self.fold_tokens + 1) * self.fold_tokens

    def tail_at(self, body_at: NumberT) -> NumberT:
        """Return the position of a tail's first row, given the body's position.

        Works for an array of positions, too.
        """
        if not self.overlap_tokens:
            return body_at
        at = body_at - self.overlap_tokens
        return at * (at > 0)

    def held_blocks(self, stretch: Stretch, bodies: Int64s) -> tuple[Int64s, Int64s]:
        """Return (4, N) states and (4, N) tails: how many each sequence holds before, in and after a step, and shares.

        Args:
            bodies: (N,) where the bodies are now, for bodies that are further ahead than the fold points say.

        The last of the four rows counts what forks always share, which is nothing. A sequence that was rolled back may
        or may not have a head or a kept state. So only its tail is counted, unless `stretch.at_most` asks for all that
        it may have.
        """
        starts, ends, is_fresh = stretch.starts, stretch.ends, stretch.peaks == stretch.starts
        old_body = np.maximum(self.body_at(stretch.peaks), bodies)
        new_body = np.maximum(self.body_at(np.maximum(stretch.peaks, ends)), bodies)
        (old_head, old_kept), (new_head, new_kept) = self._shortcuts(starts, old_body), self._shortcuts(ends, new_body)
        moves = (new_body > old_body) & ~(old_kept & (new_body == self.next_fold(old_body)))
        leaves = self.keeps & (self.next_fold(new_body) > starts) & (self.next_fold(new_body) < ends)
        before = is_fresh * _count(old_body > 0, old_head, old_kept)
        fresh = is_fresh * _count(moves, self.has_heads & (ends > new_body) & ~old_head, leaves)
        after = (is_fresh | (ends >= stretch.peaks)) * _count(new_body > 0, new_head, new_kept)
        inside, none = np.maximum(before + fresh, after), np.zeros_like(starts)
        # The most that there can be are a new body, a head, and the states kept at two fold points.
        if stretch.at_most:
            most = ~is_fresh * (1 + self.has_heads + 2 * self.keeps)
            inside, after = inside + most, np.maximum(after, most)
        has_tail, grows = self.tail_rows > 0, ends - self.tail_at(old_body) > self.tail_rows
        is_slim = (bodies > self.body_at(stretch.peaks)) & (starts == bodies)
        was_there = has_tail & (starts > 0) & ~is_slim
        tails = np.stack([was_there, has_tail * (1 + (was_there & grows)), none + has_tail, none]).astype(np.int64)
        return np.stack([before, inside, after, none]), tails

    def _shortcuts(self, lengths: Int64s, body_at: Int64s) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return masks: which sequences have a head, and which have a kept state, if they were never rolled back.

        A head at a fold point becomes the kept state, so such a sequence has no head.
        """
        has_kept = self.keeps & (self.next_fold(body_at) <= lengths)
        return self.has_heads & (lengths > body_at) & ~(has_kept & (lengths % self.fold_tokens == 0)), has_kept


def _count(*are_there: NDArray[np.bool_]) -> Int64s:
    """Return (N,) for each sequence, how many of the given masks (N,) are true."""
    counts: Int64s = np.sum(are_there, axis=0)
    return counts


@dataclass(eq=False)
class Columns:
    """Holds positions of states and ids of blocks. Each column belongs to one sequence, by slot or by request.

    Positions count the tokens that a state has seen. After `drop` a state has seen more tokens than its sequence has,
    because it still contains the dropped ones: position p of the sequence is position p + offset of its states.

        the sequence   0 ............... start ........ length
        its states     0 ......... end ............ length + offset

    `kept` is the state at the fold point after the body, if it was kept. The kept state and the head only save time:
    both can be computed from body and tail.

    Attributes:
        table: (9, n): body_at, head_at, kept_at, offset, floor, then the ids of body, head, kept and tail. The floor is
            the earliest position of the sequence that has a state. Before it, position + offset is that of a dropped
            token, or the sequence is slimmed. It is then at least 1, because a rollback to position 0 needs no state.
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
        """Return (3, n): ids of body, head and kept."""
        rows: Int64s = self.table[5:8]
        return rows

    @property
    def ids(self) -> Int64s:
        """Return (4, n): ids of body, head, kept and tail."""
        rows: Int64s = self.table[5:]
        return rows

    def take(self, slots: Int64s) -> Columns:
        return Columns(self.table.take(slots, axis=1))

    def put(self, slots: Int64s, values: Columns) -> None:
        self.table[:, slots] = values.table


EMPTY_COLUMN: Int64s = np.array([0, NOTHING, NOTHING, 0, 0, NOTHING, NOTHING, NOTHING, NOTHING])
"""The column of a slot that holds nothing."""


class StateAddresses(NamedTuple):
    """Holds the byte addresses (S,) of each request's states, or NOTHING if there is no such state.

    `at_start` is the block for the state at the step's start, if old rows must be run to get there.
    """

    old_body: Int64s
    old_head: Int64s
    old_kept: Int64s
    new_body: Int64s
    new_head: Int64s
    new_kept: Int64s
    at_start: Int64s


class Pass(NamedTuple):
    """Describes the segments of one kernel call: rows [begin, end) of each of `requests`, with start and end states.

    Attributes:
        is_replay: True if the rows are old rows from tails. Nobody needs their outputs.
        source, target: the byte addresses of the states before and after the rows.
    """

    is_replay: bool
    requests: Int64s
    begin: Int64s
    end: Int64s
    source: Int64s
    target: Int64s


def schedule(packed: Packed, before: Columns, after: Columns, states: StateAddresses) -> list[Pass]:
    """Return the passes of a step, in the order in which they must run.

    Every new row is in exactly one pass that is not a replay.
    """
    starts, ends, fold = packed.starts, packed.ends, after.body_at
    from_kept = before.kept_at > before.body_at
    at = np.where(from_kept, before.kept_at, before.body_at)
    source = np.where(from_kept, states.old_kept, states.old_body)
    from_head = (before.head_at >= at) & (before.head_at <= starts)
    at, source = np.where(from_head, before.head_at, at), np.where(from_head, states.old_head, source)
    passes: list[Pass] = []

    def add(is_replay: bool, mask: NDArray[np.bool_], begin: Int64s, end: Int64s, target: Int64s) -> None:
        passes.append(Pass(is_replay, mask.nonzero()[0], begin[mask], end[mask], source[mask], target[mask]))

    # 1. Run old rows up to the new body, unless it was kept. Some requests have a state beyond the new body. They run
    # these rows from the old body, and continue from that later state in the next passes.
    mask = fold > before.body_at
    if np.count_nonzero(mask) and (mask := mask & (fold <= starts) & (before.kept_at != fold)).any():
        is_beside = mask & (at >= fold)
        rest_at, rest_source = np.where(is_beside, at, fold), np.where(is_beside, source, states.new_body)
        at, source = np.where(is_beside, before.body_at, at), np.where(is_beside, states.old_body, source)
        add(True, mask, at, fold, states.new_body)
        at, source = np.where(mask, rest_at, at), np.where(mask, rest_source, source)
    # 2. Run the other old rows, up to the first new one.
    mask = at < starts
    if np.count_nonzero(mask):
        add(True, mask, at, starts, states.at_start)
        source = np.where(mask, states.at_start, source)
    # 3. Run new rows up to the new body, and then up to the fold point whose state is kept.
    at = starts
    for position, target in ((fold, states.new_body), (after.kept_at, states.new_kept)):
        mask = position > at
        if np.count_nonzero(mask):
            add(False, mask, at, position, target)
            at, source = np.where(mask, position, at), np.where(mask, target, source)
    # 4. Run new rows to the end.
    mask = ends > at
    if np.count_nonzero(mask):
        add(False, mask, at, ends, states.new_head)
    return passes
