"""Gives recurrences and kernels access to the states and rows that are in blocks."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from hybridmem.memory.blocks.arrays import EMPTY, Int64s, ranges
from hybridmem.memory.blocks.layout import BlockLayout
from hybridmem.memory.blocks.staging import Placed, object_to_replays
from hybridmem.memory.errors import StepError
from hybridmem.memory.kernels import Kernels, Prepared, StateSlots, Tail, select_kernels
from hybridmem.memory.kernels.eight_bits import LARGEST
from hybridmem.memory.specs import RecurrentSpec
from hybridmem.memory.state.tail_blocks import TailBlocks
from hybridmem.memory.state.tails import TailStep


class States:
    """Gives a recurrence the start states of S segments of packed rows, and stores their end states.

    A recurrence in plain torch uses `start()` and `end(...)`; one with kernels uses `slots(j)` and `written()`.

    Attributes:
        cu_rows: (S + 1,) int64 on the host. Segment i has rows [cu_rows[i], cu_rows[i + 1]).
        device_cu_rows: the same numbers on the device.
    """

    __slots__ = ("_begins", "_cu_rows", "flats", "is_written", "kernels", "sources", "spec", "tails", "targets")

    def __init__(
        self, spec: RecurrentSpec, kernels: Kernels, flats: list[Prepared], own: Segments,
        tails: list[Tail] | None = None,
    ) -> None:  # fmt: skip
        self.spec = spec
        self.kernels = kernels
        self.flats = flats
        self._cu_rows = own.cu_rows
        self._begins = own.begins
        self.sources = [own.sources[flat.itemsize] for flat in flats]
        self.targets = [own.targets[flat.itemsize] for flat in flats]
        self.tails = tails
        self.is_written = False

    @property
    def cu_rows(self) -> Int64s:
        return self._cu_rows.host

    @property
    def device_cu_rows(self) -> Tensor:
        return self._cu_rows.device

    @property
    def begins(self) -> Int64s:
        """Return (S,) the position of each segment's first row, int64 on the host.

        Raises StepError while a step is captured in a CUDA graph, because the graph is replayed at other positions.
        """
        object_to_replays(
            f"{self.spec.family!r} asks the host for positions, and a step that is recorded serves others as well"
        )
        return self._begins

    def slots(self, index: int) -> StateSlots:
        """Return where state tensor `index` starts and ends, for kernels that read and write it in place."""
        state = self.spec.states[index]
        tail = None if self.tails is None else self.tails[index]
        source, target = self.sources[index], self.targets[index]
        return StateSlots(self._cu_rows, self.flats[index], source, target, state.shape, state.initial, tail)

    def start(self) -> tuple[Tensor, ...]:
        """Return copies of the start states, (S, *shape) each.

        They are float32 if the spec of a state names a dtype.
        """
        if self.tails is not None:
            raise StepError(
                f"states of {self.spec.family!r} stand behind a tail; take `slots`, or give its StateTensors no `ring`"
            )
        tensors = list[Tensor]()
        for flat, source, state in zip(self.flats, self.sources, self.spec.states, strict=True):
            tensor = self.kernels.read_rows(flat, source, state.shape, state.initial)
            tensors.append(tensor if state.dtype is None else tensor.float())
        return tuple(tensors)

    def end(self, *tensors: Tensor) -> States:
        """Write the end states, (S, *shape) each."""
        if len(tensors) != len(self.spec.states):
            names = ", ".join(state.name for state in self.spec.states)
            raise StepError(f"{self.spec.family!r} ends in {len(tensors)} states; give all of {names}, in this order")
        for flat, target, state, tensor in zip(self.flats, self.targets, self.spec.states, tensors, strict=True):
            if tensor.shape != (len(target), *state.shape):
                raise StepError(
                    f"end state {state.name!r} has shape {tuple(tensor.shape)}, not {(len(target), *state.shape)}"
                )
            self.kernels.write_rows_(flat, target, tensor.reshape(len(target), -1))
        return self.written()

    def written(self) -> States:
        """Declare that a kernel has written the end states in place."""
        self.is_written = True
        return self


class Recurrence(Protocol):
    """Declares the function of a recurrent layer, (state, row) -> (state, output), run over many rows at once."""

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Run rows (T, *row_shape), packed by states.cu_rows, from the start states.

        Returns outputs (T, ...) and `states`, whose end states are written (by `states.end` or, for kernels, in place).
        """
        ...


class Segments(NamedTuple):
    """Describes those segments of a step that one kernel call runs, because none depends on another.

    The segments are the same for every recurrence.

    Attributes:
        cu_rows: (n + 1,) segment i has rows [cu_rows[i], cu_rows[i + 1]).
        begins: (n,) the position of each segment's first row.
        sources, targets: element size in bytes -> (n,) element offsets of the blocks with the start and the end states.
        tail_rows: elements per row -> (rows,) element offsets, if the rows come from tails. None if the rows are new.
        new_rows: (rows,) the packed index of each new row, or a slice if they are consecutive. None if they are all new
            rows of the step, in order.
    """

    cu_rows: Placed
    begins: Int64s
    sources: dict[int, Prepared]
    targets: dict[int, Prepared]
    tail_rows: dict[int, Prepared] | None
    new_rows: Tensor | slice | None

    @property
    def is_even(self) -> bool:
        """True if all segments have the same number of rows."""
        cu_rows = self.cu_rows.host
        return bool((np.diff(cu_rows) == cu_rows[1]).all())


class RowWrites(NamedTuple):
    """Says which of a step's new rows are written to tails, and where.

    Attributes:
        indices: (n,) the packed index of each row.
        targets: elements per row -> (n,) the element offsets to which they are written.
    """

    indices: Tensor
    targets: dict[int, Prepared]


class BlockAccess:
    """Finds the states and rows in the blocks of `TailBlocks`, for kernels.

    Attributes:
        states, tails: for each member, flat views: one for each of its state tensors, and one for each part of its
            tails. A view holds a block's tensor at the block's element offset. In a dry run there are no views.
        row_elements: how many elements each member's row has in a tail; 0 for a member without a row.
    """

    def __init__(self, blocks: TailBlocks, kernels: Kernels | None = None) -> None:
        self.blocks, self._store = blocks, blocks.store
        dtypes = (field.dtype for field in blocks.state_layout.fields if field.dtype not in LARGEST)
        self.kernels = kernels or select_kernels(blocks.store.device, blocks.dtype, *dtypes)
        self.states = self._flats(blocks.state_layout, [len(m.states) for m in blocks.members])
        self.tails = self._flats(blocks.tail_layout, [len(m.tail_parts) for m in blocks.members])
        self.row_elements = [0 if m.row_shape is None else math.prod(m.row_shape) for m in blocks.members]
        self._row_sizes = {math.prod(m.row_shape) for m in blocks.members if m.row_shape is not None}
        self._state_sizes = {field.dtype.itemsize for field in blocks.state_layout.fields}

    def _flats(self, layout: BlockLayout, counts: list[int]) -> list[list[Prepared]]:
        if self._store.is_dry:
            return []
        fields = iter(layout.fields)
        return [[self.kernels.prepare(self._store.flat(next(fields))) for _ in range(n)] for n in counts]

    def place(self, array: Int64s) -> Prepared:
        """Upload an array for kernels."""
        return self.kernels.prepare(self._store.upload(array))

    def elements(self, addresses: Int64s) -> dict[int, Prepared]:
        """Return, for each element size in bytes of a state tensor, the element offset of each address.

        The address NOTHING stays -1.
        """
        return {size: self.place(addresses // size) for size in self._state_sizes}

    def ring(self, tails: Int64s, positions: Int64s) -> dict[int, Prepared]:
        """Return, for each number of elements per row, the element offset in its tail block of each position's row."""
        block = self.blocks.tails.addresses[tails] // self.blocks.dtype.itemsize
        slot = positions % self.blocks.rules.tail_rows
        return {size: self.place(block + slot * size) for size in self._row_sizes}

    def plan_writes(self, step: TailStep) -> RowWrites:
        """Find the places in tails for the new rows after each new body."""
        packed, after = step.packed, step.after
        if not self.blocks.rules.tail_rows or not self._row_sizes:
            return RowWrites(self._store.upload(EMPTY), {})
        if packed.is_decode:
            return RowWrites(self._store.upload(np.arange(len(packed.starts))), self.ring(after.tail, packed.starts))
        begin, ends = np.maximum(packed.starts, self.blocks.rules.tail_at(after.body_at)), packed.ends
        counts = ends - begin
        # Adding this number turns positions into packed indices.
        to_packed: Int64s = packed.cu_seqlens[:-1] - packed.starts
        offsets = self.ring(np.repeat(after.tail, counts), ranges(begin, ends))
        return RowWrites(self._store.upload(ranges(begin + to_packed, ends + to_packed)), offsets)

    def write_rows(self, index: int, writes: RowWrites, rows: Tensor) -> None:
        """Write those rows of member `index` that `plan_writes` has chosen.

        `rows` are all rows of the step, (T, *row_shape).
        """
        n_elements, n_written = self.row_elements[index], writes.indices.shape[0]
        if n_elements and n_written:
            written = rows if n_written == rows.shape[0] else rows[writes.indices]
            written = written.reshape(n_written, n_elements)
            self.kernels.write_rows_(self.tails[index][0], writes.targets[n_elements], written)

    def read_rows(self, index: int, offsets: dict[int, Prepared]) -> Tensor:
        """Read rows of member `index` from tails, at offsets that `ring` returned: (n, *row_shape)."""
        row_shape = self.blocks.members[index].row_shape
        assert row_shape is not None, "its tails hold rows"
        return self.kernels.read_rows(self.tails[index][0], offsets[self.row_elements[index]], row_shape, 0.0)
