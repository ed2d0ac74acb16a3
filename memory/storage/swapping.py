"""Moves sequences out of the budget and back: into host memory or files, and their pages to host memory.

It never chooses a sequence. `chat.engine.scheduling` chooses which running sequence is swapped out (preempted) when
room is short, and `memory.prefix.eviction_rank` which checkpoint of a prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hybridmem.memory.blocks.arrays import Bools, Int64s
from hybridmem.memory.coordinator import Coordinator
from hybridmem.memory.errors import CapacityError, SequenceError, SpecError
from hybridmem.memory.interface import Sequence
from hybridmem.memory.layer_memories import Leaving, Snapshot
from hybridmem.memory.sequences.locking import locked


class Swapping:
    """Moves the blocks of slots between a memory's arena and the tiers outside of it."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._memory = coordinator

    def snapshot(self, slot: int, wanted: dict[str, Bools] | None = None) -> Snapshot:
        """Copy all blocks of a slot, or only the wanted ones, from the arena or from outside."""
        if self._memory.ledger.is_away[slot]:
            return self._memory.swapped.get(slot, wanted)
        length = int(self._memory.ledger.lengths[slot])
        if self._memory.host_pages is None or not self._memory.host_pages.has(slot):
            return self._memory.layers.snapshot(slot, length, self._memory.store, wanted)
        snapshot = self._memory.layers.snapshot(
            slot, length, self._memory.store
        )  # Such a slot shares no blocks with swapped-out slots.
        snapshot.blocks.update(self._memory.host_pages.snapshot(slot, length).blocks)
        return snapshot

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return self._memory.lock

    def _leaving(self, sequence: Sequence) -> Leaving:
        slot, length = sequence.slot, int(self._memory.ledger.lengths[sequence.slot])
        ids, live = self._memory.layers.blocks_of(slot), self._memory.layers.live_rows(slot, length)
        if self._memory.host_pages is not None and self._memory.host_pages.has(slot):
            for pool, far in self._memory.host_pages.blocks_of(slot).items():
                ids[pool], live[pool] = np.full(len(far), -1), np.zeros((len(far), 1), np.bool_)
        return Leaving(slot, ids, live)

    @locked
    def block_keys(self, checkpoint: Sequence) -> dict[str, Int64s]:
        """Return a key for each block of a checkpoint. Only blocks with the same bytes have the same key.

        Keys of several checkpoints can be compared as long as none of these checkpoints is swapped in or out.
        """
        if self._memory.ledger.is_away[checkpoint.slot]:
            return self._memory.swapped.keys_of(checkpoint.slot)
        return self._memory.swapped.inside_keys(self._leaving(checkpoint))

    @locked
    def swap_out(self, sequence: Sequence, relatives: Iterable[Sequence]) -> None:
        """Move a sequence out of the budget. See `HybridMemory.swap_out`."""
        memory, relatives = self._memory, list(relatives)
        memory.ledger.check_usable(sequence, to_advance=False)
        while True:
            near = self._guards(sequence, relatives)
            try:
                with memory.journal.change():
                    self._swap_out(sequence, near)
                return
            except CapacityError as error:
                # All reclaimers are called, not only the first that frees some bytes. They may close or swap in
                # relatives.
                if not any([reclaim(error.needed) for reclaim in memory.swapped.reclaimers]):  # noqa: C419
                    raise

    def _swap_out(self, sequence: Sequence, near: list[Sequence]) -> None:
        memory, slot = self._memory, sequence.slot
        leaving, sizes = self._leaving(sequence), {pool.name: pool.block_bytes for pool, _ in memory.layers.pools}
        relatives = [self._leaving(other) for other in near]
        memory.swapped.put(leaving, sizes, lambda wanted: self.snapshot(slot, wanted), relatives)
        n_bytes = sum(len(ids) * sizes[pool] for pool, ids in leaving.ids.items())
        memory.ledger.send_away(slot, memory.layers.horizon(slot), n_bytes)
        memory.layers.release(slot)

    @locked
    def swap_in(self, sequence: Sequence) -> None:
        """Move a sequence back into the budget. See `HybridMemory.swap_in`."""
        self._memory.ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        slot = sequence.slot
        if not self._memory.ledger.is_away[slot]:
            raise SequenceError(f"{sequence!r} is not swapped out; it can be used as it is")
        memory, found = self._memory, dict[str, Snapshot]()

        def attempt() -> None:
            # Making room may close the checkpoints that hold the shared blocks. Then these blocks are read from outside
            # instead.
            shared = memory.swapped.shared_with(slot)
            wanted = {pool: ids < 0 for pool, ids in shared.items()}
            key = str([(pool, of.tobytes()) for pool, of in wanted.items()])
            if key not in found:
                found.clear()
                found[key] = memory.swapped.get(slot, wanted)
            with memory.journal.change():
                memory.layers.restore(slot, found[key], memory.store, shared)
                memory.ledger.bring_back(slot)
                memory.swapped.returned(slot, self._leaving(sequence), is_checkpoint=sequence.is_checkpoint)

        memory.room.make(attempt)

    def _guards(self, sequence: Sequence, relatives: Iterable[Sequence]) -> list[Sequence]:
        """Return those relatives whose blocks never change: checkpoints in the arena."""
        for other in (others := [other for other in relatives if other is not sequence]):
            self._memory.ledger.check_open(other)
        return [
            other for other in others
            if other.is_checkpoint and not (other.is_swapped or other.is_on_host)
        ]  # fmt: skip

    @locked
    def move(self, sequence: Sequence, *, to_host: bool) -> None:
        """Move a sequence's pages to host memory or back. See `HybridMemory.to_host` and `to_device`."""
        self._memory.ledger.check_usable(sequence, to_advance=False)
        if (pages := self._memory.host_pages) is None:
            raise SpecError('this memory has no place for pages in host memory; make it with host_pages="8GiB", say')

        def attempt() -> None:
            with self._memory.journal.change():
                pages.move(sequence.slot, to_host=to_host)
                self._memory.swapped.forget_twins(sequence.slot)

        self._memory.room.make(attempt)
