"""`LayerMemories` calls all layer memories of one model as one: an operation succeeds in all of them, or in none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from memory.blocks.arrays import EMPTY, Int64s
from memory.blocks.holdings import Record
from memory.blocks.layout import BlockLayout
from memory.blocks.pool import BlockPool
from memory.blocks.store import Store
from memory.errors import BUDGET_UNIT, CapacityError
from memory.interface import Dropped, LayerMemory, Packed, Plans, Sequence, Stretch
from memory.sequences.drop import drop_from_all
from memory.specs import LayerSpec


@dataclass(frozen=True, eq=False)
class Place:
    """Says which layer memory serves one attention, cross-attention or recurrence of a layer.

    Attributes:
        group: name of the layer memory, by which a step has its plan.
        number: which of the memory's own layers it is.
        position: which of its kind it is in the model.
    """

    group: str
    memory: Any
    number: int
    position: int


Places = dict[tuple[int, str, str | None], Place]
"""(layer, kind, name) -> its place. The name may be None where a layer has only one of a kind."""


@dataclass(frozen=True)
class Snapshot:
    """Holds a copy of all that a slot holds, outside of the arena.

    Attributes:
        records: name of a layer memory -> its record of the slot, beside the bytes.
        blocks: pool -> (n, block_bytes) uint8 on the host, in the order of `LayerMemory.blocks_of`; on "meta" for a dry
            run.
    """

    records: dict[str, Record]
    blocks: dict[str, Tensor]

    @property
    def n_bytes(self) -> int:
        return sum(blocks.numel() for blocks in self.blocks.values())


class SwappedOut(Protocol):
    """Declares what keeps swapped-out slots: `memory.storage.swap.Tiers`."""

    n_back: int

    @property
    def used_bytes(self) -> tuple[int, int]: ...
    def put(self, slot: int, snapshot: Snapshot) -> None: ...
    def get(self, slot: int) -> Snapshot: ...
    def drop(self, slot: int) -> None: ...


class PagesOnHost(Protocol):
    """Declares what keeps pages of chosen sequences in host memory: `memory.attention.host_pages.HostPages`."""

    def has(self, slot: int) -> bool: ...
    def move(self, slot: int, *, to_host: bool) -> None: ...
    def snapshot(self, slot: int, length: int) -> Snapshot: ...
    def inventory(self, sequences: list[Sequence], lengths: Int64s, slots: Int64s) -> Any: ...
    def check(self, slots: list[int]) -> None: ...


class LayerMemories(dict[str, LayerMemory[Any]]):
    """Maps the name of each layer memory to it, in the order in which they plan. They share a store.

    Attributes:
        members: name -> layer and spec of each memory that it is for, in the order of their numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.members: dict[str, list[tuple[int, LayerSpec]]] = {}

    @property
    def pools(self) -> Iterator[tuple[BlockPool, BlockLayout]]:
        """Return every pool with the layout of its blocks."""
        return (pool for memory in self.values() for pool in memory.pools)

    @property
    def used_bytes(self) -> dict[str, int]:
        """Return pool name -> bytes in use."""
        return {pool.name: pool.used_bytes for pool, _ in self.pools}

    @property
    def has_states(self) -> bool:
        """True if any layer is recurrent."""
        return "recurrence" in self

    @property
    def least_bytes(self) -> int:
        return sum(memory.least_bytes for memory in self.values())

    # Steps

    def begin(self, packed: Packed, free_bytes: int) -> Plans:
        """Plan and begin a step in all layer memories. Raises CapacityError with nothing changed."""
        plans: Plans = {}
        try:
            for name, memory in self.items():
                plans[name] = memory.plan(packed)
            for name, plan in plans.items():
                self[name].begin(plan)
        except BaseException as error:
            self.commit(plans, packed.nothing)
            # The layer memories that had planned before held blocks as well: count them as needed.
            if isinstance(error, CapacityError) and error.unit == BUDGET_UNIT:
                raise CapacityError.of(
                    "the step needs at least", error.needed + free_bytes - error.free, free_bytes
                ) from None
            raise
        return plans

    def can_capture(self, plans: Plans) -> bool:
        """True if steps with uploads of the same shapes launch the same kernels, so that one CUDA graph serves all."""
        return all(plan.can_capture for plan in plans.values())

    def commit(self, plans: Plans, kept: Int64s) -> None:
        for name, plan in plans.items():
            self[name].commit(plan, kept)

    def horizons_after(self, packed: Packed) -> Int64s:
        horizons = np.zeros_like(packed.starts)
        for memory in self.values():
            horizons = np.maximum(horizons, memory.horizon_after(packed))
        return horizons

    # Sequences

    def share(self, sources: Int64s, targets: Int64s) -> None:
        for memory in self.values():
            memory.share(sources, targets)

    def truncate(self, slot: int, to: int) -> None:
        for memory in self.values():
            memory.truncate(slot, to)

    def release(self, slot: int) -> None:
        for memory in self.values():
            memory.release(slot)

    def horizon(self, slot: int) -> int:
        return max([0, *[memory.horizon(slot) for memory in self.values()]])

    def drop(self, dropped: Dropped, free_bytes: int) -> None:
        """Drop tokens from the middle of a slot, in all layer memories or none. Raises DropError or CapacityError."""
        # Reversed, because recurrences come last: they refuse at once, before attention copies its rows.
        drop_from_all(reversed(self.values()), dropped, free_bytes)

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        return {name: ids for memory in self.values() for name, ids in memory.blocks_of(slot).items()}

    def private_bytes(self, slots: Int64s) -> Int64s:
        """Return (S,) the bytes that releasing each of the slots alone would free."""
        n_bytes = np.zeros_like(slots)
        for memory in self.values():
            for holding in memory.holdings(slots):
                pool, owners = self._pools_by_name[holding.pool], np.repeat(np.arange(len(slots)), holding.counts)
                n_bytes += np.bincount(owners[pool.counts[holding.ids] == 1], minlength=len(slots)) * pool.block_bytes
        return n_bytes

    def bytes_for(self, stretch: Stretch) -> Int64s:
        """Return (4, N) bytes of all layer memories; see `LayerMemory.bytes_for`."""
        n_bytes = np.zeros((4, len(stretch.slots)), np.int64)
        for memory in self.values():
            n_bytes += memory.bytes_for(stretch)
        return n_bytes

    @property
    def block_bytes(self) -> list[int]:
        """Return the bytes of one block of each pool."""
        return [pool.block_bytes for pool, _ in self.pools]

    def held_bytes(self, *slots: int) -> int:
        """Return the bytes of all blocks that these slots refer to; what they share with each other counts once."""
        held: dict[str, list[Int64s]] = {}
        for slot in slots:
            for name, ids in self.blocks_of(slot).items():
                held.setdefault(name, []).append(ids)
        n_blocks = {
            name: len(ids[0]) if len(ids) == 1 else len(np.unique(np.concatenate(ids))) for name, ids in held.items()
        }
        return sum(n * self._pools_by_name[name].block_bytes for name, n in n_blocks.items())

    @cached_property
    def _pools_by_name(self) -> dict[str, BlockPool]:
        return {pool.name: pool for pool, _ in self.pools}

    # Out of the arena and back

    def snapshot(self, slot: int, length: int, store: Store) -> Snapshot:
        """Copy all that a slot holds, shared blocks included; bytes that are not of its tokens become zeros.

        Cost: its bytes, once.
        """
        blocks = dict[str, Tensor]()
        for memory in self.values():
            held, live = memory.blocks_of(slot), memory.live_rows(slot, length)
            for pool, layout in memory.pools:
                if len(ids := held[pool.name]):
                    blocks[pool.name] = store.read(pool.addresses[ids], pool.block_bytes)
                    layout.blank_(blocks[pool.name], live[pool.name])
        return Snapshot({name: memory.record(slot) for name, memory in self.items()}, blocks)

    def restore(self, slot: int, snapshot: Snapshot, store: Store) -> None:
        """Fill an empty slot with a snapshot. Raises CapacityError with nothing changed. Cost: its bytes, once."""
        for name, blocks in snapshot.blocks.items():
            if blocks.shape[1:] != (self._pools_by_name[name].block_bytes,):
                raise ValueError(
                    f"blocks of {name} have {tuple(blocks.shape)} bytes, not {self._pools_by_name[name].block_bytes} "
                    "each"
                )
        n_blocks = {name: len(blocks) for name, blocks in snapshot.blocks.items()}

        def write(pool: BlockPool, ids: Int64s) -> None:
            store.write(pool.addresses[ids], snapshot.blocks[pool.name])

        self._fill(slot, snapshot.records, n_blocks, store, write)

    def take_over(self, slot: int, store: Store, others: LayerMemories, others_store: Store) -> None:
        """Move what a slot holds in another store into this one. Raises CapacityError with nothing changed.

        Blocks that it shares there stay with the others; here it shares none. Cost: its bytes, once.

        Args:
            others: the same layer memories, in the other store.
        """
        held = others.blocks_of(slot)

        def fetch(pool: BlockPool, ids: Int64s) -> None:
            addresses = others._pools_by_name[pool.name].addresses[held[pool.name]]
            store.fetch(others_store, addresses, pool.addresses[ids], pool.block_bytes)

        records = {name: memory.record(slot) for name, memory in others.items()}
        self._fill(slot, records, {name: len(ids) for name, ids in held.items()}, store, fetch)
        others.release(slot)

    def _fill(
        self,
        slot: int,
        records: dict[str, Record],
        n_blocks: dict[str, int],
        store: Store,
        write: Callable[[BlockPool, Int64s], None],
    ) -> None:
        """Give an empty slot fresh blocks, `n_blocks` of each pool, which `write` fills. Raises CapacityError."""
        pools, fresh, free_bytes = self._pools_by_name, dict[str, Int64s](), store.arena.free_bytes
        try:
            for name, n in n_blocks.items():
                fresh[name] = pools[name].allocate(n)
                write(pools[name], fresh[name])
        except BaseException as error:
            for name, ids in fresh.items():
                pools[name].release(ids)
            if isinstance(error, CapacityError):
                n_bytes = sum(n * pools[name].block_bytes for name, n in n_blocks.items())
                raise CapacityError.of("the sequence needs", n_bytes, free_bytes, error.unit) from None
            raise
        self._adopt(slot, records, fresh)

    def _adopt(self, slot: int, records: dict[str, Record], fresh: dict[str, Int64s]) -> None:
        """Pass fresh blocks, by pool, to an empty slot; blocks that no layer memory has taken are released on error."""
        try:
            for name, memory in self.items():
                own = [pool.name for pool, _ in memory.pools]
                memory.adopt(slot, records[name], {pool: fresh.get(pool, EMPTY) for pool in own})
                for pool in own:
                    fresh.pop(pool, None)
        except BaseException:
            for left, _ in self.pools:
                left.release(fresh.get(left.name, EMPTY))
            raise

    def check_slot(self, slot: int, length: int, peak: int) -> None:
        """Raise IntegrityError unless a slot's blocks fit this length and peak. The cost depends on no other slot."""
        for memory in self.values():
            memory.check({slot: length}, {slot: peak}, is_all=False)

    def check(self, lengths: dict[int, int], peaks: dict[int, int], store: Store) -> None:
        """Raise IntegrityError unless exactly the given slots hold blocks, and theirs fit their lengths and peaks."""
        for memory in self.values():
            memory.check(lengths, peaks)
        store.arena.check([used for pool, _ in self.pools for used in pool.used_ranges()])
