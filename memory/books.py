"""What a memory counts: the room in its budget, and what each sequence holds of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from memory.arena import Store
from memory.blocks.arrays import Int64s
from memory.errors import HOST_UNIT, CapacityError
from memory.host_pages import HostPages
from memory.inspection import Inventory, sequence_html
from memory.interface import OpenStep, Packed, Plans, Sequence, Stretch
from memory.interrupts import uninterrupted
from memory.ledger import Ledger
from memory.lifetime import Lifetime
from memory.room import Need, bytes_for, need_of
from memory.together import AllKinds

_T = TypeVar("_T")


class Books(Lifetime):
    """The ledger of sequences, all kinds of memory, and the arena that they share.

    Args:
        has_states: whether any layer is recurrent.
        host_pages: of the attention among `kinds`, in host memory.
    """

    def __init__(self, kinds: AllKinds, store: Store, *, has_states: bool, host_pages: HostPages | None = None) -> None:
        super().__init__()
        self._kinds = kinds
        self._store = store
        self._host_pages = host_pages
        self._has_states = has_states
        self._ledger = Ledger(self)
        self._reclaimers: list[Callable[[int], bool]] = []
        self._open_steps: dict[OpenStep, None] = {}

    # Steps

    def abort_step(self, opened: OpenStep) -> None:
        if self._why_ended:  # in a forked child: the step is the parent's
            return
        with uninterrupted():
            try:
                self._kinds.abort(opened.plans)
            finally:
                self._settle(opened)

    def _settle(self, opened: OpenStep) -> None:
        """What was set aside for a step has been committed or given back. Let nothing interrupt it."""
        del self._open_steps[opened]
        opened.is_settled = True
        self._ledger.vacate(opened.packed.slots)
        if opened.stage is not None:
            opened.stage.close()

    def abort_abandoned(self) -> bool:
        """Abort steps whose block has been left without their `__exit__`: an interrupt came before it; whether there was any."""
        abandoned = [opened for opened in self._open_steps if opened.block() is None]
        for opened in abandoned:
            self.abort_step(opened)
        return bool(abandoned)

    def can_record(self, plans: Plans) -> bool:
        """Whether a step with other plans whose uploads have the same shapes would ask the same of the device."""
        return all(self._kinds[name].can_record(plan) for name, plan in plans.items())

    def horizons_after(self, packed: Packed) -> Int64s:
        """(S,) the horizon of each request's sequence once all its tokens are kept."""
        return self._kinds.horizons_after(packed)

    # Room

    @property
    def budget(self) -> int:
        """Bytes that the memory may use at most: what it was made with, in whole multiples of 64."""
        return self._store.arena.capacity_bytes

    @property
    def budget_bytes(self) -> int:
        """The same as `budget`."""
        return self.budget

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that nothing holds."""
        return self._store.arena.free_bytes

    def add_reclaimer(self, reclaim: Callable[[int], bool]) -> None:
        """Let `reclaim(missing_bytes)` free what is only optional, such as cached prefixes, before any call is refused for want of room.

        It says whether it has freed anything; it may close sequences and checkpoints that are in no step, and nothing else. The memory
        holds it until `remove_reclaimer`; one that holds the memory as well keeps both alive until the garbage collector finds them.
        """
        self._reclaimers.append(reclaim)

    def remove_reclaimer(self, reclaim: Callable[[int], bool]) -> None:
        """Ask it no longer. Nothing happens if `add_reclaimer` was never given it."""
        if reclaim in self._reclaimers:
            self._reclaimers.remove(reclaim)

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
                if self.abort_abandoned():
                    continue
                # In host memory only checkpoints that are there make room; others need not go in vain.
                can_help = (
                    error.needed <= self.budget_bytes
                    if error.unit != HOST_UNIT
                    else any(s.is_checkpoint and s.is_on_host for s in self._ledger.handles.values())
                )
                if not can_help or not any(reclaim(max(1, error.needed - error.free)) for reclaim in [*self._reclaimers]):
                    raise

    # Looking inside

    @property
    def sequences(self) -> list[Sequence]:
        """All open sequences and checkpoints (`.is_checkpoint`), in the order in which they were opened."""
        return list(self._ledger.handles.values())

    def length_of(self, sequence: Sequence) -> int:
        """What `sequence.length` shows; so do the next two."""
        return int(self._ledger.lengths[sequence.slot])

    def tokens_of(self, sequence: Sequence) -> Int64s:
        return self._ledger.tokens(sequence.slot)

    def horizon_of(self, sequence: Sequence) -> int:
        return self._horizon(sequence)

    def _horizon(self, sequence: Sequence) -> int:
        away = self._ledger.horizon_away(sequence.slot)
        return self._kinds.horizon(sequence.slot) if away is None else away

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
