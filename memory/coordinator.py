"""The coordinator keeps the layer memories of a model, the ledger and the store consistent, so that they act as one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar
from weakref import ReferenceType, ref

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.journal import Journal
from hybridmem.memory.blocks.staging import in_one_copy
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.errors import BUDGET_UNIT, HOST_UNIT, BatchError, CapacityError, SequenceError
from hybridmem.memory.interface import Dropped, Encoded, OpenRun, OpenStep, Packed, Sequence
from hybridmem.memory.layer_memories import EnteredStep, LayerMemories, PagesOnHost, Places, SettlesTrees, SwappedOut
from hybridmem.memory.sequences.batch import pack
from hybridmem.memory.sequences.compactor import Compactor, Holders
from hybridmem.memory.sequences.ledger import Ledger
from hybridmem.memory.sequences.lifetime import Lifetime
from hybridmem.memory.sequences.locking import MemoryLock, locked
from hybridmem.memory.sequences.reach import nearest_position, out_of_reach, position_before
from hybridmem.memory.sequences.room import Room
from hybridmem.memory.sequences.soft_tokens import refuse_to_drop
from hybridmem.memory.specs import MemorySpec
from hybridmem.memory.views.sequence_view import sequence_html
from hybridmem.memory.views.usage import Inventory

_T = TypeVar("_T")


class Coordinator(Lifetime):
    """Keeps all layer memories of one model in step, for `HybridMemory`, its steps and its sequences.

    A step is plan -> begin -> commit or abort, in all layer memories or in none. Each sequence has one length, which is
    in the ledger. Books change only inside a change of the journal: an exception at any moment leaves all of the change
    or nothing.

    Args:
        places: (layer, kind, name) -> the layer memory that serves it, and the number of that layer there.
        swapped: holds the swapped-out sequences.
        host_pages: holds the offloaded keys and values in host memory. None: nothing can be offloaded.
    Attributes:
        trees: see `memory.step.StepOwner`. It refers to layer memories, so it ends with them.
    """

    parts = ("layers", "places", "store", "ledger", "swapped", "host_pages", "room", "open_steps", "journal", "trees")

    def __init__(
        self,
        spec: MemorySpec,
        layers: LayerMemories,
        places: Places,
        store: Store,
        swapped: SwappedOut,
        host_pages: PagesOnHost | None,
    ) -> None:
        super().__init__()
        self.journal = store.journal
        self.lock = MemoryLock()
        self.lock.journal = store.journal
        self.spec = self.checked_spec = spec
        self.layers, self.places, self.store = layers, places, store
        self.trees: Any = None
        self.swapped, self.host_pages = swapped, host_pages
        self.ledger = Ledger(self, store.journal, sees=spec.soft_tokens is not None)
        self.open_steps: dict[OpenStep, None] = {}
        # These references are weak, because the coordinator refers to both objects.
        store.journal.rebuild = _weakly(self, Coordinator._rebuild)
        store.journal.abandon = _weakly(self, Coordinator._abandon_run)
        abort_abandoned = _weakly(self, Coordinator.abort_abandoned)
        moving: dict[str, tuple[Holders, Store]] = {BUDGET_UNIT: (layers, store)}
        if host_pages is not None:
            moving[HOST_UNIT] = (host_pages, host_pages.place[1])
        compactors = {unit: Compactor(*place, self.ledger, self.open_steps) for unit, place in moving.items()}
        self.room = Room(store.arena, self.ledger, compactors, abort_abandoned, on_grid=spec.is_cut_on_grid)

    def mend(self) -> None:
        """Finish or undo what an exception has left half done. It is called before anything of this memory is read."""
        if self.why_ended is None and (self.journal.is_open or self.journal.watched) and self.journal.is_left:
            with self.lock:
                self.journal.mend()

    def _rebuild(self) -> None:
        """Compute all other books from the records of the sequences and from the open steps."""
        references = self.layers.references(opened.plans for opened in self.open_steps)
        self.store.rebuild(references)
        if self.host_pages is not None:
            self.host_pages.place[1].rebuild(references)
        self.ledger.rebuild((opened.packed.slots for opened in self.open_steps), self.layers.horizon)
        self.swapped.rebuild()

    # The methods below plan, begin and end steps.

    @locked
    def begin(self, step: EnteredStep) -> None:
        """Allocate blocks, and pass them to the step. Raises CapacityError or SequenceError with nothing changed."""
        ledger = self.ledger
        slots = ledger.check_all_usable(step.sequences)
        packed = pack(step.tokens, slots, ledger.lengths[slots], ledger.peaks[slots])
        verified = None if step.outputs == "last" else replace(packed, is_verified=True)

        def attempt() -> None:
            try:
                if verified is not None:
                    with suppress(CapacityError):  # It may take more blocks, which save time only.
                        self._begin(step, verified)
                        return
                self._begin(step, packed)
            except CapacityError as error:
                # The error counts only the layer memories that had planned. Report what all of them need.
                raise self.room.lack(packed.slots, packed.counts, None, error) from None

        self.room.make(attempt)

    def _begin(self, step: EnteredStep, packed: Packed) -> None:
        with self.journal.change(), in_one_copy(self.store.stages) as stage:
            opened = OpenStep(*step.plan(self.layers, packed), stage, step.scope)
            self.journal.before(self._forget, opened)
            self.open_steps[opened] = None
            self.ledger.occupy(packed.slots)
            step.hold(opened, self.store.upload)
            # This comes last, so that a refused step does not enlarge buffers.
            self.ledger.reserve(packed)

    def _forget(self, opened: OpenStep) -> None:
        """Remove a step that was just opened."""
        self.open_steps.pop(opened, None)
        opened.is_settled = True

    @locked
    def settle(self, opened: OpenStep, accepted: Packed, trees: SettlesTrees) -> None:
        """Reduce an open step to the tokens that were accepted of its trees."""
        with self.journal.change():  # Blocks are free only when a change is complete.
            trees.give_back(opened.plans)
        with self.journal.change():
            trees.settle(opened.plans, accepted)
            opened.packed = accepted

    @locked
    def commit(self, opened: OpenStep, kept: Int64s) -> None:
        """Advance the sequences of a step by the first kept[i] of each request's new tokens; `kept` is (S,)."""
        with self.journal.change():
            self.layers.commit(opened.plans, kept)
            self.ledger.append(opened.packed, kept)
            self._settle(opened)

    @locked
    def abort(self, opened: OpenStep) -> None:
        """End a step, and leave its sequences as they were before it."""
        self._abort(opened)

    def _abort(self, opened: OpenStep) -> None:
        if self.why_ended or opened.is_settled:  # In a forked child, the step belongs to the parent.
            return
        with self.journal.change():
            self.layers.commit(opened.plans, opened.packed.nothing)
            self._settle(opened)

    def want_stages(self) -> None:
        """From now on, copy the plans of steps to fixed addresses, so that steps can be recorded."""
        self.store.stages.are_wanted = True

    def _settle(self, opened: OpenStep) -> None:
        """Forget an open step whose blocks have been committed or freed."""
        self.journal.before(self._reopen, opened)
        del self.open_steps[opened]
        opened.is_settled = True
        self.ledger.vacate(opened.packed.slots)
        if opened.stage is not None:
            self.journal.after(opened.stage.close)

    def _reopen(self, opened: OpenStep) -> None:
        self.open_steps[opened] = None
        opened.is_settled = False

    @locked
    def abort_abandoned(self) -> bool:
        """Abort steps that an exception left open before `__exit__` ran. Return True if there was any."""
        return self._abort_abandoned()

    def _abort_abandoned(self) -> bool:
        abandoned = [opened for opened in self.open_steps if opened.scope() is None]
        for opened in abandoned:
            self._abort(opened)
        return bool(abandoned)

    # The methods below make several steps count together.

    @locked
    def begin_run(self, sequences: list[Sequence], block: ReferenceType[Any] | None) -> OpenRun:
        """Make a checkpoint of each sequence.

        A sequence returns to its checkpoint unless the run is completed. Raises SequenceError.
        """
        self.ledger.check_all_usable(sequences)
        with self.journal.change():
            marks = [self.ledger.open(lineage=s.lineage, is_checkpoint=True) for s in sequences]
            self._share(sequences, marks)
            run = OpenRun(dict(zip(sequences, marks, strict=True)), block)
            self.journal.before(self.journal.watched.pop, run, None)
            self.journal.watched[run] = None
        return run

    @locked
    def end_run(self, run: OpenRun, *, is_complete: bool) -> None:
        """Close the checkpoints of a run. If the run is not complete, return its sequences to them first."""
        if run in self.journal.watched:
            self._end_run(run, is_complete=is_complete)

    def _abandon_run(self, run: OpenRun) -> None:
        self._end_run(run, is_complete=False)

    def _end_run(self, run: OpenRun, *, is_complete: bool) -> None:
        self._abort_abandoned()
        with self.journal.change():
            self.journal.before(self.journal.watched.__setitem__, run, None)
            del self.journal.watched[run]
            # The model may have closed some of the sequences, or swapped them out.
            back = {} if is_complete else {s: mark for s, mark in run.marks.items() if self.ledger.can_change(s)}
            if back:
                self._share(list(back.values()), list(back))
            for mark in run.marks.values():
                if not mark.closed:
                    self._close(mark)

    # The methods below answer what handles of sequences ask.

    def length_of(self, sequence: Sequence) -> int:
        self.mend()
        return int(self.ledger.lengths[sequence.slot])

    def tokens_of(self, sequence: Sequence) -> Int64s:
        self.mend()
        return self.ledger.tokens(sequence.slot)

    def horizon_of(self, sequence: Sequence) -> int:
        self.mend()
        swapped = self.ledger.horizon_away(sequence.slot)
        return self.layers.horizon(sequence.slot) if swapped is None else swapped

    def is_whole(self, sequence: Sequence) -> bool:
        self.mend()
        return not self.ledger.drops(sequence.slot)

    def is_away(self, sequence: Sequence) -> bool:
        self.mend()
        return bool(self.ledger.is_away[sequence.slot])

    def is_on_host(self, sequence: Sequence) -> bool:
        self.mend()
        return self.host_pages is not None and self.host_pages.has(sequence.slot)

    def html_of(self, sequence: Sequence) -> str:
        return sequence_html(self.inventory(sequence), self.ledger.checkpoints(sequence), self.host_inventory(sequence))

    # The methods below open, copy and close sequences.

    def end(self, why: str, *, keeps: bool = False) -> None:
        """See `Lifetime.end`. In a forked child, the thread that held the lock does not exist and cannot release it."""
        super().end(why, keeps=keeps)
        self.lock = MemoryLock()
        self.lock.journal = Journal()

    @locked
    def close(self) -> None:
        """See `HybridMemory.close`."""
        if self.why_ended:
            return
        handles = self.ledger.handles.values()
        for handle in handles:
            if self.ledger.is_busy[handle.slot]:
                raise SequenceError(f"{handle!r} is in an open step; leave the step before its memory is closed")
        for handle in handles:
            handle.closed = True
        self.store.give_back()
        # This comes last: if an exception stops `close` earlier, a second call repeats all of it.
        self.end("this memory is closed; make another one")

    @locked
    def open(self, encoder: Encoded | None, made: list[Sequence]) -> Sequence:
        """See `HybridMemory.open`."""
        if "cross-attention" in self.layers:
            if encoder is None:
                name = self.spec.model
                raise BatchError(f"{name} has an encoder; give its output, open(encoder=model.encode(...)[i])")
            return self.room.make(lambda: self._open_encoded(encoder, made))
        if encoder is not None:
            raise BatchError(f"{self.spec.model} has no encoder; open its sequences without encoder=")
        with self.journal.change():
            sequence = self.ledger.open()
            made.append(sequence)
        return sequence

    def _open_encoded(self, encoder: Encoded | None, made: list[Sequence]) -> Sequence:
        cross_attention: Any = self.layers["cross-attention"]
        with self.journal.change():
            sequence = self.ledger.open()
            cross_attention.write(sequence.slot, encoder)
            made.append(sequence)
        return sequence

    @locked
    def close_one(self, sequence: Sequence) -> None:
        """See `HybridMemory.close`."""
        self.ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        with self.journal.change():
            self._close(sequence)

    def _close(self, sequence: Sequence) -> None:
        self.layers.release(sequence.slot)
        self.ledger.close(sequence)
        self.swapped.drop(sequence.slot)

    @locked
    def copy(self, sequence: Sequence, is_checkpoint: bool, holds_tail: bool, made: list[Sequence]) -> Sequence:
        """Make a new sequence or checkpoint at the same position, on the same blocks. Raises SequenceError."""
        self.ledger.check_usable(sequence, to_advance=False)
        with self.journal.change():
            copy = self.ledger.open(lineage=sequence.lineage, is_checkpoint=is_checkpoint)
            self._share([sequence], [copy], hold_tails=holds_tail)
            made.append(copy)
        return copy

    @locked
    def slim_checkpoint(self, sequence: Sequence, made: list[Sequence]) -> Sequence:
        """Make a checkpoint without a tail. Raises SequenceError, or CapacityError."""
        return self.room.make(lambda: self.copy(sequence, True, False, made))

    def handed_over(self, make: Callable[..., _T], *arguments: Any) -> _T:
        """Return what `make(*arguments, made)` returns.

        An exception may come when the new sequences are open, but `make` has not returned. Then they are closed,
        because nobody has their handles.

        Args:
            make: a function that adds each new sequence to the list `made` before it opens it.
        """
        made = list[Sequence]()
        try:
            return make(*arguments, made)
        except BaseException:
            if made:
                self._take_back(made)
            raise

    @locked
    def _take_back(self, made: list[Sequence]) -> None:
        with self.journal.change():
            for sequence in made:
                if not sequence.closed:
                    self._close(sequence)

    def _share(self, sources: list[Sequence], targets: list[Sequence], *, hold_tails: bool = True) -> None:
        """Make each target a copy of its source, all at once. The caller has begun the change of the journal."""
        self.layers.share(np.array([s.slot for s in sources]), np.array([s.slot for s in targets]))
        if not hold_tails:
            for source, target in zip(sources, targets, strict=True):
                self.layers.slim(target.slot, int(self.ledger.lengths[source.slot]))
        self.ledger.copy(sources, targets, self.layers.horizon)

    @locked
    def reorder(self, moves: Mapping[Sequence, Sequence]) -> None:
        """See `HybridMemory.reorder`."""
        if not isinstance(moves, Mapping):
            raise BatchError(f"{moves!r} is no reordering; give {{target: source}}")
        for target, source in moves.items():
            self.ledger.check_usable(target)
            self.ledger.check_usable(source, to_advance=False)
        if moves:
            with self.journal.change():
                self._share(list(moves.values()), list(moves))

    # The methods below go back.

    @locked
    def rollback(self, sequence: Sequence, to: int | Sequence | None, n_tokens: int | None) -> None:
        """See `HybridMemory.rollback`."""
        ledger, layers = self.ledger, self.layers
        ledger.check_usable(sequence)
        horizon = self.horizon_of(sequence)
        if n_tokens is not None:
            to = position_before(sequence, self.length_of(sequence), n_tokens, to, horizon)
        if isinstance(to, Sequence):
            ledger.check_mark(sequence, to)
            with self.journal.change():
                self._share([to], [sequence])
            return
        reached, source = nearest_position(ledger, sequence, to, horizon)
        assert to is not None, "`nearest_position` has refused this"
        if reached != to:
            raise out_of_reach(sequence, to, reached, self.length_of(sequence), horizon)
        with self.journal.change():
            if source is None:
                layers.truncate(sequence.slot, 0)
                ledger.reset(sequence.slot)
                return
            if source is not sequence:
                self._share([source], [sequence])
            layers.truncate(sequence.slot, reached)
            ledger.truncate(sequence.slot, reached)

    @locked
    def can_rollback(self, sequence: Sequence, to: int | Sequence) -> bool:
        """See `HybridMemory.can_rollback`."""
        self.ledger.check_usable(sequence)
        if not isinstance(to, Sequence):
            return self.nearest(sequence, to)[0] == to
        try:
            self.ledger.check_mark(sequence, to)
        except SequenceError:
            return False
        return True

    @locked
    def resume_point(self, sequence: Sequence, to: int) -> int:
        """See `HybridMemory.resume_point`."""
        self.ledger.check_usable(sequence)
        return self.nearest(sequence, to)[0]

    def nearest(self, sequence: Sequence, to: object) -> tuple[int, Sequence | None]:
        """Find the nearest reachable position <= `to`, and the sequence that holds its blocks (None at position 0)."""
        return nearest_position(self.ledger, sequence, to, self.horizon_of(sequence))

    @locked
    def drop(self, sequence: Sequence, start: int, end: int, *, approximate: bool) -> None:
        """See `HybridMemory.drop`."""
        ledger = self.ledger
        ledger.check_usable(sequence)
        slot = sequence.slot
        length = int(ledger.lengths[slot])
        dropped = Dropped.of(slot, start, end, length, int(ledger.peaks[slot]), approximate=approximate)
        if dropped.n_tokens and dropped.end == length and self.can_rollback(sequence, dropped.start):
            self.rollback(sequence, dropped.start, None)
        elif dropped.n_tokens:
            refuse_to_drop(ledger.tokens(slot), dropped, is_reproducible=self.spec.reproducible)

            def attempt() -> None:
                with self.journal.change():
                    self.layers.drop(dropped)
                    ledger.drop(dropped, dropped.start + (not self.layers.has_states))

            self.room.make(attempt)

    # The methods below look inside.

    @locked
    def inventory(self, *sequences: Sequence) -> Inventory:
        """See `Counters.inventory`."""
        chosen = list(sequences or self.ledger.handles.values())
        slots = np.array([s.slot for s in chosen], np.int64)
        lengths, away_bytes = self.ledger.lengths[slots], self.ledger.bytes_away(slots)
        return Inventory.of(self.store.arena, chosen, lengths, away_bytes, self.layers, slots)

    @locked
    def host_inventory(self, *sequences: Sequence) -> Inventory | None:
        """See `Counters.host_inventory`."""
        if self.host_pages is None:
            return None
        chosen = [s for s in sequences or self.ledger.handles.values() if s.is_on_host]
        slots = np.array([s.slot for s in chosen], np.int64)
        inventory: Inventory = self.host_pages.inventory(chosen, self.ledger.lengths[slots], slots)
        return inventory

    def check_slot(self, slot: int) -> None:
        """Compare what the ledger and the layer memories hold of one slot. Raises IntegrityError."""
        self.ledger.check_slot(slot)
        self.layers.check_slot(slot, int(self.ledger.lengths[slot]), int(self.ledger.peaks[slot]))

    @locked
    def check(self) -> None:
        """See `HybridMemory.check`."""
        self.abort_abandoned()
        self.ledger.check()
        slots = [slot for slot in self.ledger.handles if not self.ledger.is_away[slot]]
        lengths = {slot: int(self.ledger.lengths[slot]) for slot in slots}
        peaks = {slot: int(self.ledger.peaks[slot]) for slot in slots}
        self.layers.check(lengths, peaks, self.store, (opened.plans for opened in self.open_steps))
        if self.host_pages is not None:
            self.host_pages.check(slots)


def _weakly(owner: Coordinator, method: Callable[..., _T]) -> Callable[..., _T]:
    """Return a method as a function that does not keep its object alive. Without the object it does nothing."""
    found = ref(owner)

    def call(*arguments: Any) -> Any:
        return None if (alive := found()) is None else method(alive, *arguments)

    return call
