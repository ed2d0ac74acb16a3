"""Where a recurrence finds its states, and leaves them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from memory.blocks.arrays import Int64s
from memory.blocks.staging import is_recording
from memory.errors import StepError
from memory.interface import Packed
from memory.kernels import Kernels, Prepared, StateSlots, Tail
from memory.sequences.folding import Columns
from memory.specs import RecurrentSpec


class States:
    """Where a recurrence finds its start states and leaves its end states, for S runs of packed rows.

    A recurrence in plain torch uses `start()` and `end(...)`; one with kernels uses `slots(j)` and `written()`.

    Attributes:
        cu_rows: (S + 1,) run i covers rows [cu_rows[i], cu_rows[i + 1]); int64 on the host.
    """

    __slots__ = ("_begins", "cu_rows", "flats", "is_written", "kernels", "sources", "spec", "tails", "targets")

    def __init__(self, spec: RecurrentSpec, kernels: Kernels, flats: list[Prepared], run: Run, tails: list[Tail] | None = None) -> None:
        self.spec = spec
        self.kernels = kernels
        self.flats = flats
        self.cu_rows = run.cu_rows
        self._begins = run.begins
        self.sources = [run.sources[flat.itemsize] for flat in flats]
        self.targets = [run.targets[flat.itemsize] for flat in flats]
        self.tails = tails
        self.is_written = False

    @property
    def begins(self) -> Int64s:
        """(S,) position of each run's first row; int64 on the host. Raises StepError while a step is recorded, which stands for others."""
        if is_recording():
            raise StepError(f"{self.spec.family!r} asks the host for positions, and a step that is recorded serves others as well")
        return self._begins

    def slots(self, index: int) -> StateSlots:
        """Where state tensor `index` begins and ends, for kernels that read and write it in place."""
        state = self.spec.states[index]
        tail = None if self.tails is None else self.tails[index]
        return StateSlots(self.cu_rows, self.flats[index], self.sources[index], self.targets[index], state.shape, state.initial, tail)

    def start(self) -> tuple[Tensor, ...]:
        """The start states, (S, *shape) each: copies. Those that name a dtype come in float32, however few bits they are kept in."""
        if self.tails is not None:
            raise StepError(f"states of {self.spec.family!r} stand behind a tail; take `slots`, or give its StateTensors no `ring`")
        tensors = (
            self.kernels.read_rows(flat, source, state.shape, state.initial)
            for flat, source, state in zip(self.flats, self.sources, self.spec.states, strict=True)
        )
        return tuple(t if state.dtype is None else t.float() for t, state in zip(tensors, self.spec.states, strict=True))

    def end(self, *tensors: Tensor) -> States:
        """Write the end states, (S, *shape) each."""
        if len(tensors) != len(self.spec.states):
            names = ", ".join(state.name for state in self.spec.states)
            raise StepError(f"{self.spec.family!r} ends in {len(tensors)} states; give all of {names}, in this order")
        for flat, target, state, tensor in zip(self.flats, self.targets, self.spec.states, tensors, strict=True):
            if tensor.shape != (len(target), *state.shape):
                raise StepError(f"end state {state.name!r} has shape {tuple(tensor.shape)}, not {(len(target), *state.shape)}")
            self.kernels.write_rows_(flat, target, tensor.reshape(len(target), -1))
        return self.written()

    def written(self) -> States:
        """Say that a kernel has written the end states in place."""
        self.is_written = True
        return self


class Recurrence(Protocol):
    """A fold over rows, owned by a layer of a model: state, y = f(state, row)."""

    def __call__(self, states: States, rows: Tensor) -> tuple[Tensor, States]:
        """Run rows (T, *row_shape), packed by states.cu_rows, from the start states.

        Returns outputs (T, ...) and `states` with its end states written (`states.end` or, for kernels, in place).
        """
        ...


@dataclass(frozen=True)
class Run:
    """Some recurrence runs of a step that do not depend on each other; the same for every recurrence.

    Attributes:
        cu_rows: (n + 1,).
        begins: (n,) position of the first row.
        sources, targets: element size in bytes -> (n,) element offset of the start and end state's block.
        tail_rows: for rows that come from tails: elements a row -> (rows,) element offset; None if the rows are new.
        new_rows: (rows,) packed index of each new row; None if they are all of them, in order.
    """

    cu_rows: Int64s
    begins: Int64s
    sources: dict[int, Prepared]
    targets: dict[int, Prepared]
    tail_rows: dict[int, Prepared] | None
    new_rows: Tensor | None


@dataclass(frozen=True)
class RecurrentPlan:
    """Blocks set aside for a step, and what to run.

    Attributes:
        before, after: of each request (S,), now and once all tokens are kept.
        fresh: ids of the blocks allocated for the step, NOTHING elsewhere: (4, S) for body, head, kept and tail.
        runs: in the order in which they must run.
        writes: packed indices of the new rows that go into tails, and elements a row -> element offset of each.
    """

    packed: Packed
    before: Columns
    after: Columns
    fresh: Int64s
    runs: list[Run]
    writes: tuple[Tensor, dict[int, Prepared]]
