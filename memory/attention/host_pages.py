"""Keeps keys and values of chosen sequences in host memory, in a separate budget, and moves them there and back.

Pages grow with a sequence, and attention reads each of them once per step. States stay on the device. A sequence whose
pages are in host memory can be used as usual, unlike a swapped-out one.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hybridmem.memory.attention.offload import HostedAttention
from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.layout import BlockLayout
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.errors import IntegrityError
from hybridmem.memory.interface import Sequence, Stretch
from hybridmem.memory.layer_memories import LayerMemories, Snapshot
from hybridmem.memory.views.usage import Inventory


class HostPages:
    """Moves pages of sequences between the device and host memory, and counts the pages in host memory.

    Args:
        store, host_store: the memory's store, and the store of its pages in host memory.
        device, host: the attention caches on the device and in host memory, under the same names.
        hosted: name -> the layer memory that joins the two caches of this name.
    """

    def __init__(
        self, store: Store, host_store: Store, device: LayerMemories, host: LayerMemories,
        hosted: dict[str, HostedAttention]
    ) -> None:  # fmt: skip
        self._store, self._host_store = store, host_store
        self._device, self._host = device, host
        self._hosted = list(hosted.values())

    @property
    def place(self) -> tuple[LayerMemories, Store]:
        """Return the caches in host memory, and the store of their blocks."""
        return self._host, self._host_store

    def has(self, slot: int) -> bool:
        """True if the slot's pages are in host memory."""
        return self._hosted[0].is_far(slot)

    def move(self, slot: int, *, to_host: bool) -> None:
        """Move a slot's pages to host memory or back to the device. Raises CapacityError with nothing changed."""
        if self.has(slot) == to_host:
            return
        if to_host:
            self._host.take_over(slot, self._host_store, self._device, self._store)
        else:
            self._device.take_over(slot, self._store, self._host, self._host_store)
        for cache in self._hosted:
            cache.moved(slot, is_far=to_host)

    @property
    def pools(self) -> Iterator[tuple[BlockPool, BlockLayout]]:
        """Return every pool in host memory with the layout of its blocks."""
        return self._host.pools

    def bytes_for(self, stretch: Stretch) -> Int64s:
        """Return (4, N) bytes in host memory, as `LayerMemory.bytes_for` does. Sequences on the device take none."""
        are_there = np.fromiter(map(self.has, stretch.slots.tolist()), np.bool_, len(stretch.slots))
        return self._host.bytes_for(stretch) * are_there

    def held_bytes(self, *slots: int) -> int:
        """Return the bytes of all blocks in host memory to which these slots refer."""
        return self._host.held_bytes(*slots)

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        """Return the slot's blocks in host memory, by pool."""
        return self._host.blocks_of(slot)

    def snapshot(self, slot: int, length: int) -> Snapshot:
        """Copy everything that the slot has in host memory."""
        return self._host.snapshot(slot, length, self._host_store)

    def inventory(self, sequences: list[Sequence], lengths: Int64s, slots: Int64s) -> Inventory:
        return Inventory.of(self._host_store.arena, sequences, lengths, slots * 0, self._host, slots)

    def check(self, slots: list[int]) -> None:
        """Raise IntegrityError unless a slot is in the same place for all caches, and no byte of host memory is lost.

        The pages themselves are checked together with the layer memories.
        """
        for slot in slots:
            if len({cache.is_far(slot) for cache in self._hosted}) > 1:
                raise IntegrityError(
                    f"slot {slot} has its pages in host memory for some layers, and on the device for others"
                )
        self._host_store.arena.check([used for pool, _ in self._host.pools for used in pool.used_ranges()])
