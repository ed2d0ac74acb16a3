"""Recurrent layers after tokens were dropped: their states go on holding them, so they stand further than the sequence does.

    the sequence   0 ............... start ........ length
    its states     0 ......... end ............ length + offset        offset = all tokens ever dropped

Nothing moves. What this memory is told is a position of the sequence; `RecurrentState` gets that of the states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from memory.arena import Store
from memory.blocks.arrays import Int64s
from memory.errors import DropError, IntegrityError
from memory.folding import TailGrid
from memory.interface import Holding, LiveRows, Packed, Record, Stretch
from memory.kernels import Kernels
from memory.recurrent_state import RecurrentState
from memory.shift import Dropped
from memory.specs import RecurrentSpec
from memory.states import RecurrentPlan


@dataclass(frozen=True)
class Base:
    """How far the states of a slot are ahead.

    Attributes:
        offset: tokens.
        floor: the earliest position that has states: before it, position + offset is one of a dropped token. At least 1, for at
            position 0 nothing is remembered at all.
    """

    offset: int
    floor: int


_LEVEL = Base(0, 0)


class RebasedState(RecurrentState):
    """`memory.interface.LayerMemory` of all recurrences of all layers; see `RecurrentState`."""

    def __init__(
        self, specs: list[RecurrentSpec], dtype: torch.dtype, grid: TailGrid, store: Store, *, kernels: Kernels | None = None
    ) -> None:
        super().__init__(specs, dtype, grid, store, kernels=kernels)
        self._bases: dict[int, Base] = {}

    def _column(self, slots: Int64s, name: str) -> Int64s:
        return np.array([getattr(self._bases.get(slot, _LEVEL), name) for slot in slots.tolist()], np.int64)

    def _to_states(self, packed: Packed) -> Packed:
        """The step as the states see it."""
        if not self._bases:
            return packed
        offsets = self._column(packed.slots, "offset")
        positions = packed.positions + np.repeat(offsets, packed.counts)
        return replace(packed, starts=packed.starts + offsets, peaks=packed.peaks + offsets, positions=positions)

    def bytes_for(self, stretch: Stretch) -> Int64s:
        if self._bases:
            offsets = self._column(stretch.slots, "offset")
            stretch = Stretch(stretch.slots, *(x + offsets for x in (stretch.starts, stretch.ends, stretch.peaks)))
        return super().bytes_for(stretch)

    def plan(self, packed: Packed) -> RecurrentPlan:
        return super().plan(self._to_states(packed))

    # Dropping tokens

    def plan_drop(self, dropped: Dropped) -> Dropped:
        if not dropped.approximate:
            families = ", ".join(sorted({spec.family for spec in self._specs}))
            raise DropError(
                f"tokens [{dropped.start}, {dropped.end}) cannot be taken out of recurrent states ({families}), which hold all in one; "
                f"roll back to {dropped.start} and feed the rest again, or give approximate=True: then these layers go on remembering them",
                start=dropped.start, end=dropped.end,
            )  # fmt: skip
        return dropped

    def drop(self, plan: Dropped) -> None:
        base = self._bases.get(plan.slot, _LEVEL)
        floor = max(1, plan.start, base.floor - plan.n_tokens)
        self._bases[plan.slot] = Base(base.offset + plan.n_tokens, floor)

    def abandon_drop(self, plan: Dropped) -> None:
        """Nothing has been set aside."""

    # Sequences

    def share(self, sources: Int64s, targets: Int64s) -> None:
        bases = [self._bases.get(slot) for slot in sources.tolist()]
        super().share(sources, targets)
        self._bases |= {slot: base for slot, base in zip(targets.tolist(), bases, strict=True) if base is not None}

    def truncate(self, slot: int, to: int) -> None:
        super().truncate(slot, to + self._bases.get(slot, _LEVEL).offset)

    def release(self, slot: int) -> None:
        super().release(slot)
        self._bases.pop(slot, None)

    def horizon(self, slot: int) -> int:
        base = self._bases.get(slot, _LEVEL)
        return max(super().horizon(slot) - base.offset, base.floor)

    def horizon_after(self, packed: Packed) -> Int64s:
        horizons: Int64s = super().horizon_after(self._to_states(packed))
        if self._bases:
            horizons = np.maximum(horizons - self._column(packed.slots, "offset"), self._column(packed.slots, "floor"))
        return horizons

    def live_rows(self, slot: int, length: int) -> LiveRows:
        return super().live_rows(slot, length + self._bases.get(slot, _LEVEL).offset)

    def holdings(self, slots: Int64s) -> list[Holding]:
        held = super().holdings(slots)
        if not self._bases:
            return held
        offsets = self._column(slots, "offset")

        def moved(at: Int64s) -> Int64s:
            return np.where(at < 0, at, np.maximum(at - offsets, 0))

        return [replace(h, starts=moved(h.starts), ends=None if h.ends is None else moved(h.ends)) for h in held]

    def record(self, slot: int) -> Record:
        base = self._bases.get(slot, _LEVEL)
        return super().record(slot) | {"base": [base.offset, base.floor]}

    def adopt(self, slot: int, record: Record, blocks: dict[str, Int64s]) -> None:
        base = Base(*map(int, record["base"]))
        super().adopt(slot, record, blocks)
        if base != _LEVEL:
            self._bases[slot] = base

    def check_slot(self, slot: int, length: int, peak: int) -> None:
        base = self._bases.get(slot, _LEVEL)
        if base != _LEVEL and not 1 <= base.floor <= length:
            raise IntegrityError(f"slot {slot} has length {length}, and states from {base.floor} on")
        super().check_slot(slot, length + base.offset, peak + base.offset)

    def check(self, lengths: dict[int, int], peaks: dict[int, int]) -> None:
        if strangers := self._bases.keys() - lengths.keys():
            raise IntegrityError(f"slots that are not open have states ahead of them: {sorted(strangers)}")
        super().check(lengths, peaks)
