"""Keeps keys and values of chosen sequences in host memory, in a budget of their own, and moves them there and back.

Pages are what grows with a sequence, and what attention reads once a step; states stay on the device. A sequence whose
pages are in host memory can be used as ever, unlike one that is swapped out.
"""

from __future__ import annotations

from memory.attention.offload import HostedAttention
from memory.blocks.arrays import Int64s
from memory.blocks.store import Store
from memory.errors import IntegrityError
from memory.interface import Sequence
from memory.layer_memories import LayerMemories, Snapshot
from memory.views.usage import Inventory


class HostPages:
    """Holds the half of a memory's attention that is in host memory.

    Args:
        store, host_store: the memory's own, and that of its pages in host memory.
        near, far: name -> kind of attention memory in the one and in the other.
        hosted: both as one, as the memory has them.
    """

    def __init__(
        self, store: Store, host_store: Store, near: LayerMemories, far: LayerMemories,
        hosted: dict[str, HostedAttention]
    ) -> None:  # fmt: skip
        self._store, self._host_store = store, host_store
        self._near, self._far = near, far
        self._hosted = list(hosted.values())

    def has(self, slot: int) -> bool:
        return self._hosted[0].is_far(slot)

    def move(self, slot: int, *, to_host: bool) -> None:
        """Move a slot's pages into host memory or back, unless they are there.
        Raises CapacityError with nothing changed.
        """
        if self.has(slot) == to_host:
            return
        if to_host:
            self._far.take_over(slot, self._host_store, self._near, self._store)
        else:
            self._near.take_over(slot, self._store, self._far, self._host_store)
        for kind in self._hosted:
            kind.moved(slot, is_far=to_host)

    def snapshot(self, slot: int, length: int) -> Snapshot:
        """Copy what the slot has in host memory."""
        return self._far.snapshot(slot, length, self._host_store)

    def inventory(self, sequences: list[Sequence], lengths: Int64s, slots: Int64s) -> Inventory:
        return Inventory.of(self._host_store.arena, sequences, lengths, slots * 0, self._far, slots)

    def check(self, slots: list[int]) -> None:
        """Raise IntegrityError unless kinds agree on who is there, and no byte is lost.
        Pages are checked with the other kinds.
        """
        for slot in slots:
            if len({kind.is_far(slot) for kind in self._hosted}) > 1:
                raise IntegrityError(
                    f"slot {slot} has its pages in host memory for some layers, and on the device for others"
                )
        self._host_store.arena.check([used for pool, _ in self._far.pools for used in pool.used_ranges()])
