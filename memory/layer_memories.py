"""`LayerMemories` calls all layer memories of a model together: an operation succeeds in all of them, or in none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol
from weakref import ReferenceType

import numpy as np
from torch import Tensor

from hybridmem.memory.blocks.arrays import EMPTY, Bools, Int64s
from hybridmem.memory.blocks.holdings import LiveRows, Record
from hybridmem.memory.blocks.layout import BlockLayout
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.errors import CapacityError
from hybridmem.memory.interface import (
    Dropped,
    LayerMemory,
    OpenStep,
    Packed,
    Plans,
    References,
    Sequence,
    SlotTable,
    Stretch,
)
from hybridmem.memory.sequences.batch import TokenLists
from hybridmem.memory.sequences.drop import drop_from_all
from hybridmem.memory.specs import LayerSpec


@dataclass(frozen=True, eq=False)
class Place:
    """Says which layer memory serves one attention, cross-attention or recurrence of a layer.

    Attributes:
        group: the name of the layer memory. A step finds its plan by this name.
        number: the index of the place among those that this layer memory serves.
        position: the index of the place among all places of its kind in the model.
    """

    group: str
    memory: Any
    number: int
    position: int


PlaceKey = tuple[int, str, str | None]
"""Identifies a place by layer, kind and name. The name may be None if the layer has only one place of this kind."""

Places = dict[PlaceKey, Place]


@dataclass(frozen=True)
class Snapshot:
    """Holds a copy of everything in a slot, outside of the arena.

    Attributes:
        records: name of a layer memory -> its record of the slot, which `adopt` needs together with the bytes.
        blocks: pool -> (n, block_bytes) uint8 on the host, in the order of `LayerMemory.blocks_of`. In a dry run they
            are on "meta".
    """

    records: dict[str, Record]
    blocks: dict[str, Tensor]

    @property
    def n_bytes(self) -> int:
        return sum(blocks.numel() for blocks in self.blocks.values())


@dataclass(frozen=True)
class Leaving:
    """Describes the blocks of a slot that is about to leave the arena, or of one that shares blocks with it.

    Attributes:
        ids: pool -> (n,) ids of the slot's blocks.
        live: pool -> (n, rows) booleans: which rows of these blocks belong to the slot's tokens.
    """

    slot: int
    ids: dict[str, Int64s]
    live: LiveRows


@dataclass(frozen=True)
class Held:
    """Describes one of several slots that share blocks: which of the blocks it holds.

    Attributes:
        records: the records of a `Snapshot`.
        numbers: pool -> (n,) indices of the blocks to which the slot refers, in the order of `LayerMemory.blocks_of`.
    """

    records: dict[str, Record]
    numbers: dict[str, Int64s]


class SwappedOut(Protocol):
    """Declares the object that keeps swapped-out slots: `memory.storage.tiers.Tiers`."""

    reclaimers: list[Callable[[int], bool]]

    @property
    def used_bytes(self) -> tuple[int, int]: ...
    def put(
        self,
        leaving: Leaving,
        sizes: dict[str, int],
        copy: Callable[[dict[str, Bools]], Snapshot],
        relatives: Iterable[Leaving] = (),
    ) -> int: ...
    def shared_with(self, slot: int) -> dict[str, Int64s]: ...
    def get(self, slot: int, wanted: Mapping[str, Bools] | None = None) -> Snapshot: ...
    def returned(self, slot: int, back: Leaving, *, is_checkpoint: bool) -> None: ...
    def fetch(self, slot: int) -> bool: ...
    def drop(self, slot: int) -> None: ...
    def forget_twins(self, slot: int) -> None: ...
    def add_file(self, path: str, n_bytes: int, rename: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> int: ...
    def adopt(self, slot: int, held: Any) -> None: ...
    def rebuild(self) -> None: ...
    @property
    def other_files(self) -> set[str]: ...
    def keys_of(self, slot: int) -> dict[str, Int64s]: ...
    def inside_keys(self, leaving: Leaving) -> dict[str, Int64s]: ...


class EnteredStep(Protocol):
    """Declares what the coordinator reads and calls of an entered step. `memory.step.Step` has more."""

    sequences: list[Sequence]
    tokens: TokenLists

    @property
    def outputs(self) -> Any: ...
    @property
    def scope(self) -> ReferenceType[Any]: ...
    def plan(self, layers: LayerMemories, packed: Packed) -> tuple[Packed, Plans]: ...
    def hold(self, opened: OpenStep, upload: Callable[[Int64s], Tensor]) -> None: ...


class SettlesTrees(Protocol):
    """Declares the object that reduces a step's plans to accepted tokens: `memory.trees.memories.TreeMemories`."""

    def give_back(self, plans: Plans) -> None: ...
    def settle(self, plans: Plans, accepted: Packed) -> None: ...


class PagesOnHost(Protocol):
    """Declares the object that keeps offloaded pages in host memory: `memory.attention.host_pages.HostPages`."""

    @property
    def place(self) -> tuple[LayerMemories, Store]: ...
    def has(self, slot: int) -> bool: ...
    def move(self, slot: int, *, to_host: bool) -> None: ...
    @property
    def pools(self) -> Iterator[tuple[BlockPool, BlockLayout]]: ...
    def bytes_for(self, stretch: Stretch) -> Int64s: ...
    def held_bytes(self, *slots: int) -> int: ...
    def blocks_of(self, slot: int) -> dict[str, Int64s]: ...
    def snapshot(self, slot: int, length: int) -> Snapshot: ...
    def inventory(self, sequences: list[Sequence], lengths: Int64s, slots: Int64s) -> Any: ...
    def check(self, slots: list[int]) -> None: ...


class LayerMemories(dict[str, LayerMemory[Any]]):
    """Maps the name of each layer memory to it, in the order in which they plan. All of them use the same store.

    Attributes:
        members: name -> (layer, spec) of each place that the layer memory serves, in the order of their numbers.
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

    # The methods below plan, begin and end steps.

    def begin(self, packed: Packed) -> Plans:
        """Plan and begin a step in all layer memories. If one of them raises CapacityError, nothing has changed."""
        plans: Plans = {}
        try:
            for name, memory in self.items():
                plans[name] = memory.plan(packed)
            for name, plan in plans.items():
                self[name].begin(plan)
        except BaseException:
            self.commit(plans, packed.nothing)
            raise
        return plans

    def can_capture(self, plans: Plans) -> bool:
        """True if one CUDA graph serves all steps whose uploads have the same shapes: they launch the same kernels."""
        return all(plan.can_capture for plan in plans.values())

    def commit(self, plans: Plans, kept: Int64s) -> None:
        for name, plan in plans.items():
            self[name].commit(plan, kept)

    def horizons_after(self, packed: Packed) -> Int64s:
        horizons = np.zeros_like(packed.starts)
        for memory in self.values():
            horizons = np.maximum(horizons, memory.horizon_after(packed))
        return horizons

    # The methods below open, copy and close sequences.

    def share(self, sources: Int64s, targets: Int64s) -> None:
        for table in self._tables:
            table.share(sources, targets)

    def slim(self, slot: int, length: int) -> None:
        """See `memory.recurrent_state.RecurrentState.slim`."""
        states: Any = self.get("recurrence")
        if states is not None:
            states.slim(slot, length)

    def truncate(self, slot: int, to: int) -> None:
        for memory in self.values():
            memory.truncate(slot, to)

    def release(self, slot: int) -> None:
        for table in self._tables:
            table.release(slot)

    def horizon(self, slot: int) -> int:
        return max([0, *[memory.horizon(slot) for memory in self.values()]])

    def drop(self, dropped: Dropped) -> None:
        """Drop tokens from the middle of a slot, in all layer memories or none. Raises DropError or CapacityError."""
        # The order is reversed, so that recurrences come first. They refuse before attention copies any rows.
        drop_from_all(list(reversed(self.values())), dropped)

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        return {name: ids for memory in self.values() for name, ids in memory.blocks_of(slot).items()}

    def private_bytes(self, slots: Int64s) -> Int64s:
        """Return (S,) the bytes that each slot would free if it alone were released."""
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

    def held_bytes(self, *slots: int) -> int:
        """Return the bytes of all blocks that these slots refer to. A block that several of them share counts once."""
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

    @cached_property
    def _tables(self) -> list[SlotTable]:
        return [table for memory in self.values() for table in memory.tables]

    # The methods below move blocks out of the arena and back.

    def live_rows(self, slot: int, length: int) -> LiveRows:
        """Return which rows of the blocks of `blocks_of` belong to the slot's tokens."""
        return {name: rows for memory in self.values() for name, rows in memory.live_rows(slot, length).items()}

    def snapshot(self, slot: int, length: int, store: Store, wanted: Mapping[str, Bools] | None = None) -> Snapshot:
        """Copy everything in a slot, shared blocks included. Bytes that do not belong to its tokens become zeros.

        Args:
            wanted: pool -> (n,) which of the slot's blocks to copy. By default all are copied.
        Cost: the bytes that are copied.
        """
        blocks = dict[str, Tensor]()
        for memory in self.values():
            held, live = memory.blocks_of(slot), memory.live_rows(slot, length)
            for pool, layout in memory.pools:
                ids, rows = held[pool.name], live[pool.name]
                if wanted is not None:
                    ids, rows = ids[wanted[pool.name]], rows[wanted[pool.name]]
                if len(ids):
                    blocks[pool.name] = store.read(pool.addresses[ids], pool.block_bytes)
                    layout.blank_(blocks[pool.name], rows)
        return Snapshot({name: memory.record(slot) for name, memory in self.items()}, blocks)

    def restore(self, slot: int, snapshot: Snapshot, store: Store, shared: Mapping[str, Int64s] | None = None) -> None:
        """Fill an empty slot from a snapshot. Raises CapacityError with nothing changed.

        Cost: its bytes are copied once.

        Args:
            shared: pool -> (n,) for each block of the slot, the id of a block in use that has the same bytes, or -1.
                The slot refers to the block in use. Where `shared` is -1, a new block is filled from the snapshot.
        """
        numbers = {name: np.arange(len(blocks)) for name, blocks in snapshot.blocks.items()}
        for name, ids in (shared or {}).items():
            numbers[name] = np.where(ids < 0, np.cumsum(ids < 0) - 1, -1 - ids)
        self.restore_all({slot: Held(snapshot.records, numbers)}, snapshot.blocks, store)

    def restore_all(self, slots: Mapping[int, Held], blocks: dict[str, Tensor], store: Store) -> None:
        """Fill several empty slots at once. `slots` says which of the blocks each slot holds.

        `blocks` have the form of `Snapshot.blocks`. A block that several slots hold is written once, and they share it.
        In `Held.numbers`, a negative number -1 - id stands for a block of the arena that is in use. Raises
        CapacityError with nothing changed. Cost: the bytes of the blocks are copied once.
        """
        for name, own in blocks.items():
            if own.shape[1:] != (self._pools_by_name[name].block_bytes,):
                raise ValueError(
                    f"blocks of {name} have {tuple(own.shape)} bytes, not {self._pools_by_name[name].block_bytes} each"
                )

        def write(pool: BlockPool, ids: Int64s) -> None:
            store.write(pool.addresses[ids], blocks[pool.name])

        self._fill(slots, {name: len(own) for name, own in blocks.items()}, store, write)

    def take_over(self, slot: int, store: Store, others: LayerMemories, others_store: Store) -> None:
        """Move the blocks of a slot from another store into this one. Raises CapacityError with nothing changed.

        Blocks that the slot shares in the other store stay with the other slots, so here it shares none. Cost: its
        bytes are copied once.

        Args:
            others: the layer memories of the same layers in the other store.
        """
        held = others.blocks_of(slot)

        def fetch(pool: BlockPool, ids: Int64s) -> None:
            addresses = others._pools_by_name[pool.name].addresses[held[pool.name]]
            store.fetch(others_store, addresses, pool.addresses[ids], pool.block_bytes)

        records = {name: memory.record(slot) for name, memory in others.items()}
        numbers = {name: np.arange(len(ids)) for name, ids in held.items()}
        self._fill({slot: Held(records, numbers)}, {name: len(ids) for name, ids in held.items()}, store, fetch)
        others.release(slot)

    def _fill(
        self,
        slots: Mapping[int, Held],
        n_blocks: dict[str, int],
        store: Store,
        write: Callable[[BlockPool, Int64s], None],
    ) -> None:
        """Give empty slots new blocks, `n_blocks` of each pool. `write` fills them. Raises CapacityError."""
        pools, fresh, free_bytes = self._pools_by_name, dict[str, Int64s](), store.arena.free_bytes
        try:
            for name, n in n_blocks.items():
                fresh[name] = pools[name].allocate(n)
                write(pools[name], fresh[name])
            for slot, held in slots.items():
                own = {name: _ids_of(numbers, fresh.get(name, EMPTY)) for name, numbers in held.numbers.items()}
                for name, ids in own.items():
                    pools[name].retain(ids)
                self._adopt(slot, held.records, own)
        except BaseException as error:
            for slot in slots:
                self.release(slot)
            if isinstance(error, CapacityError):
                n_bytes = sum(n * pools[name].block_bytes for name, n in n_blocks.items())
                who = "the sequence needs" if len(slots) == 1 else f"the {len(slots)} sequences and checkpoints need"
                raise CapacityError.of(who, n_bytes, free_bytes, error.capacity, error.unit) from None
            raise
        finally:
            for name, ids in fresh.items():
                pools[name].release(ids)

    def _adopt(self, slot: int, records: dict[str, Record], ids: dict[str, Int64s]) -> None:
        """Give an empty slot the blocks `ids`, which are listed by pool.

        After an error, blocks that no layer memory has taken are released.
        """
        try:
            for name, memory in self.items():
                own = [pool.name for pool, _ in memory.pools]
                memory.adopt(slot, records[name], {pool: ids.get(pool, EMPTY) for pool in own})
                for pool in own:
                    ids.pop(pool, None)
        except BaseException:
            for left, _ in self.pools:
                left.release(ids.get(left.name, EMPTY))
            raise

    def check_slot(self, slot: int, length: int, peak: int) -> None:
        """Raise IntegrityError unless a slot's blocks fit this length and peak. The cost depends on no other slot."""
        for memory in self.values():
            memory.check({slot: length}, {slot: peak}, is_all=False)

    def references(self, plans: Iterable[Plans]) -> References:
        """Return all references to blocks: those of slots, and those of `plans`, the plans of all open steps."""
        open_plans, found = list(plans), References()
        for name, memory in self.items():
            found |= memory.references([own[name] for own in open_plans])
        return found

    def check(
        self, lengths: dict[int, int], peaks: dict[int, int], store: Store, plans: Iterable[Plans] = ()
    ) -> None:  # fmt: skip
        """Raise IntegrityError unless only the given slots hold blocks, which fit the slots' lengths and peaks.

        Args:
            plans: the plans of all open steps.
        """
        for memory in self.values():
            memory.check(lengths, peaks)
        for pool, ids in self.references(plans).items():
            pool.check(ids)
        store.arena.check([used for pool, _ in self.pools for used in pool.used_ranges()])


def _ids_of(numbers: Int64s, fresh: Int64s) -> Int64s:
    """Return the block ids for `Held.numbers`: fresh[number] for number >= 0, and -1 - number for a negative number."""
    is_fresh = numbers >= 0
    ids: Int64s = -1 - numbers
    ids[is_fresh] = fresh[numbers[is_fresh]]
    return ids
