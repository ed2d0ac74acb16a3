"""All kinds of memory of one model, moving together: what reaches one kind reaches every other, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from memory.arena import BlockPool, Store
from memory.block_layout import BlockLayout
from memory.blocks.arrays import EMPTY, Int64s
from memory.errors import BUDGET_UNIT, CapacityError
from memory.inspection import Group
from memory.interface import LayerMemory, Packed, Plans, Record
from memory.specs import LayerSpec


@dataclass(frozen=True)
class Snapshot:
    """What a slot holds, outside of the arena.

    Attributes:
        records: kind of memory -> what it is beside its bytes.
        blocks: pool -> (n, block_bytes) uint8 on the host, in the order of `LayerMemory.blocks_of`; on "meta" for a dry run.
    """

    records: dict[str, Record]
    blocks: dict[str, Tensor]

    @property
    def n_bytes(self) -> int:
        return sum(blocks.numel() for blocks in self.blocks.values())


class AllKinds(dict[str, LayerMemory[Any]]):
    """Name -> kind of memory, in the order in which they plan. They share a store.

    Attributes:
        members: name -> layer and spec of each memory that it is for, in the order of their numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.members: dict[str, list[tuple[int, LayerSpec]]] = {}

    @property
    def pools(self) -> Iterator[tuple[BlockPool, BlockLayout]]:
        """Every pool with how its blocks are laid out."""
        return (pool for kind in self.values() for pool in kind.pools)

    @property
    def least_bytes(self) -> int:
        return sum(kind.least_bytes for kind in self.values())

    # Steps

    def begin(self, packed: Packed, free_bytes: int) -> Plans:
        """Set blocks aside everywhere and copy what may not be written in place. Raises CapacityError with everything as before."""
        plans: Plans = {}
        try:
            for name, kind in self.items():
                plans[name] = kind.plan(packed)
            for name, plan in plans.items():
                self[name].begin(plan)
        except BaseException as error:
            self.abort(plans)
            # What it missed came on top of what this step had taken already.
            if isinstance(error, CapacityError) and error.unit == BUDGET_UNIT:
                raise CapacityError.of("the step needs at least", error.needed + free_bytes - error.free, free_bytes) from None
            raise
        return plans

    def commit(self, plans: Plans, kept: Int64s) -> None:
        for name, plan in plans.items():
            self[name].commit(plan, kept)

    def abort(self, plans: Plans) -> None:
        for name, plan in plans.items():
            self[name].abort(plan)

    def horizons_after(self, packed: Packed) -> Int64s:
        horizons = np.zeros_like(packed.starts)
        for kind in self.values():
            horizons = np.maximum(horizons, kind.horizon_after(packed))
        return horizons

    # Sequences

    def share(self, sources: Int64s, targets: Int64s) -> None:
        for kind in self.values():
            kind.share(sources, targets)

    def truncate(self, slot: int, to: int) -> None:
        for kind in self.values():
            kind.truncate(slot, to)

    def reset(self, slot: int) -> None:
        for kind in self.values():
            kind.reset(slot)

    def release(self, slot: int) -> None:
        for kind in self.values():
            kind.release(slot)

    def horizon(self, slot: int) -> int:
        return max([0, *[kind.horizon(slot) for kind in self.values()]])

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        return {name: ids for kind in self.values() for name, ids in kind.blocks_of(slot).items()}

    def private_bytes(self, slots: Int64s) -> Int64s:
        """(S,) what `release` of each of the slots alone would give back."""
        n_bytes = np.zeros_like(slots)
        for kind in self.values():
            for holding in kind.holdings(slots):
                pool, owners = self._pools_by_name[holding.pool], np.repeat(np.arange(len(slots)), holding.counts)
                n_bytes += np.bincount(owners[pool.counts[holding.ids] == 1], minlength=len(slots)) * pool.block_bytes
        return n_bytes

    def held_bytes(self, *slots: int) -> int:
        """What these slots refer to, shared with others or not; what they share with each other once."""
        held: dict[str, list[Int64s]] = {}
        for slot in slots:
            for name, ids in self.blocks_of(slot).items():
                held.setdefault(name, []).append(ids)
        n_blocks = {name: len(ids[0]) if len(ids) == 1 else len(np.unique(np.concatenate(ids))) for name, ids in held.items()}
        return sum(n * self._pools_by_name[name].block_bytes for name, n in n_blocks.items())

    @cached_property
    def _pools_by_name(self) -> dict[str, BlockPool]:
        return {pool.name: pool for pool, _ in self.pools}

    def groups(self, slots: Int64s) -> list[Group]:
        """What slots (S,) hold, kind by kind."""
        return [Group(name, self.members[name], kind.pools, kind.holdings(slots), kind.shares) for name, kind in self.items()]

    # Out of the arena and back

    def snapshot(self, slot: int, length: int, store: Store) -> Snapshot:
        """A copy of everything that a slot holds, what it shares included, and of nothing else: other bytes of its blocks are zeros.

        Cost: its bytes, once.
        """
        blocks = dict[str, Tensor]()
        for kind in self.values():
            held, live = kind.blocks_of(slot), kind.live_rows(slot, length)
            for pool, layout in kind.pools:
                if len(ids := held[pool.name]):
                    blocks[pool.name] = store.read(pool.addresses[ids], pool.block_bytes)
                    layout.blank_(blocks[pool.name], live[pool.name])
        return Snapshot({name: kind.record(slot) for name, kind in self.items()}, blocks)

    def restore(self, slot: int, snapshot: Snapshot, store: Store) -> None:
        """An empty slot becomes what `snapshot` was taken of. Raises CapacityError with nothing changed. Cost: its bytes, once."""
        for name, blocks in snapshot.blocks.items():
            if blocks.shape[1:] != (self._pools_by_name[name].block_bytes,):
                raise ValueError(f"blocks of {name} have {tuple(blocks.shape)} bytes, not {self._pools_by_name[name].block_bytes} each")
        n_blocks = {name: len(blocks) for name, blocks in snapshot.blocks.items()}
        self._fill(slot, snapshot.records, n_blocks, store, lambda pool, ids: store.write(pool.addresses[ids], snapshot.blocks[pool.name]))

    def take_over(self, slot: int, store: Store, others: AllKinds, others_store: Store) -> None:
        """What a slot holds in the same kinds of another store moves into this one. Raises CapacityError with nothing changed.

        What it shares there stays with the others as well; here it shares nothing. Cost: its bytes, once.
        """
        held = others.blocks_of(slot)

        def fetch(pool: BlockPool, ids: Int64s) -> None:
            addresses = others._pools_by_name[pool.name].addresses[held[pool.name]]
            store.fetch(others_store, addresses, pool.addresses[ids], pool.block_bytes)

        records = {name: kind.record(slot) for name, kind in others.items()}
        self._fill(slot, records, {name: len(ids) for name, ids in held.items()}, store, fetch)
        others.release(slot)

    def _fill(
        self, slot: int, records: dict[str, Record], n_blocks: dict[str, int], store: Store, write: Callable[[BlockPool, Int64s], None]
    ) -> None:
        """An empty slot adopts fresh blocks, so many of each pool, in which `write` puts what they are to hold."""
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
        none = EMPTY
        try:
            for name, kind in self.items():
                own = [pool.name for pool, _ in kind.pools]
                kind.adopt(slot, records[name], {pool: fresh.get(pool, none) for pool in own})
                for pool in own:
                    fresh.pop(pool, None)
        except BaseException:
            for left, _ in self.pools:
                left.release(fresh.get(left.name, none))
            raise

    def check_slot(self, slot: int, length: int, peak: int) -> None:
        """Raise IntegrityError unless what a slot holds suits these positions. Cost: that of one slot, however many there are."""
        for kind in self.values():
            kind.check_slot(slot, length, peak)

    def check(self, lengths: dict[int, int], peaks: dict[int, int], store: Store) -> None:
        """Raise IntegrityError unless all books of the given slots (and of no others) balance."""
        for kind in self.values():
            kind.check(lengths, peaks)
        store.arena.check([used for pool, _ in self.pools for used in pool.used_ranges()])
