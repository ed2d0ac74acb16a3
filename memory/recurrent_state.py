"""Keeps the states of recurrent layers: a body, a tail of the newest rows, and a head, which can be computed again.

`memory.state.tails` holds the blocks, and `memory.state.readers` runs a recurrence over them.
`memory.sequences.folding` decides when rows fold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from torch import Tensor

from hybridmem.memory.blocks.scoped import without_gradients
from hybridmem.memory.errors import DropError, StepError
from hybridmem.memory.interface import Dropped, Packed
from hybridmem.memory.state.access import Recurrence, RowWrites
from hybridmem.memory.state.readers import Reader, ReadsT
from hybridmem.memory.state.tail_blocks import TailBlocks
from hybridmem.memory.state.tails import TailStep, TailTable


@dataclass(eq=False)
class RecurrentPlan(Generic[ReadsT]):
    """Holds the blocks allocated for a step, what recurrences read, and where the step's rows are written."""

    step: TailStep
    reads: ReadsT
    writes: RowWrites

    @property
    def can_capture(self) -> bool:
        # If all segments have the same length, kernels and row counts follow from shapes alone.
        return all(segments.is_even for segments in self.reads.segments)


class RecurrentState(TailTable[RecurrentPlan[ReadsT]], Generic[ReadsT]):
    """Keeps body, tail and head of the recurrences of all layers: a `memory.interface.LayerMemory`.

    Args:
        blocks: its layout. The members of a block are the recurrences, in the order in which `recur` numbers them.
        reader: runs recurrences over these blocks.
    Attributes:
        recurrences: the function that ran each recurrence last, by its number.
    """

    def __init__(self, blocks: TailBlocks, reader: Reader[ReadsT]) -> None:
        super().__init__(blocks)
        self.reader = reader
        self.recurrences: dict[int, Recurrence] = {}

    # The methods below plan, begin and end steps.

    def plan(self, packed: Packed) -> RecurrentPlan[ReadsT]:
        step = self.plan_blocks(packed)
        try:
            return RecurrentPlan(step, self.reader.plan(step), self.reader.access.plan_writes(step))
        except BaseException:
            self.free_blocks(step)
            raise

    def recur(self, plan: RecurrentPlan[ReadsT], index: int, rows: Tensor, recurrence: Recurrence) -> Tensor:
        """Run recurrence `index` over the step's rows (T, *row_shape), remember them, and return outputs (T, ...)."""
        self.require_rows(index, rows, len(plan.step.packed.token_ids))
        outputs = self.reader.run(plan.reads, index, rows, recurrence)
        self.reader.access.write_rows(index, plan.writes, rows)
        return outputs

    def remember(self, index: int, recurrence: Recurrence) -> None:
        """Remember the function that runs recurrence `index`, because `slim` may call it between steps."""
        self.recurrences[index] = recurrence

    def slim(self, slot: int, length: int) -> None:
        """Reduce a slot of this length to the state at its position. If there is no such state, it is computed.

        If no model has run on this memory yet, so that no recurrence can compute the state, the slot stays as it is.
        Raises CapacityError. Cost: nothing if the state exists; else each recurrence runs over the tail.
        """
        specs, is_dry = self.reader.specs, self.store.is_dry
        can_run = is_dry or len(self.recurrences) == len(specs)
        step = self.plan_state(slot, length) if can_run else None
        if step is not None and not is_dry:
            try:
                with without_gradients():
                    reads = self.reader.plan_state(step)
                    for index in range(len(specs)):
                        self.reader.write_state(reads, index, self.recurrences[index])
            except BaseException:
                self.free_blocks(step)
                raise
        self.hold_only_state(slot, length, step)

    def require_rows(self, index: int, rows: Tensor, n_tokens: int) -> None:
        """Raise StepError unless rows have the shape, dtype and device of recurrence `index`."""
        spec, device = self.reader.specs[index], self.store.device
        expected = (n_tokens, *spec.row_shape)
        if rows.shape != expected:
            raise StepError(f"rows have shape {tuple(rows.shape)}; {spec.family!r} expects {expected}")
        if (dtype := self.blocks.dtype) != rows.dtype or rows.device.type != device.type:
            raise StepError(f"rows are {rows.dtype} on {rows.device}; this memory holds {dtype} on {device}")

    # The methods below drop tokens. States still contain dropped tokens, so a position offset says how far states are
    # ahead.

    def plan_drop(self, dropped: Dropped) -> Dropped:
        if not dropped.approximate:
            families = ", ".join(sorted({spec.family for spec in self.reader.specs}))
            raise DropError(
                f"tokens [{dropped.start}, {dropped.end}) cannot be taken out of recurrent states ({families}), which "
                f"hold all in one; roll back to {dropped.start} and feed the rest again, or give approximate=True: "
                "then these layers go on remembering them",
                start=dropped.start, end=dropped.end,
            )  # fmt: skip
        return dropped

    def bytes_to_drop(self, dropped: Dropped) -> int:
        """Return 0: states stay where they are."""
        return 0

    def drop(self, plan: Dropped) -> None:
        self.add_offset(plan)

    def abandon_drop(self, plan: Dropped) -> None:
        """Do nothing, because `plan_drop` has allocated nothing."""
