"""The coordinator keeps all layer memories of a model, the ledger and the store in step, as one memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import RLock
from typing import Any, Protocol
from weakref import ReferenceType, ref

import numpy as np
from torch import Tensor

from memory.blocks.arrays import Int64s
from memory.blocks.staging import in_one_copy
from memory.blocks.store import Store
from memory.errors import BUDGET_UNIT, HOST_UNIT, BatchError, CapacityError, SequenceError
from memory.interface import Dropped, Encoded, OpenStep, Packed, Plans, Sequence
from memory.layer_memories import LayerMemories, PagesOnHost, Places, SwappedOut
from memory.sequences.batch import TokenLists, pack
from memory.sequences.compactor import Compactor, Holders
from memory.sequences.interrupts import uninterrupted, uninterrupted_call
from memory.sequences.ledger import Ledger
from memory.sequences.lifetime import Lifetime
from memory.sequences.locking import locked
from memory.sequences.reach import nearest_position, out_of_reach, position_before
from memory.sequences.room import Room
from memory.specs import MemorySpec
from memory.views.sequence_view import sequence_html
from memory.views.usage import Inventory


class EnteredStep(Protocol):
    """Declares what the coordinator reads and calls of a step that is entered: a part of `memory.step.Step`."""

    sequences: list[Sequence]
    tokens: TokenLists

    @property
    def block(self) -> ReferenceType[Any]: ...
    def hold(self, opened: OpenStep, upload: Callable[[Int64s], Tensor]) -> None: ...


def _abort_abandoned_of(coordinator: Coordinator) -> Callable[[], bool]:
    """Return its `abort_abandoned` as a function that does not keep the coordinator alive."""
    owner = ref(coordinator)

    def abort_abandoned() -> bool:
        return (found := owner()) is not None and found.abort_abandoned()

    return abort_abandoned


class Coordinator(Lifetime):
    """Keeps all layer memories of one model in step, for `HybridMemory`, its steps and its sequences.

    A step is plan -> begin -> commit or abort, in all layer memories or in none. Each sequence has one length, in the
    ledger.

    Args:
        places: (layer, kind, name) -> the layer memory that serves it, and its number there.
        swapped: what holds the sequences that are swapped out.
        host_pages: keys and values that are offloaded to host memory; None: there are none.
    """

    parts = ("layers", "places", "store", "ledger", "swapped", "host_pages", "room", "open_steps")

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
        self.lock = RLock()
        self.spec = self.checked_spec = spec
        self.layers = layers
        self.places = places
        self.store = store
        self.swapped = swapped
        self.host_pages = host_pages
        self.ledger = Ledger(self)
        self.open_steps: dict[OpenStep, None] = {}
        moving: dict[str, tuple[Holders, Store]] = {BUDGET_UNIT: (layers, store)}
        if host_pages is not None:
            moving[HOST_UNIT] = (host_pages, host_pages.place[1])
        compactors = {unit: Compactor(*place, self.ledger, self.open_steps) for unit, place in moving.items()}
        abort_abandoned = _abort_abandoned_of(self)
        self.room = Room(store.arena, self.ledger, compactors, abort_abandoned, on_grid=spec.is_cut_on_grid)

    # Steps

    @locked
    def begin(self, step: EnteredStep) -> None:
        """Allocate a step's blocks and hand them to it. Raises CapacityError or SequenceError with nothing changed."""
        ledger = self.ledger
        slots = ledger.check_all_usable(step.sequences)
        packed = pack(step.tokens, slots, ledger.lengths[slots], ledger.peaks[slots])
        with uninterrupted(), in_one_copy(self.store.stages) as stage:
            plans = self.room.make(lambda: self._plan(packed))
            opened = OpenStep(packed, plans, stage, step.block)
            self.open_steps[opened] = None
            ledger.occupy(slots)
            step.hold(opened, self.store.upload)
            ledger.reserve(packed)  # last: a step that is refused leaves no larger buffers behind

    def _plan(self, packed: Packed) -> Plans:
        try:
            return self.layers.begin(packed)
        except CapacityError as error:  # It counts the layer memories that had planned; report what all of them need.
            raise self.room.lack(packed.slots, packed.counts, None, error) from None

    @locked
    def commit(self, opened: OpenStep, kept: Int64s) -> None:
        """Move the sequences of a step on by the first kept[i] (S,) of their new tokens."""
        with uninterrupted():
            try:
                self.layers.commit(opened.plans, kept)
                self.ledger.append(opened.packed, kept)
            finally:
                self._settle(opened)

    @locked
    def abort(self, opened: OpenStep) -> None:
        """Leave the sequences of a step as they were."""
        if self.why_ended:  # in a forked child: the step is the parent's
            return
        with uninterrupted():
            try:
                self.layers.commit(opened.plans, opened.packed.nothing)
            finally:
                self._settle(opened)

    def want_stages(self) -> None:
        """Copy the plans of later steps to places that stay, so that steps can be recorded."""
        self.store.stages.are_wanted = True

    def _settle(self, opened: OpenStep) -> None:
        """Forget an open step whose blocks are committed or given back. The caller holds interrupts off."""
        del self.open_steps[opened]
        opened.is_settled = True
        self.ledger.vacate(opened.packed.slots)
        if opened.stage is not None:
            opened.stage.close()

    @locked
    def abort_abandoned(self) -> bool:
        """Abort steps whose `with` block was left by an interrupt before their `__exit__`. True if there was any."""
        abandoned = [opened for opened in self.open_steps if opened.block() is None]
        for opened in abandoned:
            self.abort(opened)
        return bool(abandoned)

    # Handles of sequences

    def length_of(self, sequence: Sequence) -> int:
        return int(self.ledger.lengths[sequence.slot])

    def tokens_of(self, sequence: Sequence) -> Int64s:
        return self.ledger.tokens(sequence.slot)

    def horizon_of(self, sequence: Sequence) -> int:
        swapped = self.ledger.horizon_away(sequence.slot)
        return self.layers.horizon(sequence.slot) if swapped is None else swapped

    def is_whole(self, sequence: Sequence) -> bool:
        return not self.ledger.drops(sequence.slot)

    def is_away(self, sequence: Sequence) -> bool:
        return bool(self.ledger.is_away[sequence.slot])

    def is_on_host(self, sequence: Sequence) -> bool:
        return self.host_pages is not None and self.host_pages.has(sequence.slot)

    def html_of(self, sequence: Sequence) -> str:
        return sequence_html(self.inventory(sequence), self.ledger.checkpoints(sequence), self.host_inventory(sequence))

    # Opening, copying and closing

    def end(self, why: str, *, keeps: bool = False) -> None:
        """See `Lifetime.end`. In a forked child, the thread that held the lock is not there to release it."""
        super().end(why, keeps=keeps)
        self.lock = RLock()

    @locked
    def close(self) -> None:
        """See `HybridMemory.close`."""
        if self.why_ended:
            return
        handles = self.ledger.handles.values()
        for handle in handles:
            if self.ledger.is_busy[handle.slot]:
                raise SequenceError(f"{handle!r} is in an open step; leave the step before its memory is closed")
        with uninterrupted():
            for handle in handles:
                handle.closed = True
            self.store.give_back()
            self.end("this memory is closed; make another one")

    @locked
    def open(self, encoder: Encoded | None, held: uninterrupted_call) -> Sequence:
        """See `HybridMemory.open`."""
        cross_attention: Any = self.layers.get("cross-attention")
        if encoder is not None and cross_attention is None:
            raise BatchError(f"{self.spec.model} has no encoder; open its sequences without encoder=")
        if encoder is None and cross_attention is not None:
            raise BatchError(f"{self.spec.model} has an encoder; give its output, open(encoder=model.encode(...)[i])")
        sequence = self.ledger.open()
        if cross_attention is None:
            return sequence
        try:
            self.room.make(lambda: cross_attention.write(sequence.slot, encoder))
            held.deliver()
        except BaseException:
            self.withdraw(sequence)
            raise
        return sequence

    @locked
    def close_one(self, sequence: Sequence) -> None:
        """See `HybridMemory.close`."""
        self.ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        with uninterrupted():
            self.layers.release(sequence.slot)
            self.ledger.close(sequence)
            self.swapped.drop(sequence.slot)  # last: a file system may refuse

    @locked
    def copy(self, sequence: Sequence, held: uninterrupted_call, *, is_checkpoint: bool) -> Sequence:
        """Make a new sequence or checkpoint at the same position, on the same blocks. Raises SequenceError."""
        self.ledger.check_usable(sequence, to_advance=False)
        copy = self.ledger.open(lineage=sequence.lineage, is_checkpoint=is_checkpoint)
        try:
            self.share([sequence], [copy])
            held.deliver()
        except BaseException:
            self.withdraw(copy)
            raise
        return copy

    def withdraw(self, sequence: Sequence) -> None:
        """Close a new sequence again, because making it failed or a Ctrl-C came before the caller had it."""
        self.layers.release(sequence.slot)
        self.ledger.close(sequence)

    def share(self, sources: list[Sequence], targets: list[Sequence]) -> None:
        """Make each target what its source was, all at once. The caller holds interrupts off."""
        self.layers.share(np.array([s.slot for s in sources]), np.array([s.slot for s in targets]))
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
            with uninterrupted():
                self.share(list(moves.values()), list(moves))

    # Going back

    @locked
    def rollback(self, sequence: Sequence, to: int | Sequence | None, n_tokens: int | None) -> None:
        """See `HybridMemory.rollback`."""
        ledger, layers = self.ledger, self.layers
        ledger.check_usable(sequence)
        if n_tokens is not None:
            to = position_before(sequence, self.length_of(sequence), n_tokens, to, self.horizon_of(sequence))
        if isinstance(to, Sequence):
            ledger.check_mark(sequence, to)
            with uninterrupted():
                self.share([to], [sequence])
            return
        reached, source = self.nearest(sequence, to)
        assert to is not None, "`nearest` has refused this"
        if reached != to:
            raise out_of_reach(sequence, to, reached, self.length_of(sequence), self.horizon_of(sequence))
        with uninterrupted():
            if source is None:
                layers.truncate(sequence.slot, 0)
                ledger.reset(sequence.slot)
                return
            if source is not sequence:
                self.share([source], [sequence])
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
        """Find the nearest reachable position <= to, and the handle whose blocks hold it (None at position 0)."""
        return nearest_position(self.ledger, sequence, to, self.horizon_of(sequence))

    @locked
    def drop(self, sequence: Sequence, start: int, end: int, *, approximate: bool) -> None:
        """See `HybridMemory.drop`."""
        ledger = self.ledger
        ledger.check_usable(sequence)
        slot = sequence.slot
        length, peak = int(ledger.lengths[slot]), int(ledger.peaks[slot])
        dropped = Dropped.of(slot, start, end, length, peak, approximate=approximate)
        if dropped.n_tokens and dropped.end == length and self.can_rollback(sequence, dropped.start):
            self.rollback(sequence, dropped.start, None)
        elif dropped.n_tokens:
            with uninterrupted():
                self.room.make(lambda: self.layers.drop(dropped))
                ledger.drop(dropped, dropped.start + (not self.layers.has_states))

    # Looking inside

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
        self.layers.check(lengths, peaks, self.store)
        if self.host_pages is not None:
            self.host_pages.check(slots)
