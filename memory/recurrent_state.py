"""The memory of recurrent layers: a body state, a tail of raw rows, and a head state that is only a cache.

For each sequence, all recurrences of all layers together hold

    body   their states after tokens [0, body_at): what `rollback` can always come back to
    tail   the raw input rows of tokens [body_at, length), in a ring
    head   their states after tokens [0, head_at), private to the sequence: a shortcut, never needed

A step runs each recurrence from the head (or, if a rollback made it stale, from the body over the tail rows) over the new
rows. When the sequence has gone far enough the body moves up: the rows it passes are run from the old body into a new
block, so an abort loses nothing. Blocks are reference-counted and never written while shared.

`memory.folding` says when the body moves and what must run; here are the blocks and the bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.arena import BlockLayout, BlockPool, Store
from memory.batch import ranges
from memory.errors import IntegrityError, StepError
from memory.folding import NOTHING, Columns, Pass, StateAddresses, TailGrid, schedule
from memory.interface import Int64s, Packed, Recurrence, RecurrentSpec
from memory.kernels import Kernels, StateSlots, select_kernels

NO_ROWS: Int64s = np.zeros(0, np.int64)


class States:
    """Where a recurrence finds its start states and leaves its end states, for S runs of packed rows.

    A recurrence in plain torch uses `start()` and `end(...)`; one with kernels uses `slots(j)` and `written()`.

    Attributes:
        cu_rows: (S + 1,) run i covers rows [cu_rows[i], cu_rows[i + 1]); int64 on the host.
    """

    __slots__ = ("cu_rows", "flats", "is_written", "kernels", "sources", "spec", "targets")

    def __init__(self, spec: RecurrentSpec, kernels: Kernels, flats: list[Tensor], run: Run) -> None:
        self.spec = spec
        self.kernels = kernels
        self.flats = flats
        self.cu_rows = run.cu_rows
        self.sources = [run.sources[flat.element_size()] for flat in flats]
        self.targets = [run.targets[flat.element_size()] for flat in flats]
        self.is_written = False

    def slots(self, index: int) -> StateSlots:
        """Where state tensor `index` begins and ends, for kernels that read and write it in place."""
        state = self.spec.states[index]
        return StateSlots(self.cu_rows, self.flats[index], self.sources[index], self.targets[index], state.shape, state.initial)

    def start(self) -> tuple[Tensor, ...]:
        """The start states, (S, *shape) each: copies."""
        return tuple(
            self.kernels.read_rows(flat, source, state.shape, state.initial)
            for flat, source, state in zip(self.flats, self.sources, self.spec.states, strict=True)
        )

    def end(self, *tensors: Tensor) -> States:
        """Write the end states, (S, *shape) each."""
        for flat, target, state, tensor in zip(self.flats, self.targets, self.spec.states, tensors, strict=True):
            if tensor.shape != (len(target), *state.shape):
                raise StepError(f"end state {state.name!r} has shape {tuple(tensor.shape)}, not {(len(target), *state.shape)}")
            self.kernels.write_rows_(flat, target, tensor.reshape(len(target), -1))
        return self.written()

    def written(self) -> States:
        """Say that a kernel has written the end states in place."""
        self.is_written = True
        return self


@dataclass(frozen=True)
class Run:
    """Some recurrence runs of a step that do not depend on each other; the same for every recurrence.

    Attributes:
        cu_rows: (n + 1,).
        sources, targets: element size in bytes -> (n,) element offset of the start and end state's block.
        tail_rows: for rows that come from tails: elements a row -> (rows,) element offset; None if the rows are new.
        new_rows: (rows,) packed index of each new row; None if they are all of them, in order.
    """

    cu_rows: Int64s
    sources: dict[int, Tensor]
    targets: dict[int, Tensor]
    tail_rows: dict[int, Tensor] | None
    new_rows: Tensor | None


@dataclass(frozen=True)
class RecurrentPlan:
    """Blocks set aside for a step, and what to run.

    Attributes:
        before, after: of each request (S,), now and once all tokens are kept.
        runs: in the order in which they must run.
        writes: packed indices of the new rows that go into tails, and elements a row -> element offset of each.
    """

    packed: Packed
    before: Columns
    after: Columns
    runs: list[Run]
    writes: tuple[Tensor, dict[int, Tensor]]


class RecurrentState:
    """Body, tail and head of all recurrences of all layers: `memory.interface.LayerMemory`.

    Args:
        specs: the recurrent specs, in the order that `recur` numbers them.
        dtype: of rows, and of state tensors that name none.
    """

    def __init__(self, specs: list[RecurrentSpec], dtype: torch.dtype, grid: TailGrid, store: Store) -> None:
        self.grid = grid
        self.state_layout = BlockLayout.of([(t.shape, t.dtype or dtype) for s in specs for t in s.states])
        self.tail_layout = BlockLayout.of([((grid.tail_rows, *s.row_shape), dtype) for s in specs])
        self.bodies = store.make_pool("body states", self.state_layout.block_bytes, from_top=True)
        self.heads = store.make_pool("head states", self.state_layout.block_bytes, from_top=True)
        self.tails = store.make_pool("tails", self.tail_layout.block_bytes, from_top=True)
        self._specs = specs
        self._dtype = dtype
        self._store = store
        self._kernels: Kernels = select_kernels(store.device, dtype, *(f.dtype for f in self.state_layout.fields))
        self._slots = Columns.empty(16)
        self._open_plans: dict[int, RecurrentPlan] = {}
        self._state_sizes = {field.dtype.itemsize for field in self.state_layout.fields}
        self._row_elements = [math.prod(s.row_shape) for s in specs]
        self._state_flats: list[list[Tensor]] = []
        self._tail_flats: list[Tensor] = []
        if not store.is_dry:
            fields = iter(self.state_layout.fields)
            self._state_flats = [[store.flat(next(fields)) for _ in s.states] for s in specs]
            self._tail_flats = [store.flat(field) for field in self.tail_layout.fields]

    @property
    def sized_pools(self) -> list[tuple[BlockPool, int]]:
        state, tail = self.state_layout.padding_bytes, self.tail_layout.padding_bytes
        return [(self.bodies, state), (self.heads, state), (self.tails, tail)]

    @property
    def least_bytes(self) -> int:
        """A head, a tail, and two bodies while the body moves; without a window only the two bodies."""
        n_states = 3 if self.grid.tail_rows else 2
        return n_states * self.state_layout.block_bytes + self.tail_layout.block_bytes

    @property
    def pools(self) -> tuple[BlockPool, BlockPool, BlockPool]:
        """In the order of `Columns.blocks`."""
        return self.bodies, self.heads, self.tails

    # Steps

    def plan(self, packed: Packed) -> RecurrentPlan:
        self._grow_to(int(packed.slots.max()) + 1)
        before = self._slots.take(packed.slots)
        body_at = self.horizon_after(packed)
        moves = body_at > before.body_at
        has_head = packed.ends > body_at
        own_head = (before.head >= 0) & (self.heads.counts[before.head] == 1)
        fits = (packed.ends - before.body_at <= self.grid.tail_rows) & (before.tail >= 0)
        own_tail = fits & (self.tails.counts[before.tail] == 1)
        wanted = (moves, has_head & ~own_head, np.full(len(moves), self.grid.tail_rows > 0) & ~own_tail)
        blocks = [ids.copy() for ids in before.blocks()]
        taken: list[tuple[BlockPool, Int64s]] = []
        try:
            for pool, ids, mask in zip(self.pools, blocks, wanted, strict=True):
                ids[mask] = fresh = pool.allocate(int(mask.sum()))
                taken.append((pool, fresh))
            plan = self._plan_runs(packed, before, Columns(body_at, blocks[0], np.where(has_head, packed.ends, NOTHING), *blocks[1:]))
        except BaseException:
            for pool, fresh in taken:
                pool.release(fresh)
            raise
        self._open_plans[id(plan)] = plan
        return plan

    def _plan_runs(self, packed: Packed, before: Columns, after: Columns) -> RecurrentPlan:
        states = StateAddresses(
            self._address(self.bodies, before.body), self._address(self.heads, before.head),
            self._address(self.bodies, after.body), self._address(self.heads, after.head),
        )  # fmt: skip
        runs = [self._run(one_pass, packed, before.tail) for one_pass in schedule(packed, before, after, states)]
        return RecurrentPlan(packed, before, after, runs, self._writes(packed, after))

    def _run(self, one_pass: Pass, packed: Packed, tails: Int64s) -> Run:
        """A pass with its rows and states found for the kernels."""
        counts = one_pass.end - one_pass.begin
        cu_rows = np.concatenate([[0], np.cumsum(counts)])
        tail_rows = new_rows = None
        if one_pass.is_replay:
            tail_rows = self._ring(np.repeat(tails[one_pass.requests], counts), ranges(one_pass.begin, one_pass.end))
        elif cu_rows[-1] < len(packed.token_ids):
            shift = (packed.cu_seqlens[:-1] - packed.starts)[one_pass.requests]
            new_rows = self._store.upload(ranges(one_pass.begin + shift, one_pass.end + shift))
        return Run(cu_rows, self._elements(one_pass.source), self._elements(one_pass.target), tail_rows, new_rows)

    def _writes(self, packed: Packed, after: Columns) -> tuple[Tensor, dict[int, Tensor]]:
        """The new rows behind the new body go into the tail."""
        if not self.grid.tail_rows:
            return self._store.upload(NO_ROWS), {}
        begin = np.maximum(packed.starts, after.body_at)
        shift = packed.cu_seqlens[:-1] - packed.starts
        offsets = self._ring(np.repeat(after.tail, packed.ends - begin), ranges(begin, packed.ends))
        return self._store.upload(ranges(begin + shift, packed.ends + shift)), offsets

    def _ring(self, tails: Int64s, positions: Int64s) -> dict[int, Tensor]:
        """Elements a row -> element offset of each position's row in its tail block."""
        block = self.tails.addresses[tails] // self._dtype.itemsize
        slot = positions % self.grid.tail_rows
        return {size: self._store.upload(block + slot * size) for size in set(self._row_elements)}

    def _elements(self, addresses: Int64s) -> dict[int, Tensor]:
        return {size: self._store.upload(np.where(addresses < 0, NOTHING, addresses // size)) for size in self._state_sizes}

    @staticmethod
    def _address(pool: BlockPool, ids: Int64s) -> Int64s:
        return np.where(ids < 0, NOTHING, pool.addresses[ids])

    def begin(self, plan: RecurrentPlan) -> None:
        before, after = plan.before, plan.after
        keeps_rows = (before.tail >= 0) & (after.tail != before.tail) & (after.body_at < plan.packed.starts)
        for i in np.flatnonzero(keeps_rows).tolist():
            old, new = self.tails.addresses[before.tail[i]], self.tails.addresses[after.tail[i]]
            self._store.copy(int(old), int(new), self.tails.block_bytes)
        in_place = (before.head >= 0) & (after.head == before.head)
        self._slots.head_at[plan.packed.slots[in_place]] = NOTHING

    def recur(self, plan: RecurrentPlan, index: int, rows: Tensor, recurrence: Recurrence) -> Tensor:
        """Run recurrence `index` over the step's rows (T, *row_shape) and remember them; its outputs (T, ...)."""
        spec, n_tokens = self._specs[index], len(plan.packed.token_ids)
        if rows.shape != (n_tokens, *spec.row_shape):
            raise StepError(f"rows have shape {tuple(rows.shape)}; {spec.family!r} expects {(n_tokens, *spec.row_shape)}")
        if rows.dtype != self._dtype or rows.device.type != self._store.device.type:
            raise StepError(f"rows are {rows.dtype} on {rows.device}; this memory holds {self._dtype} on {self._store.device}")
        outputs: Tensor | None = None
        for run in plan.runs:
            states = States(spec, self._kernels, self._state_flats[index], run)
            if run.tail_rows is not None:
                offsets = run.tail_rows[self._row_elements[index]]
                run_rows = self._kernels.read_rows(self._tail_flats[index], offsets, spec.row_shape, 0.0)
            else:
                run_rows = rows if run.new_rows is None else rows[run.new_rows]
            y, ended = recurrence(states, run_rows)
            if ended is not states or not states.is_written:
                raise StepError(f"the recurrence {spec.family!r} did not write its end states; return `y, states.end(...)`")
            if run.new_rows is not None:
                outputs = y.new_empty(n_tokens, *y.shape[1:]) if outputs is None else outputs
                outputs[run.new_rows] = y
            elif run.tail_rows is None:
                outputs = y
        indices, targets = plan.writes
        if len(indices):
            kept = rows if len(indices) == n_tokens else rows[indices]
            self._kernels.write_rows_(self._tail_flats[index], targets[self._row_elements[index]], kept.reshape(len(indices), -1))
        assert outputs is not None, "every new row belongs to run 3 or 4"
        return outputs

    def commit(self, plan: RecurrentPlan, kept: Int64s) -> None:
        self.abort_some(plan, kept == 0)
        keeps = kept > 0
        slots = plan.packed.slots[keeps]
        for pool, old, new in zip(self.pools, plan.before.blocks(), plan.after.blocks(), strict=True):
            pool.release(old[keeps & (old != new) & (old >= 0)])
        self._slots.put(slots, plan.after.take(np.flatnonzero(keeps)))
        partly = keeps & (kept < plan.packed.counts)
        self._slots.head_at[plan.packed.slots[partly]] = NOTHING

    def abort(self, plan: RecurrentPlan) -> None:
        self.abort_some(plan, np.ones(len(plan.packed.slots), np.bool_))

    def abort_some(self, plan: RecurrentPlan, dropped: NDArray[np.bool_]) -> None:
        """Close the plan, giving back the blocks that were set aside for the requests in `dropped`."""
        del self._open_plans[id(plan)]
        for pool, old, new in zip(self.pools, plan.before.blocks(), plan.after.blocks(), strict=True):
            pool.release(new[dropped & (old != new)])

    # Sequences

    def share(self, sources: Int64s, targets: Int64s) -> None:
        self._grow_to(int(max(sources.max(), targets.max())) + 1)
        shared = self._slots.take(sources)
        for pool, ids in zip(self.pools, shared.blocks(), strict=True):
            pool.retain(ids[ids >= 0])
        for slot in targets.tolist():
            self.release(slot)
        self._slots.put(targets, shared)

    def truncate(self, slot: int, to: int) -> None:
        self._grow_to(slot + 1)
        if self._slots.head_at[slot] > to:
            self._slots.head_at[slot] = NOTHING

    def release(self, slot: int) -> None:
        self._grow_to(slot + 1)
        for pool, ids in zip(self.pools, self._slots.blocks(), strict=True):
            if ids[slot] >= 0:
                pool.release(ids[slot : slot + 1])
        self._slots.put(np.array([slot]), Columns.empty(1))

    def horizon(self, slot: int) -> int:
        return int(self._slots.body_at[slot]) if slot < len(self._slots.body_at) else 0

    def horizon_after(self, packed: Packed) -> Int64s:
        return self.grid.body_at(packed.peaks)

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        self._grow_to(slot + 1)
        columns = self._slots.take(np.array([slot])).blocks()
        return {pool.name: ids[ids >= 0] for pool, ids in zip(self.pools, columns, strict=True)}

    def _grow_to(self, n_slots: int) -> None:
        n_missing = n_slots - len(self._slots.body_at)
        if n_missing > 0:
            more = Columns.empty(max(n_missing, n_slots))
            pairs = zip(self._slots.arrays(), more.arrays(), strict=True)
            self._slots = Columns(*(np.concatenate(pair) for pair in pairs))

    def check(self, lengths: dict[int, int], peaks: dict[int, int]) -> None:
        for slot, length in lengths.items():
            self._check_slot(slot, length, peaks[slot])
        everyone = np.arange(len(self._slots.body_at))
        strangers = np.setdiff1d(everyone, np.fromiter(lengths, np.int64, len(lengths)))
        if any((ids[strangers] >= 0).any() for ids in self._slots.blocks()):
            raise IntegrityError("states or tails are held for slots that are not open")
        for i, pool in enumerate(self.pools):
            held = self._slots.blocks()[i]
            fresh = [new[old != new] for old, new in ((p.before.blocks()[i], p.after.blocks()[i]) for p in self._open_plans.values())]
            pool.check(np.concatenate([held[held >= 0], *fresh]))

    def _check_slot(self, slot: int, length: int, peak: int) -> None:
        self._grow_to(slot + 1)
        body_at, body, head_at, head, tail = (int(array[slot]) for array in self._slots.arrays())
        expected = int(self.grid.body_at(np.array(peak)))
        if body_at != expected:
            raise IntegrityError(f"slot {slot} has its body at {body_at}, its furthest position {peak} puts it at {expected}")
        if not body_at <= length <= peak or (body >= 0) != (body_at > 0):
            raise IntegrityError(f"slot {slot} has length {length}, furthest {peak}, body {body} at {body_at}")
        if length > body_at and (tail < 0 or length - body_at > self.grid.tail_rows):
            raise IntegrityError(f"slot {slot} cannot hold rows [{body_at}, {length}) in tail {tail}")
        if head_at > length or (head_at >= 0 and head < 0):
            raise IntegrityError(f"slot {slot} has length {length} and head {head} at {head_at}")
