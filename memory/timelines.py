"""Sequences and their positions: forks, checkpoints, and every way back. The half of `HybridMemory` that runs no model."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import TypeVar

import numpy as np

from memory.arguments import is_integer
from memory.books import Books
from memory.errors import BatchError, RollbackError, SequenceError, SpecError
from memory.interface import Sequence
from memory.interrupts import uninterrupted, uninterrupted_call
from memory.shift import Dropped, drop_from_all

_T = TypeVar("_T")
_MemoryT = TypeVar("_MemoryT", bound="Timelines")


def require_memory(memory: object, call: str) -> None:
    """Raise SpecError unless this is a memory; `call` says how the caller is called."""
    if not isinstance(memory, Timelines):
        raise SpecError(f"{memory!r:.80} is no HybridMemory; call {call}, with HybridMemory(model.memory_spec, budget)")


class Whole(Enum):
    """What `close` closes if it is given no sequence. (None is what a variable holds whose sequence was never opened.)"""

    MEMORY = auto()


class Timelines(Books):
    """What is remembered of each sequence up to which position, in all kinds of memory at once."""

    # The whole

    def __enter__(self: _MemoryT) -> _MemoryT:
        if self._why_ended:
            raise SequenceError(self._why_ended)
        return self

    def __exit__(self, *error: object) -> None:
        self._close_all()

    def _close_all(self) -> None:
        """See `HybridMemory.close`."""
        if self._why_ended:
            return
        for handle in self.sequences:
            if self._ledger.is_busy[handle.slot]:
                raise SequenceError(f"{handle!r} is in an open step; leave the step before its memory is closed")
        with uninterrupted():
            for handle in self.sequences:
                handle.closed = True
            self._store.give_back()
            self._end("this memory is closed; make another one")

    # Copies that share

    def fork(self, sequence: Sequence) -> Sequence:
        """A new sequence that continues from where this one (or this checkpoint) stands.

        Copies no tensor: blocks are shared until one side writes, and then only the last page, the tail and the head are
        copied. Raises SequenceError.
        """
        self._ledger.check_usable(sequence, to_advance=False)
        with uninterrupted_call() as held:
            return self._copy(sequence, held, is_checkpoint=False)

    def checkpoint(self, sequence: Sequence) -> Sequence:
        """A mark at the sequence's position: `rollback(sequence, to=mark)` returns to it at any distance, until it is closed.

        A mark pins its blocks and nothing else; see `fork`. Raises SequenceError.
        """
        self._ledger.check_usable(sequence, to_advance=False)
        with uninterrupted_call() as held:
            return self._copy(sequence, held, is_checkpoint=True)

    def _copy(self, sequence: Sequence, held: uninterrupted_call, *, is_checkpoint: bool) -> Sequence:
        copy = self._ledger.open(lineage=sequence.lineage, is_checkpoint=is_checkpoint)
        try:
            self._share([sequence], [copy])
            held.deliver()
        except BaseException:
            self._withdraw(copy)
            raise
        return copy

    def _withdraw(self, sequence: Sequence) -> None:
        """Close a new sequence that has not become what it should, or that a Ctrl-C has come for."""
        self._kinds.release(sequence.slot)
        self._ledger.close(sequence)

    def reorder(self, moves: Mapping[Sequence, Sequence]) -> None:
        """All at once: each key goes on as its value was. For beam search: `reorder({a: b, b: b, c: a})`.

        Copies no tensor. Raises SequenceError or BatchError with nothing changed.
        """
        if not isinstance(moves, Mapping):
            raise BatchError(f"{moves!r} is no reordering; give {{target: source}}")
        for target, source in moves.items():
            self._ledger.check_usable(target)
            self._ledger.check_usable(source, to_advance=False)
        if moves:
            with uninterrupted():
                self._share(list(moves.values()), list(moves))

    def _share(self, sources: list[Sequence], targets: list[Sequence]) -> None:
        """Let nothing interrupt it."""
        self._kinds.share(np.array([s.slot for s in sources]), np.array([s.slot for s in targets]))
        self._ledger.copy(sources, targets, self._kinds.horizon)

    # Going back

    def rollback(self, sequence: Sequence, to: int | Sequence | None = None, *, n_tokens: int | None = None) -> None:
        """Return to an earlier position: later outputs are those of a sequence that never saw the dropped tokens.

        Copies no tensor and runs no layer. Any position from `sequence.horizon` on can be reached, position 0, and whatever
        a checkpoint of the same family holds.

        Args:
            to: tokens to keep, 0 <= to <= length; or a checkpoint of the family: of this sequence, of one it was forked from
                or of a fork. The sequence then goes on as the checkpoint was, whatever it has seen since.
            n_tokens: instead of `to`: how many of the newest tokens to take back.
        Raises:
            RollbackError: out of reach, or no position; carries .to, .horizon and .resume_at, the nearest reachable position below.
            SequenceError: a bad handle.
        """
        self._ledger.check_usable(sequence)
        if n_tokens is not None:
            to = self._before_newest(sequence, n_tokens, to)
        if isinstance(to, Sequence):
            self._ledger.check_mark(sequence, to)
            with uninterrupted():
                self._share([to], [sequence])
            return
        reached, source = self._nearest(sequence, to)
        assert to is not None, "which is no position"
        if reached != to:
            raise self._out_of_reach(sequence, to, reached)
        with uninterrupted():
            if source is None:
                self._kinds.reset(sequence.slot)
                self._ledger.reset(sequence.slot)
                return
            if source is not sequence:
                self._share([source], [sequence])
            self._kinds.truncate(sequence.slot, reached)
            self._ledger.truncate(sequence.slot, reached)

    def _before_newest(self, sequence: Sequence, n_tokens: object, to: object) -> int:
        """The position n_tokens before the end. Raises RollbackError."""
        length, horizon = int(self._ledger.lengths[sequence.slot]), self._horizon(sequence)
        if to is not None:
            why = f"to={to!r} and n_tokens={n_tokens!r} say where to return to; give one of them"
        elif not is_integer(n_tokens, 0) or n_tokens > length:
            why = f"n_tokens={n_tokens!r} cannot be taken back of {sequence!r}; give 0 <= n_tokens <= {length}"
        else:
            return length - int(n_tokens)
        raise RollbackError(why, to=to, horizon=horizon, resume_at=length)

    def _out_of_reach(self, sequence: Sequence, to: int, reached: int) -> RollbackError:
        horizon = self._horizon(sequence)
        why = (
            f"it holds only {reached} tokens"
            if to > reached and reached == self._ledger.lengths[sequence.slot]
            else f"its tail reaches back to {horizon}, and no checkpoint holds {to}. The nearest reachable position is {reached}: "
            f"roll back to it and feed tokens {reached} ... {to - 1} again"
        )
        return RollbackError(f"{sequence!r} cannot return to position {to}: {why}", to=to, horizon=horizon, resume_at=reached)

    def can_rollback(self, sequence: Sequence, to: int | Sequence) -> bool:
        """Whether `rollback(sequence, to)` would succeed now. Raises as `resume_point`."""
        self._ledger.check_usable(sequence)
        if not isinstance(to, Sequence):
            return self._nearest(sequence, to)[0] == to
        try:
            self._ledger.check_mark(sequence, to)
        except SequenceError:
            return False
        return True

    def resume_point(self, sequence: Sequence, to: int) -> int:
        """The nearest position <= `to` that `rollback` reaches now (the length, if `to` lies beyond it).

        Raises SequenceError: a bad `sequence`. RollbackError: `to` is no position, such as -1.
        """
        self._ledger.check_usable(sequence)
        return self._nearest(sequence, to)[0]

    def _nearest(self, sequence: Sequence, to: object) -> tuple[int, Sequence | None]:
        """The nearest reachable position <= to, and whose blocks hold it: the sequence's own, a checkpoint's, nobody's (0)."""
        length, horizon = int(self._ledger.lengths[sequence.slot]), self._horizon(sequence)
        if not is_integer(to, 0):
            raise RollbackError(f"to={to!r} is no position; give 0 <= to <= {length} or a checkpoint", to=to, horizon=horizon, resume_at=0)
        if to >= horizon:
            return min(int(to), length), sequence
        return self._ledger.nearest_checkpoint(sequence, int(to))

    def drop(self, sequence: Sequence, start: int, end: int, *, approximate: bool = False) -> None:
        """Forget tokens [start, end) of a live sequence and keep those behind them, which move down by end - start: a context shift.

        Attention keeps the rows of the other tokens; keys are turned to their new positions. What the model computed while it saw the
        dropped tokens stays: keys and values of later tokens, in layers above the first, still carry a trace of them, as in llama.cpp.
        Only a range that ends with the sequence leaves none: that is a rollback, where a rollback reaches.
        Rollback, forks and checkpoints work on as ever. Forks and checkpoints of before are untouched.

        Args:
            approximate: recurrent layers cannot forget from the middle: their states hold all tokens in one. False: a model that has any is
                refused. True: they stay as they are, so they go on remembering the dropped tokens while attention does not, and a rollback
                by position reaches no further back than `start`. Without recurrent layers both are the same.
        Raises:
            DropError: no such range; recurrent layers, unless approximate; attention with a policy, or whose spec does not say how keys
                carry positions; a window that would reach back to rows that have left it.
            CapacityError: no room to copy the rows behind `end` before the old ones are freed. SequenceError: a bad handle.
        Cost: those rows are read, turned and written, in every attention layer. No layer of the model runs.
        """
        self._ledger.check_usable(sequence)
        slot = sequence.slot
        length, peak = int(self._ledger.lengths[slot]), int(self._ledger.peaks[slot])
        dropped = Dropped.of(slot, start, end, length, peak, approximate=approximate)
        if dropped.n_tokens and dropped.end == length and self.can_rollback(sequence, dropped.start):
            self.rollback(sequence, dropped.start)
        elif dropped.n_tokens:
            with uninterrupted():
                # Recurrences refuse at once; attention may have much to copy before it does.
                self._with_room(lambda: drop_from_all(reversed(self._kinds.values()), dropped, self.free_bytes))
                self._ledger.drop(dropped, dropped.start + (not self._has_states))
