"""Forwards calls about slots to a `TailTable`, for all layer memories that use one."""

from __future__ import annotations

from typing import Any

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.holdings import Holding, LiveRows, Record
from hybridmem.memory.blocks.layout import BlockLayout
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.interface import Packed, References, Stretch
from hybridmem.memory.state.tails import TailTable


class TailMemory:
    """Implements, by a `TailTable`, the part of `memory.interface.LayerMemory` that is about slots.

    Subclasses plan, run and commit steps.
    """

    def __init__(self, table: TailTable) -> None:
        self.table = table

    @property
    def pools(self) -> list[tuple[BlockPool, BlockLayout]]:
        return self.table.pools

    @property
    def least_bytes(self) -> int:
        return self.table.least_bytes

    def bytes_for(self, stretch: Stretch) -> Int64s:
        return self.table.bytes_for(stretch)

    def share(self, sources: Int64s, targets: Int64s) -> None:
        self.table.share(sources, targets)

    def truncate(self, slot: int, to: int) -> None:
        self.table.truncate(slot, to)

    def release(self, slot: int) -> None:
        self.table.release(slot)

    def horizon(self, slot: int) -> int:
        return self.table.horizon(slot)

    def horizon_after(self, packed: Packed) -> Int64s:
        return self.table.horizon_after(packed)

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        return self.table.blocks_of(slot)

    def live_rows(self, slot: int, length: int) -> LiveRows:
        return self.table.live_rows(slot, length)

    def holdings(self, slots: Int64s) -> list[Holding]:
        return self.table.holdings(slots)

    def record(self, slot: int) -> Record:
        return self.table.record(slot) | {"base": self.table.base_of(slot)}

    def adopt(self, slot: int, record: Record, blocks: dict[str, Int64s]) -> None:
        self.table.adopt(slot, record, blocks, record["base"])

    def references(self, plans: list[Any]) -> References:
        return self.table.references([plan.step for plan in plans])

    def check(self, lengths: dict[int, int], peaks: dict[int, int], *, is_all: bool = True) -> None:
        self.table.check(lengths, peaks, is_all=is_all)
