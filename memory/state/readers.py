"""Runs recurrences over bodies and tails.

A `HeadReader` keeps a head, which is a state at the newest position. A `TailReader` has no head, and reads body and
tail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s, ranges, starts_of
from hybridmem.memory.blocks.staging import is_placed
from hybridmem.memory.errors import SpecError, StepError
from hybridmem.memory.interface import Packed
from hybridmem.memory.kernels import Prepared, Tail
from hybridmem.memory.sequences.folding import NOTHING, Pass, StateAddresses, schedule
from hybridmem.memory.specs import RecurrentSpec
from hybridmem.memory.state.access import BlockAccess, Recurrence, Segments, States
from hybridmem.memory.state.tail_blocks import TailBlocks
from hybridmem.memory.state.tails import TailStep


class Reads(Protocol):
    """Declares what the recurrences of a step read and write."""

    @property
    def segments(self) -> list[Segments]:
        """Return the segments of each kernel call, in the order of the calls."""
        ...


ReadsT = TypeVar("ReadsT", bound=Reads)


class Reader(Protocol[ReadsT]):
    """Runs the recurrences whose blocks `TailBlocks` describes.

    Attributes:
        specs: the specs of the recurrences, in the order of the members of `TailBlocks`.
    """

    specs: list[RecurrentSpec]
    access: BlockAccess

    def plan(self, step: TailStep) -> ReadsT:
        """Find what the step reads and writes. It is the same for every recurrence."""
        ...

    def run(self, reads: ReadsT, index: int, rows: Tensor, recurrence: Recurrence) -> Tensor:
        """Run recurrence `index` over the step's rows (T, *row_shape), and return its outputs (T, ...)."""
        ...

    def plan_state(self, step: TailStep) -> ReadsT:
        """Find what `write_state` reads and writes, for a step of `TailTable.plan_state`."""
        ...

    def write_state(self, reads: ReadsT, index: int, recurrence: Recurrence) -> None:
        """Run recurrence `index` over the tail, and write the state at the new body."""
        ...


@dataclass(eq=False)
class HeadReads:
    """Holds the segments of each kernel call of a step, in the order of the calls."""

    segments: list[Segments]


class HeadReader:
    """Runs recurrences with a head, which is a state at the newest position. It is a `Reader`.

    A step begins with the head. If a rollback has made the head stale, the step first runs the tail's rows from the
    body. If the body moves, the rows between its old and new position are run from the old body, and the new body is
    written to a new block.
    """

    def __init__(self, specs: list[RecurrentSpec], blocks: TailBlocks) -> None:
        self.specs = specs
        self.access = BlockAccess(blocks)
        self._blocks = blocks

    def plan(self, step: TailStep) -> HeadReads:
        """Find what the step reads and writes."""
        packed, before, after = step.packed, step.before, step.after
        ids = np.concatenate([before.states, after.states])
        found = np.where(ids < 0, NOTHING, self._blocks.states.addresses[ids])
        at_start = found[4] if step.holds_start is None else np.where(step.holds_start, found[1], found[4])
        states = StateAddresses(*np.vstack([found, at_start]))
        passes = schedule(packed, before, after, states)
        return HeadReads([self._run(one_pass, packed, before.tail) for one_pass in passes])

    def _run(self, one_pass: Pass, packed: Packed, tails: Int64s) -> Segments:
        """Find the rows and states of a pass for the kernels."""
        access = self.access
        counts = one_pass.end - one_pass.begin
        cu_rows = starts_of(counts)
        tail_rows = new_rows = None
        if one_pass.is_replay:
            tail_rows = access.ring(np.repeat(tails[one_pass.requests], counts), ranges(one_pass.begin, one_pass.end))
        elif cu_rows[-1] < len(packed.token_ids):
            # Adding this number turns positions into packed indices.
            to_packed = (packed.cu_seqlens[:-1] - packed.starts)[one_pass.requests]
            new_rows = self._places(ranges(one_pass.begin + to_packed, one_pass.end + to_packed))
        source, target = access.elements(one_pass.source), access.elements(one_pass.target)
        return Segments(self._blocks.store.place(cu_rows), one_pass.begin, source, target, tail_rows, new_rows)

    def _places(self, new_rows: Int64s) -> Tensor | slice:
        """Return packed indices, which ascend, as a slice if they are consecutive, because then no row is copied.

        If steps are recorded, the result is always a tensor, because a recording is replayed for other rows.
        """
        store, first, last = self._blocks.store, int(new_rows[0]), int(new_rows[-1])
        if not is_placed(store.device) and last - first == len(new_rows) - 1:
            return slice(first, last + 1)
        return store.upload(new_rows)

    def run(self, reads: HeadReads, index: int, rows: Tensor, recurrence: Recurrence) -> Tensor:
        spec, access = self.specs[index], self.access
        outputs: Tensor | None = None
        for own in reads.segments:
            states = States(spec, access.kernels, access.states[index], own)
            if own.tail_rows is not None:
                own_rows = access.read_rows(index, own.tail_rows)
            else:
                own_rows = rows if own.new_rows is None else rows[own.new_rows]
            y = run_one(states, own_rows, recurrence)
            if own.new_rows is not None:
                outputs = y.new_empty(len(rows), *y.shape[1:]) if outputs is None else outputs
                outputs[own.new_rows] = y
            elif own.tail_rows is None:
                outputs = y
        assert outputs is not None, "`schedule` puts every new row into a pass"
        return outputs

    def plan_state(self, step: TailStep) -> HeadReads:
        before, after, addresses = step.before, step.after, self._blocks.states.addresses
        source, target = np.where(before.body < 0, NOTHING, addresses[before.body]), addresses[after.body]
        one_pass = Pass(True, np.zeros(1, np.int64), before.body_at, after.body_at, source, target)
        return HeadReads([self._run(one_pass, step.packed, before.tail)])

    def write_state(self, reads: HeadReads, index: int, recurrence: Recurrence) -> None:
        access, (own,) = self.access, reads.segments
        assert own.tail_rows is not None, "`plan_state` reads tails"
        states = States(self.specs[index], access.kernels, access.states[index], own)
        run_one(states, access.read_rows(index, own.tail_rows), recurrence)


@dataclass(eq=False)
class TailReads:
    """Holds what a step reads and writes where each request's new rows are one segment, after its tail.

    Attributes:
        sources, targets: element size in bytes -> (S,) element offsets of the tail blocks that are read and written.
        firsts, counts, folds: the fields of `memory.kernels.Tail`.
    """

    own: Segments
    sources: dict[int, Prepared]
    targets: dict[int, Prepared]
    firsts: Prepared
    counts: Prepared
    folds: Prepared

    @property
    def segments(self) -> list[Segments]:
        return [self.own]


class TailReader:
    """Runs recurrences that write states only when the body moves (fold mode "defer"). It is a `Reader`.

        position 0 ......... body_at ............................ start ............ end
                              | tail: rows, and what each token did --- | new rows of the step |

    There is no head, and no row runs twice. In a step, a kernel reads the body's state once. From rings it reads what
    later tokens have added to that state (`memory.kernels.Tail`). When the body moves, the same kernel writes the state
    at the body's new position to a fresh block. On hardware whose memory bandwidth is the limit, a decode step moves
    half the bytes that it moves with heads (ReplaySSM, Dao AI Lab 2026).

    Raises SpecError if a recurrence has a state that is needed at each token (`StateTensor.ring`).
    """

    def __init__(self, specs: list[RecurrentSpec], blocks: TailBlocks) -> None:
        if unable := sorted({spec.family for spec in specs if not spec.can_defer}):
            names = ", ".join(unable)
            raise SpecError(
                f"fold='defer' is not for {names}: a state of theirs is needed at each token; choose 'replay'"
            )
        self.specs = specs
        self.access = BlockAccess(blocks)
        self._blocks = blocks
        self._part_sizes = {field.dtype.itemsize for field in blocks.tail_layout.fields}
        self._rings = list(map(self._rings_of, specs, self.access.tails))

    @staticmethod
    def _rings_of(spec: RecurrentSpec, flats: list[Prepared]) -> list[tuple[Prepared, ...]]:
        """Return for each state tensor the rings that a kernel reads with it: its own ones, or that of the rows."""
        has_rows = spec.has_rows(deferred=True)
        rows, parts = tuple(flats[:has_rows]), iter(flats[has_rows:])
        return [tuple(next(parts) for _ in state.ring or ()) or rows for state in spec.states]

    def plan(self, step: TailStep) -> TailReads:
        """Find the segments of the step's only kernel call."""
        packed, before, after = step.packed, step.before, step.after
        pools, place, elements = self._blocks, self.access.place, self.access.elements
        moves = after.body_at > before.body_at
        source = np.where(before.body < 0, NOTHING, pools.states.addresses[before.body])
        target = np.where(moves, pools.states.addresses[after.body], NOTHING)
        cu_rows = pools.store.place(packed.cu_seqlens)
        own = Segments(cu_rows, packed.starts, elements(source), elements(target), None, None)
        addresses = (pools.tails.addresses[before.tail], pools.tails.addresses[after.tail])
        old, new = ({size: place(blocks // size) for size in self._part_sizes} for blocks in addresses)
        counts, folds = packed.starts - before.body_at, after.body_at - before.body_at
        return TailReads(own, old, new, place(before.body_at), place(counts), place(folds))

    def run(self, reads: TailReads, index: int, rows: Tensor, recurrence: Recurrence) -> Tensor:
        access, tails = self.access, [self._tail(reads, flats) for flats in self._rings[index]]
        states = States(self.specs[index], access.kernels, access.states[index], reads.own, tails)
        return run_one(states, rows, recurrence)

    plan_state = plan

    def write_state(self, reads: TailReads, index: int, recurrence: Recurrence) -> None:
        # A recurrence need not work without rows, so it gets one row, whose output nobody reads.
        blocks = self._blocks
        row = torch.zeros(1, *self.specs[index].row_shape, dtype=blocks.dtype, device=blocks.store.device)
        self.run(reads, index, row, recurrence)

    def tails_of(self, reads: TailReads, index: int) -> list[Tail]:
        """Return what the kernels of recurrence `index` read of the tail, for each of its state tensors."""
        return [self._tail(reads, flats) for flats in self._rings[index]]

    def _tail(self, reads: TailReads, flats: tuple[Prepared, ...]) -> Tail:
        """Return what kernels read of the tail, with these rings."""
        sources, targets = (tuple(blocks[flat.itemsize] for flat in flats) for blocks in (reads.sources, reads.targets))
        return Tail(flats, sources, targets, self._blocks.rules.tail_rows, reads.firsts, reads.counts, reads.folds)


def run_one(states: States, rows: Tensor, recurrence: Recurrence) -> Tensor:
    """Call a recurrence. Raises StepError if it wrote no end states, or did not return one output for each row."""
    y, ended = recurrence(states, rows)
    if ended is not states or not states.is_written:
        raise StepError(
            f"the recurrence {states.spec.family!r} did not write its end states; return `y, states.end(...)`"
        )
    if y.shape[:1] != rows.shape[:1]:
        raise StepError(
            f"the recurrence {states.spec.family!r} gives outputs of shape {tuple(y.shape)} for {len(rows)} rows; give "
            "one for each"
        )
    return y
