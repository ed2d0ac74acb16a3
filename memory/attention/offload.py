"""Keeps keys and values of chosen sequences in host memory, and those of all others on the device.

This follows He & Zhai 2024, "FastDecode". The same layers have two attention caches, of any class, one in each place. A
sequence is wholly in one of them, so each cache works as if it were alone. A step with sequences of both becomes one
step of each cache. A fork is where its source is, because the two caches never share pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.holdings import Holding, LiveRows, Record
from hybridmem.memory.blocks.layout import BlockLayout
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.interface import Dropped, LayerMemory, Packed, References, SlotTable, Stretch
from hybridmem.memory.kernels import Scoring
from hybridmem.memory.sequences.batch import requests_of
from hybridmem.memory.specs import AttentionSpec


class Attention(LayerMemory[Any], Protocol):
    """Declares a layer memory of attention layers."""

    def attend(
        self, plan: Any, index: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """Store the step's keys and values for attention `index`, and attend: (T, H, D or value_dim)."""
        ...


@dataclass(frozen=True)
class PartPlan:
    """Holds one cache's part of a step.

    Attributes:
        requests: (s,) the indices of the requests in this cache.
        tokens: (t,) the packed indices of their tokens. None if they are all tokens of the step.
    """

    memory: Attention
    store: Store
    plan: Any
    requests: Int64s
    tokens: Tensor | None


@dataclass(frozen=True)
class HostedPlan:
    """Holds the plans of the one or two caches that take part in a step."""

    packed: Packed
    parts: list[PartPlan]
    can_capture: bool


class HostedAttention:
    """Joins a cache on the device and a cache in host memory to one `memory.interface.LayerMemory`.

    Byte counts include only the blocks on the device, because those in host memory are not in the budget.

    Args:
        near, far: the cache on the device, and the cache in host memory. `store` and `host_store` hold their bytes.
        specs: the attention specs, in the order in which `attend` numbers them.
    """

    def __init__(
        self,
        near: Attention,
        far: Attention,
        store: Store,
        host_store: Store,
        specs: list[AttentionSpec],
        dtype: torch.dtype,
    ) -> None:
        self.near, self.far = near, far
        self._stores = store, host_store
        self._specs = specs
        self._dtype = dtype
        self._far_slots: set[int] = set()

    @property
    def pools(self) -> list[tuple[BlockPool, BlockLayout]]:
        return self.near.pools

    @property
    def least_bytes(self) -> int:
        return self.near.least_bytes

    def bytes_for(self, stretch: Stretch) -> Int64s:
        """Return (4, N) bytes on the device, as `LayerMemory.bytes_for` does. Sequences in host memory take none."""
        return np.where(self._are_far(stretch.slots), 0, self.near.bytes_for(stretch))

    # The methods below say where sequences are, and move them.

    def is_far(self, slot: int) -> bool:
        """True if the slot's pages are in host memory."""
        return slot in self._far_slots

    def moved(self, slot: int, *, is_far: bool) -> None:
        """Set whether a slot's pages are in host memory from now on, or on the device."""
        self._stores[0].journal.before(self._put_back, slot, slot in self._far_slots)
        self._put_back(slot, is_far)

    def _put_back(self, slot: int, is_far: bool) -> None:
        (self._far_slots.add if is_far else self._far_slots.discard)(slot)

    def _of(self, slot: int) -> Attention:
        return self.far if slot in self._far_slots else self.near

    def _are_far(self, slots: Int64s) -> NDArray[np.bool_]:
        return np.fromiter(map(self._far_slots.__contains__, slots.tolist()), np.bool_, len(slots))

    def _divided(self, slots: Int64s) -> Iterator[tuple[Attention, Store, Int64s]]:
        """Yield each cache that holds any of these slots, with its store and the indices of its slots."""
        are_far = self._are_far(slots)
        for memory, store, own in zip((self.near, self.far), self._stores, (~are_far, are_far), strict=True):
            if own.any():
                yield memory, store, own.nonzero()[0]

    # The methods below plan, begin and end steps.

    def plan(self, packed: Packed) -> HostedPlan:
        parts = list[PartPlan]()
        try:
            for memory, store, requests in self._divided(packed.slots):
                own, tokens = packed, None
                if len(requests) < len(packed.slots):
                    own, places = requests_of(packed, requests)
                    tokens = self._stores[0].upload(places)
                parts.append(PartPlan(memory, store, memory.plan(own), requests, tokens))
        except BaseException:
            for part in parts:
                part.memory.commit(part.plan, packed.nothing[part.requests])
            raise
        return HostedPlan(packed, parts, self._can_capture(parts))

    def _can_capture(self, parts: list[PartPlan]) -> bool:
        """True if a CUDA graph can replay the step: the device attends to all sequences, and some are on the device.

        If all sequences were in host memory, their uploads would have the same shapes as those of as many sequences on
        the device, although the kernels differ.
        """
        is_distinct = len(parts) == 2 or parts[0].memory is self.near
        device_attends = all(part.store.device.type == self._stores[0].device.type for part in parts)
        return is_distinct and device_attends and all(part.plan.can_capture for part in parts)

    def begin(self, plan: HostedPlan) -> None:
        for part in plan.parts:
            part.memory.begin(part.plan)

    def attend(
        self, plan: HostedPlan, index: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """Store keys and values, and attend, in each cache that takes part in the step: (T, H, D or value_dim).

        If the host attends, it waits for its rows. Meanwhile the device attends for the other sequences.
        """
        device, spec = self._stores[0].device, self._specs[index]
        spec.check_rows(len(plan.packed.token_ids), self._dtype, device, q_THD, k_TGD, v_TGD)
        # All rows for the host are moved first, before the device gets more work.
        given = [_given(part, (q_THD, k_TGD, v_TGD), scoring) for part in plan.parts]
        found = [
            part.memory.attend(part.plan, index, *own).to(q_THD.device)
            for part, own in zip(plan.parts, given, strict=True)
        ]
        if len(found) == 1:
            return found[0]
        out_THD = q_THD.new_empty(*q_THD.shape[:2], spec.value_dim or spec.head_dim)
        for part, own_THD in zip(plan.parts, found, strict=True):
            out_THD[part.tokens] = own_THD
        return out_THD

    def commit(self, plan: HostedPlan, kept: Int64s) -> None:
        for part in plan.parts:
            part.memory.commit(part.plan, kept[part.requests])

    # The methods below drop tokens.

    def plan_drop(self, dropped: Dropped) -> tuple[Attention, Any]:
        memory = self._of(dropped.slot)
        return memory, memory.plan_drop(dropped)

    def bytes_to_drop(self, dropped: Dropped) -> int:
        return self._of(dropped.slot).bytes_to_drop(dropped)

    def drop(self, plan: tuple[Attention, Any]) -> None:
        plan[0].drop(plan[1])

    def abandon_drop(self, plan: tuple[Attention, Any]) -> None:
        plan[0].abandon_drop(plan[1])

    # The methods below open, copy and close sequences.

    @property
    def tables(self) -> list[SlotTable]:
        # This object acts as the table: it finds the cache of a slot, and calls the tables of that cache.
        return [self]

    def share(self, sources: Int64s, targets: Int64s) -> None:
        are_far = self._are_far(sources)
        for memory, _, own in self._divided(sources):
            for table in memory.tables:
                table.share(sources[own], targets[own])
        # Slots are released only after all have shared, because a target may be the source of another target.
        for slot, is_far in zip(targets.tolist(), are_far.tolist(), strict=True):
            _release(self.near if is_far else self.far, slot)
            self.moved(slot, is_far=is_far)

    def truncate(self, slot: int, to: int) -> None:
        self._of(slot).truncate(slot, to)

    def release(self, slot: int) -> None:
        _release(self._of(slot), slot)
        self.moved(slot, is_far=False)

    def horizon(self, slot: int) -> int:
        return self._of(slot).horizon(slot)

    def horizon_after(self, packed: Packed) -> Int64s:
        horizons = np.zeros_like(packed.starts)
        for memory, _, requests in self._divided(packed.slots):
            horizons[requests] = memory.horizon_after(requests_of(packed, requests)[0])
        return horizons

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        return self.near.blocks_of(slot)

    def live_rows(self, slot: int, length: int) -> LiveRows:
        return self.near.live_rows(slot, length)

    def holdings(self, slots: Int64s) -> list[Holding]:
        return self.near.holdings(slots)

    def record(self, slot: int) -> Record:
        return self._of(slot).record(slot)

    def adopt(self, slot: int, record: Record, blocks: dict[str, Int64s]) -> None:
        """Adopt a saved slot on the device."""
        self.near.adopt(slot, record, blocks)

    def check(self, lengths: dict[int, int], peaks: dict[int, int], *, is_all: bool = True) -> None:
        for memory, is_far in ((self.near, False), (self.far, True)):
            own = {slot: length for slot, length in lengths.items() if self.is_far(slot) == is_far}
            memory.check(own, peaks, is_all=is_all)

    def references(self, plans: list[HostedPlan]) -> References:
        """Return the references to blocks on the device and to those in host memory."""
        parts = [part for plan in plans for part in plan.parts]
        near, far = (
            memory.references([part.plan for part in parts if part.memory is memory])
            for memory in (self.near, self.far)
        )
        return near | far


def _release(memory: Attention, slot: int) -> None:
    for table in memory.tables:
        table.release(slot)


def _given(part: PartPlan, rows: tuple[Tensor, Tensor, Tensor | None], scoring: Scoring) -> tuple[Any, ...]:
    """Return queries, keys and values of a part's tokens, and their scoring, on the device of the part's kernels."""
    own = rows if part.tokens is None else tuple(None if x is None else x[part.tokens] for x in rows)
    device, scoring = part.store.device, scoring.of(part.tokens)
    if device.type == rows[0].device.type:
        return *own, scoring
    return *_moved(own, device), Scoring(*_moved(scoring, device))


def _moved(values: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """Move those values that are tensors to a device."""
    return tuple(value.to(device) if isinstance(value, Tensor) else value for value in values)
