"""Sequences and their positions: forks, checkpoints, and every way back. The half of `HybridMemory` that runs no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from memory.arena import Store
from memory.errors import HOST_UNIT, BatchError, CapacityError, RollbackError, SequenceError
from memory.host_pages import HostPages
from memory.inspection import Inventory, sequence_html
from memory.interface import Int64s, Sequence, Stretch
from memory.interrupts import uninterrupted
from memory.ledger import Ledger
from memory.room import Need, bytes_for, need_of
from memory.shift import Dropped, drop_from_all
from memory.together import AllKinds

_T = TypeVar("_T")


class Timelines:
    """What is remembered of each sequence up to which position, in all kinds of memory at once.

    Args:
        has_states: whether any layer is recurrent.
        host_pages: of the attention among `kinds`, in host memory.
    """

    def __init__(self, kinds: AllKinds, store: Store, *, has_states: bool, host_pages: HostPages | None = None) -> None:
        self._kinds = kinds
        self._store = store
        self._host_pages = host_pages
        self._has_states = has_states
        self._ledger = Ledger(self)
        self._reclaimers: list[Callable[[int], bool]] = []

    # Copies that share

    def fork(self, sequence: Sequence) -> Sequence:
        """A new sequence that continues from where this one (or this checkpoint) stands.

        Copies no tensor: blocks are shared until one side writes, and then only the last page, the tail and the head are
        copied. Raises SequenceError.
        """
        return self._copy(sequence, is_checkpoint=False)

    def checkpoint(self, sequence: Sequence) -> Sequence:
        """A mark at the sequence's position: `rollback(sequence, to=mark)` returns to it at any distance, until it is closed.

        A mark pins its blocks and nothing else; see `fork`. Raises SequenceError.
        """
        return self._copy(sequence, is_checkpoint=True)

    def _copy(self, sequence: Sequence, *, is_checkpoint: bool) -> Sequence:
        self._ledger.check_usable(sequence, to_advance=False)
        copy = self._ledger.open(lineage=sequence.lineage, is_checkpoint=is_checkpoint)
        self._share([sequence], [copy])
        return copy

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
            self._share(list(moves.values()), list(moves))

    def _share(self, sources: list[Sequence], targets: list[Sequence]) -> None:
        source_slots, target_slots = (np.array([s.slot for s in group]) for group in (sources, targets))
        with uninterrupted():
            self._kinds.share(source_slots, target_slots)
            self._ledger.copy(sources, targets)

    # Going back

    def rollback(self, sequence: Sequence, to: int | Sequence) -> None:
        """Return to an earlier position: later outputs are those of a sequence that never saw the dropped tokens.

        Copies no tensor and runs no layer. Any position from `sequence.horizon` on can be reached, position 0, and whatever
        a checkpoint of the same family holds.

        Args:
            to: tokens to keep, 0 <= to <= length; or a checkpoint of the family: of this sequence, of one it was forked from
                or of a fork. The sequence then goes on as the checkpoint was, whatever it has seen since.
        Raises:
            RollbackError: out of reach; carries .to, .horizon and .resume_at, the nearest reachable position below.
            SequenceError: a bad handle.
        """
        self._ledger.check_usable(sequence)
        if isinstance(to, Sequence):
            self._ledger.check_mark(sequence, to)
            self._share([to], [sequence])
            return
        reached, source = self._nearest(sequence, to)
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
        """Whether `rollback(sequence, to)` would succeed now. Raises SequenceError for a bad `sequence`."""
        self._ledger.check_usable(sequence)
        try:
            if isinstance(to, Sequence):
                self._ledger.check_mark(sequence, to)
                return True
            return self._nearest(sequence, to)[0] == to
        except (SequenceError, RollbackError):
            return False

    def resume_point(self, sequence: Sequence, to: int) -> int:
        """The nearest position <= `to` that `rollback` reaches now (the length, if `to` lies beyond it)."""
        self._ledger.check_usable(sequence)
        return self._nearest(sequence, to)[0]

    def _nearest(self, sequence: Sequence, to: int) -> tuple[int, Sequence | None]:
        """The nearest reachable position <= to, and whose blocks hold it: the sequence's own, a checkpoint's, nobody's (0)."""
        length, horizon = int(self._ledger.lengths[sequence.slot]), self._horizon(sequence)
        if isinstance(to, bool) or not isinstance(to, int | np.integer) or to < 0:
            raise RollbackError(f"to={to!r} is no position; give 0 <= to <= {length} or a checkpoint", to=to, horizon=horizon, resume_at=0)
        if to >= horizon:
            return min(int(to), length), sequence
        best: tuple[int, Sequence | None] = (0, None)
        for mark in self._ledger.checkpoints(sequence):
            reach = min(int(to), self._ledger.common_prefix(sequence, mark))
            if reach >= self._horizon(mark) and reach > best[0]:
                best = (reach, mark)
        return best

    def _horizon(self, sequence: Sequence) -> int:
        away = self._ledger.horizon_away(sequence.slot)
        return self._kinds.horizon(sequence.slot) if away is None else away

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

    # Room

    @property
    def budget_bytes(self) -> int:
        """Bytes that the memory may use at most."""
        return self._store.arena.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that nothing holds."""
        return self._store.arena.free_bytes

    def add_reclaimer(self, reclaim: Callable[[int], bool]) -> None:
        """Let `reclaim(missing_bytes)` free what is only optional, such as cached prefixes, before any call is refused for want of room.

        It says whether it has freed anything; it may close sequences and checkpoints that are in no step, and nothing else.
        """
        self._reclaimers.append(reclaim)

    def needed_bytes(self, n_tokens: int, *, n_held: int = 0, max_tokens: int = 512) -> int:
        """Bytes of a budget that one sequence needs to be fed so many tokens, in steps of `max_tokens` as `run` takes them.

        Args:
            n_held: tokens that it holds before. What they take is counted.
        Returns:
            To the byte; blocks of several sizes may leave gaps on top, which what `CapacityError` names allows for.
        Cost: no token is needed and nothing is set aside; a million take some milliseconds.
        """
        return self._need_of_one(n_tokens, n_held, max_tokens).total_bytes

    def require_possible(self, n_tokens: int, *, n_held: int = 0, max_tokens: int = 512) -> None:
        """Raise CapacityError if this budget could never hold that. Arguments and cost as `needed_bytes`. From any thread."""
        need = self._need_of_one(n_tokens, n_held, max_tokens)
        if need.total_bytes > self.budget_bytes:
            raise need.refusal(self.budget_bytes, self.free_bytes)

    def bytes_at(self, n_tokens: int) -> int:
        """Bytes that a sequence which shares none holds between steps when it has been fed so many tokens. Cost: O(1)."""
        return int(self._bytes_at(n_tokens)[0])

    def shared_bytes_at(self, n_tokens: int) -> int:
        """Bytes that forks of such a sequence share however far each goes on: full pages, and no state. Cost: O(1)."""
        return int(self._bytes_at(n_tokens)[3])

    def _bytes_at(self, n_tokens: int) -> Int64s:
        at = np.array([n_tokens])
        return bytes_for(self._kinds, Stretch(np.array([-1]), at, at, at))[:, 0]

    def require_room(self, sequences: list[Sequence], counts: Int64s, max_tokens: int) -> None:
        """Refuse requests that cannot fit, before anything is done for them; what is optional goes if they can.

        Args:
            counts: (S,) tokens of each.
        Raises:
            CapacityError: naming the bytes that all of them need together; SequenceError.
        """
        slots = self._ledger.check_all_usable(sequences)

        def attempt() -> None:
            need, free_bytes = self._need(slots, counts, max_tokens), self.free_bytes
            if need.total_bytes > self.budget_bytes or need.new_bytes > free_bytes:
                raise need.refusal(self.budget_bytes, free_bytes)

        self._with_room(attempt)

    def lack_of_room(self, slots: Int64s, counts: Int64s, max_tokens: int, *, least_bytes: int = 0) -> CapacityError:
        """That there is none for these requests, with the bytes that all of them need: `least_bytes` new ones, if that is known."""
        return self._need(slots, counts, max_tokens).at_least(least_bytes).refusal(self.budget_bytes, self.free_bytes)

    def _need(self, slots: Int64s, counts: Int64s, max_tokens: int) -> Need:
        return need_of(self._kinds, slots, self._ledger.lengths[slots], self._ledger.peaks[slots], counts, max_tokens)

    def _need_of_one(self, n_tokens: int, n_held: int, max_tokens: int) -> Need:
        nobody, held = np.array([-1]), np.array([n_held])
        return need_of(self._kinds, nobody, held, held, np.array([n_tokens]), max_tokens)

    def _with_room(self, attempt: Callable[[], _T]) -> _T:
        """What `attempt` returns, which may be made several times: where it lacks room, what is optional goes.

        Nothing goes for what the whole budget could not hold.
        """
        while True:
            try:
                return attempt()
            except CapacityError as error:
                # In host memory only checkpoints that are there make room; others need not go in vain.
                can_help = (
                    error.needed <= self.budget_bytes
                    if error.unit != HOST_UNIT
                    else any(s.is_checkpoint and s.is_on_host for s in self._ledger.handles.values())
                )
                if not can_help or not any(reclaim(max(1, error.needed - error.free)) for reclaim in self._reclaimers):
                    raise

    # Looking inside

    def length_of(self, sequence: Sequence) -> int:
        """What `sequence.length` shows; so do the next two."""
        return int(self._ledger.lengths[sequence.slot])

    def tokens_of(self, sequence: Sequence) -> Int64s:
        return self._ledger.tokens(sequence.slot)

    def horizon_of(self, sequence: Sequence) -> int:
        return self._horizon(sequence)

    def is_whole(self, sequence: Sequence) -> bool:
        """Whether a sequence remembers what feeding its tokens would give: none was dropped from its middle. Raises SequenceError."""
        self._ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        return not self._ledger.seams(sequence.slot)

    def private_bytes(self, sequence: Sequence) -> int:
        """What closing a sequence or a checkpoint would give back to the budget: what it shares with nobody. Raises SequenceError."""
        return int(self.private_bytes_of([sequence])[0])

    def private_bytes_of(self, sequences: list[Sequence]) -> Int64s:
        """(S,) `private_bytes` of each, alone, for little more than that of one. Raises SequenceError."""
        for sequence in sequences:
            self._ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        return self._kinds.private_bytes(np.array([sequence.slot for sequence in sequences], np.int64))

    def inventory(self, *sequences: Sequence) -> Inventory:
        """Which blocks these sequences, or all, refer to: what `usage` counts and `memory.pictures` draws. Valid until the memory changes.

        Raises SequenceError: a closed sequence, or one of another memory.
        """
        for sequence in sequences:
            self._ledger.check_open(sequence)
        chosen = list(sequences or self._ledger.handles.values())
        slots = np.array([s.slot for s in chosen], np.int64)
        away_bytes = np.array([self._ledger.bytes_away(slot) for slot in slots.tolist()], np.int64)
        return Inventory(self._store.arena, chosen, self._ledger.lengths[slots], away_bytes, self._kinds.groups(slots))

    def host_inventory(self, *sequences: Sequence) -> Inventory | None:
        """As `inventory`, of pages in host memory and of those sequences that have theirs there; None without `host_pages`."""
        if self._host_pages is None:
            return None
        chosen = [s for s in sequences or self._ledger.handles.values() if s.is_on_host]
        slots = np.array([s.slot for s in chosen], np.int64)
        return self._host_pages.inventory(chosen, self._ledger.lengths[slots], slots)

    def is_on_host(self, sequence: Sequence) -> bool:
        """Whether keys and values of an open sequence are in host memory."""
        return self._host_pages is not None and self._host_pages.has(sequence.slot)

    def html_of(self, sequence: Sequence) -> str:
        """What an open sequence shows in a notebook."""
        return sequence_html(self.inventory(sequence), self._ledger.checkpoints(sequence), self.host_inventory(sequence))

    def is_away(self, sequence: Sequence) -> bool:
        """Whether an open sequence is swapped out."""
        return bool(self._ledger.is_away[sequence.slot])
