"""The memory of recurrent layers: a body state, a tail of raw rows, and a head state that is only a cache.

For each sequence, all recurrences of all layers together hold

    body   their states after tokens [0, body_at): what `rollback` can always come back to
    tail   the raw input rows of tokens [body_at, length), in a ring
    head   their states after tokens [0, head_at), private to the sequence: a shortcut, never needed
    kept   a head left where the body will move next: another shortcut

A step runs each recurrence from the head (or, if a rollback made it stale, from the body over the tail rows) over the new
rows. When the sequence has gone far enough the body moves up: a kept state becomes the body, or the rows it passes are run
from the old body into a new block, so an abort loses nothing. Blocks are reference-counted and never written while shared.

`memory.sequences.folding` says when the body moves and what must run; here are the blocks and the bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.blocks.arrays import EMPTY, Int64s, ranges, starts_of
from memory.blocks.holdings import Holding, LiveRows, Part, Record
from memory.blocks.layout import BlockLayout
from memory.blocks.pool import BlockPool
from memory.blocks.store import Store
from memory.errors import DropError, IntegrityError, StepError
from memory.interface import Dropped, Packed, Stretch
from memory.kernels import Kernels, Prepared, select_kernels
from memory.sequences.folding import EMPTY_COLUMN, NOTHING, Columns, Pass, StateAddresses, TailRules, schedule
from memory.specs import RecurrentSpec
from memory.state.access import Recurrence, RecurrentPlan, Run, States


class RecurrentState:
    """Body, tail and head of all recurrences of all layers: `memory.interface.LayerMemory`.

    Args:
        specs: the recurrent specs, in the order that `recur` numbers them.
        dtype: of rows, and of state tensors that name none.
        row_axes: of state tensors that hold rows, one by one: `Field.row_axis`.
    """

    def __init__(
        self,
        specs: list[RecurrentSpec],
        dtype: torch.dtype,
        rules: TailRules,
        store: Store,
        *,
        label: str = "",
        kernels: Kernels | None = None,
        row_axes: Sequence[int | None] | None = None,
    ) -> None:
        self.rules = rules
        self.state_layout = BlockLayout.of([(t.shape, t.dtype or dtype) for s in specs for t in s.states], row_axes)
        parts = [s.tail_parts(deferred=rules.defers) for s in specs]
        rings = [((rules.tail_rows, *shape), of or dtype) for part in parts for shape, of in part]
        self.tail_layout = BlockLayout.of(rings, [0] * len(rings))
        self.states = store.make_pool("states" + label, self.state_layout, from_top=True)
        self.tails = tails = store.make_pool("tails" + label, self.tail_layout, from_top=True)
        self._pools = (self.states, self.states, self.states, tails)  # of body, head, kept and tail
        self._specs = specs
        self._dtype = dtype
        self._store = store
        self._kernels = kernels or select_kernels(store.device, dtype, *(f.dtype for f in self.state_layout.fields))
        self._slots = Columns.empty(16)
        self._open_plans: dict[int, RecurrentPlan] = {}
        self._state_sizes = {field.dtype.itemsize for field in self.state_layout.fields}
        self._row_elements = [math.prod(s.row_shape) for s in specs]
        self._has_rows = [s.has_rows(deferred=rules.defers) for s in specs]
        self._row_sizes = {size for size, has_rows in zip(self._row_elements, self._has_rows, strict=True) if has_rows}
        self._part_counts = [len(part) for part in parts]
        self._state_flats: list[list[Prepared]] = []
        self._tail_flats: list[Prepared] = []
        if not store.is_dry:
            fields, prepare = iter(self.state_layout.fields), self._kernels.prepare
            self._state_flats = [[prepare(store.flat(next(fields))) for _ in s.states] for s in specs]
            firsts = itertools.accumulate(self._part_counts[:-1], initial=0)
            self._tail_flats = [prepare(store.flat(self.tail_layout.fields[first])) for first in firsts]

    @property
    def pools(self) -> list[tuple[BlockPool, BlockLayout]]:
        return [(self.states, self.state_layout), (self.tails, self.tail_layout)]

    @property
    def least_bytes(self) -> int:
        """A head, a tail, and two bodies while the body moves, or one and a kept state; without a window only two bodies."""
        n_states = 3 if self.rules.tail_rows and self.rules.has_heads else 2
        return n_states * self.state_layout.block_bytes + self.tail_layout.block_bytes

    def bytes_for(self, stretch: Stretch) -> Int64s:
        slots = stretch.slots
        self._grow_to(int(slots.max(initial=-1)) + 1)
        offsets = np.where(slots < 0, 0, self._slots.offset.take(slots))
        if np.count_nonzero(offsets):
            stretch = Stretch(slots, *(x + offsets for x in (stretch.starts, stretch.ends, stretch.peaks)))
        n_states, n_tails = self.rules.held_blocks(stretch)
        return n_states * self.states.block_bytes + n_tails * self.tails.block_bytes

    # Steps

    def plan(self, packed: Packed) -> RecurrentPlan:
        self._grow_to(int(packed.slots.max()) + 1)
        before = self._slots.take(packed.slots)
        if np.count_nonzero(before.offset):
            packed = _as_states_count(packed, before.offset)
        starts, ends, body_at = packed.starts, packed.ends, self.rules.body_at(packed.peaks)
        after, fresh = Columns(before.table.copy()), np.full((4, len(ends)), NOTHING)
        after.body_at[:] = body_at
        has_head = (ends > body_at) & self.rules.has_heads
        after.head_at[:] = np.where(has_head, ends, NOTHING)
        moves = body_at > before.body_at
        if np.count_nonzero(moves):  # a kept state that the body reaches becomes the body; one that it has passed is of no use
            is_kept, is_passed = moves & (before.kept_at == body_at), before.kept_at <= body_at
            after.body[is_kept] = before.kept[is_kept]
            after.kept_at[is_passed] = after.kept[is_passed] = NOTHING
            moves &= ~is_kept
        leaves = np.zeros(len(ends), np.bool_)
        if self.rules.keeps and not packed.is_decode:
            # Inside of a longer step the body position after the next body is passed, and no head stands there.
            kept_at = body_at + self.rules.fold_tokens
            leaves = (kept_at > starts) & (kept_at < ends)
            after.kept_at[leaves] = kept_at[leaves]
        own_head = (before.head >= 0) & (self.states.counts[before.head] == 1)
        fits = (ends - before.body_at <= self.rules.tail_rows) & (before.tail >= 0)
        own_tail = fits & (self.tails.counts[before.tail] == 1) if self.rules.tail_rows else np.ones(len(ends), np.bool_)
        try:
            for pool, row, mask in zip(self._pools, range(4), (moves, has_head & ~own_head, leaves, ~own_tail), strict=True):
                if np.count_nonzero(mask):
                    fresh[row, mask] = after.ids[row, mask] = pool.allocate(int(np.count_nonzero(mask)))
            plan = self._plan_runs(packed, before, after, fresh)
        except BaseException:
            self._free(fresh, np.ones(len(moves), np.bool_))
            raise
        self._open_plans[id(plan)] = plan
        return plan

    def _plan_runs(self, packed: Packed, before: Columns, after: Columns, fresh: Int64s) -> RecurrentPlan:
        ids = np.concatenate([before.states, after.states])
        states = StateAddresses(*np.where(ids < 0, NOTHING, self.states.addresses[ids]))
        runs = [self._run(one_pass, packed, before.tail) for one_pass in schedule(packed, before, after, states)]
        return RecurrentPlan(packed, before, after, fresh, runs, self._writes(packed, after))

    def _free(self, fresh: Int64s, chosen: NDArray[np.bool_]) -> None:
        """Give back the blocks set aside for the `chosen` requests of a step."""
        if np.count_nonzero(chosen):
            for pool, ids in zip(self._pools, fresh, strict=True):
                pool.release(ids[chosen & (ids >= 0)])

    def _run(self, one_pass: Pass, packed: Packed, tails: Int64s) -> Run:
        """A pass with its rows and states found for the kernels."""
        counts = one_pass.end - one_pass.begin
        cu_rows = starts_of(counts)
        tail_rows = new_rows = None
        if one_pass.is_replay:
            tail_rows = self._ring(np.repeat(tails[one_pass.requests], counts), ranges(one_pass.begin, one_pass.end))
        elif cu_rows[-1] < len(packed.token_ids):
            shift = (packed.cu_seqlens[:-1] - packed.starts)[one_pass.requests]
            new_rows = self._store.upload(ranges(one_pass.begin + shift, one_pass.end + shift))
        self._store.upload(cu_rows)  # for kernels that want it on the device: they find it there
        return Run(cu_rows, one_pass.begin, self._elements(one_pass.source), self._elements(one_pass.target), tail_rows, new_rows)

    def _writes(self, packed: Packed, after: Columns) -> tuple[Tensor, dict[int, Prepared]]:
        """The new rows behind the new body go into the tail."""
        if not self.rules.tail_rows or not self._row_sizes:
            return self._store.upload(EMPTY), {}
        if packed.is_decode:
            return self._store.upload(np.arange(len(packed.starts))), self._ring(after.tail, packed.starts)
        begin, ends = np.maximum(packed.starts, after.body_at), packed.ends
        counts = ends - begin
        shift: Int64s = packed.cu_seqlens[:-1] - packed.starts
        offsets = self._ring(np.repeat(after.tail, counts), ranges(begin, ends))
        return self._store.upload(ranges(begin + shift, ends + shift)), offsets

    def _ring(self, tails: Int64s, positions: Int64s) -> dict[int, Prepared]:
        """Elements a row -> element offset of each position's row in its tail block."""
        block = self.tails.addresses[tails] // self._dtype.itemsize
        slot = positions % self.rules.tail_rows
        return {size: self._place(block + slot * size) for size in self._row_sizes}

    def _place(self, array: Int64s) -> Prepared:
        return self._kernels.prepare(self._store.upload(array))

    def _elements(self, addresses: Int64s) -> dict[int, Prepared]:
        return {size: self._place(addresses // size) for size in self._state_sizes}  # NOTHING stays -1

    def begin(self, plan: RecurrentPlan) -> None:
        before, after = plan.before, plan.after
        for i in (before.tail != after.tail).nonzero()[0].tolist():
            if before.tail[i] < 0 or after.body_at[i] >= plan.packed.starts[i]:  # no old row of it is still wanted
                continue
            old, new = self.tails.addresses[before.tail[i]], self.tails.addresses[after.tail[i]]
            self._store.copy(int(old), int(new), self.tails.block_bytes)
        in_place = (before.head >= 0) & (after.head == before.head)
        self._slots.head_at[plan.packed.slots[in_place]] = NOTHING

    def recur(self, plan: RecurrentPlan, index: int, rows: Tensor, recurrence: Recurrence) -> Tensor:
        """Run recurrence `index` over the step's rows (T, *row_shape) and remember them; its outputs (T, ...)."""
        spec, n_tokens, n_elements = self._specs[index], len(plan.packed.token_ids), self._row_elements[index]
        self._require_rows(spec, rows, plan.packed)
        outputs: Tensor | None = None
        for run in plan.runs:
            states = States(spec, self._kernels, self._state_flats[index], run)
            if run.tail_rows is not None:
                offsets = run.tail_rows[n_elements]
                run_rows = self._kernels.read_rows(self._tail_flats[index], offsets, spec.row_shape, 0.0)
            else:
                run_rows = rows if run.new_rows is None else rows[run.new_rows]
            y = self._run_one(states, run_rows, recurrence)
            if run.new_rows is not None:
                outputs = y.new_empty(n_tokens, *y.shape[1:]) if outputs is None else outputs
                outputs[run.new_rows] = y
            elif run.tail_rows is None:
                outputs = y
        self._write_tail(plan, index, rows)
        assert outputs is not None, "every new row belongs to run 3 or 4"
        return outputs

    def _require_rows(self, spec: RecurrentSpec, rows: Tensor, packed: Packed) -> None:
        expected = (len(packed.token_ids), *spec.row_shape)
        if rows.shape != expected:
            raise StepError(f"rows have shape {tuple(rows.shape)}; {spec.family!r} expects {expected}")
        if rows.dtype != self._dtype or rows.device.type != self._store.device.type:
            raise StepError(f"rows are {rows.dtype} on {rows.device}; this memory holds {self._dtype} on {self._store.device}")

    @staticmethod
    def _run_one(states: States, rows: Tensor, recurrence: Recurrence) -> Tensor:
        y, ended = recurrence(states, rows)
        if ended is not states or not states.is_written:
            raise StepError(f"the recurrence {states.spec.family!r} did not write its end states; return `y, states.end(...)`")
        if y.shape[:1] != rows.shape[:1]:
            raise StepError(
                f"the recurrence {states.spec.family!r} gives outputs of shape {tuple(y.shape)} for {len(rows)} rows; give one for each"
            )
        return y

    def _write_tail(self, plan: RecurrentPlan, index: int, rows: Tensor) -> None:
        """Remember those of the step's rows that lie behind the new body."""
        if not self._has_rows[index]:
            return
        indices, targets = plan.writes
        n_written, n_elements = indices.shape[0], self._row_elements[index]
        if n_written:
            written = rows if n_written == len(rows) else rows[indices]
            self._kernels.write_rows_(self._tail_flats[index], targets[n_elements], written.reshape(n_written, n_elements))

    def can_record(self, plan: RecurrentPlan) -> bool:
        """Runs of one length: kernels, and how many rows are read and written, follow from shapes alone."""
        return all((np.diff(run.cu_rows) == run.cu_rows[1]).all() for run in plan.runs)

    def commit(self, plan: RecurrentPlan, kept: Int64s) -> None:
        before, after, packed = plan.before, plan.after, plan.packed
        stays, is_whole = kept > 0, kept == packed.counts
        del self._open_plans[id(plan)]
        self._free(plan.fresh, ~stays)
        # What the requests that stay refer to no longer; a state may have changed its role.
        differs = before.ids != after.ids
        if np.count_nonzero(differs) and np.count_nonzero(changes := stays & differs.any(0)):
            old, new = before.ids[:, changes], after.ids[:, changes]
            is_gone = (old[:3, None] != new[None, :3]).all(1) & (old[:3] >= 0)
            self.states.release(old[:3][is_gone])
            self.tails.release(old[3][(old[3] != new[3]) & (old[3] >= 0)])
        if np.count_nonzero(is_whole) < len(kept):  # states of dropped tokens
            after.head_at[~is_whole] = NOTHING
            beyond = stays & (after.kept_at > packed.starts + kept)
            self.states.release(after.kept[beyond])
            after.kept_at[beyond] = after.kept[beyond] = NOTHING
        if self.rules.keeps:  # where the head stands on a later body position it stays there, and the next step makes another
            leaves = is_whole & (after.head_at > after.body_at) & (after.head_at % self.rules.fold_tokens == 0)
            if np.count_nonzero(leaves):
                after.kept_at[leaves], after.kept[leaves] = after.head_at[leaves], after.head[leaves]
                after.head_at[leaves] = after.head[leaves] = NOTHING
        staying = stays.nonzero()[0]
        self._slots.put(packed.slots[staying], after.take(staying))

    def abort(self, plan: RecurrentPlan) -> None:
        del self._open_plans[id(plan)]
        self._free(plan.fresh, np.ones(len(plan.packed.slots), np.bool_))

    # Dropping tokens: nothing moves, the states stay ahead of the sequence

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
        self._grow_to(plan.slot + 1)
        slots, slot = self._slots, plan.slot
        slots.floor[slot] = max(1, plan.start, slots.floor[slot] - plan.n_tokens)
        slots.offset[slot] += plan.n_tokens

    def abandon_drop(self, plan: Dropped) -> None:
        """Do nothing: nothing has been set aside."""

    # Sequences

    def share(self, sources: Int64s, targets: Int64s) -> None:
        new = targets.tolist()
        self._grow_to(max(*sources.tolist(), *new) + 1)
        shared = self._slots.take(sources)
        for pool, ids in ((self.states, shared.states), (self.tails, shared.tail)):
            pool.retain(ids[ids >= 0])
        for slot in new:
            self.release(slot)
        self._slots.put(targets, shared)

    def truncate(self, slot: int, to: int) -> None:
        self._grow_to(slot + 1)
        slots = self._slots
        to += int(slots.offset[slot])
        if slots.head_at[slot] > to:
            slots.head_at[slot] = NOTHING
        if slots.kept_at[slot] > to:
            self.states.release(slots.kept[slot : slot + 1])
            slots.kept_at[slot] = slots.kept[slot] = NOTHING

    def reset(self, slot: int) -> None:
        self.release(slot)

    def release(self, slot: int) -> None:
        if slot < len(self._slots):
            ids = self._slots.ids[:, slot]
            if (ids >= 0).any():  # nothing is held by who comes to share
                self.states.release(ids[:3][ids[:3] >= 0])
                self.tails.release(ids[3:][ids[3:] >= 0])
            self._slots.table[:, slot] = EMPTY_COLUMN

    def horizon(self, slot: int) -> int:
        if slot >= len(self._slots):
            return 0
        slots = self._slots
        return max(int(slots.body_at[slot] - slots.offset[slot]), int(slots.floor[slot]))

    def horizon_after(self, packed: Packed) -> Int64s:
        self._grow_to(int(packed.slots.max()) + 1)
        offsets, floors = self._slots.offset.take(packed.slots), self._slots.floor.take(packed.slots)
        if not np.count_nonzero(floors):
            return self.rules.body_at(packed.peaks)
        horizons: Int64s = np.maximum(self.rules.body_at(packed.peaks + offsets) - offsets, floors)
        return horizons

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        self._grow_to(slot + 1)
        ids = self._slots.ids[:, slot]
        states, tail = ids[:3], ids[3:]
        return {self.states.name: states[states >= 0], self.tails.name: tail[tail >= 0]}

    def live_rows(self, slot: int, length: int) -> LiveRows:
        """A state is one row, which a stale head lacks; of a ring the slots of tokens [body_at, length)."""
        self._grow_to(slot + 1)
        body_at, head_at, _, offset, _, *states, tail = self._slots.table[:, slot].tolist()
        is_fresh = [[stands] for stands, block in zip((True, head_at >= 0, True), states, strict=True) if block >= 0]
        ring = np.zeros((int(tail >= 0), self.rules.tail_rows), np.bool_)
        ring[:, np.arange(body_at, length + offset) % max(1, self.rules.tail_rows)] = True
        return {self.states.name: np.array(is_fresh, np.bool_).reshape(-1, 1), self.tails.name: ring}

    def holdings(self, slots: Int64s) -> list[Holding]:
        self._grow_to(int(slots.max(initial=-1)) + 1)
        held, start, fold = self._slots.take(slots), np.zeros_like(slots), self.rules.fold_tokens

        def of(pool: BlockPool, part: Part, ids: Int64s, starts: Int64s, ends: Int64s | None = None) -> Holding:
            return Holding(pool.name, part, (ids >= 0).astype(np.int64), ids[ids >= 0], starts, ends, fold if part == "tail" else None)

        body_at, head_at, kept_at = (
            np.where(at < 0, at, np.maximum(at - held.offset, 0)) for at in (held.body_at, held.head_at, held.kept_at)
        )
        states = [of(self.states, "body", held.body, start, body_at)]
        if self.rules.has_heads:
            states += [of(self.states, "head", held.head, start, head_at), of(self.states, "head", held.kept, start, kept_at)]
        return [*states, of(self.tails, "tail", held.tail, body_at)]

    @property
    def shares(self) -> dict[str, list[int]]:
        n_fields = [len(s.states) for s in self._specs]
        return {self.states.name: self.state_layout.split(n_fields), self.tails.name: self.tail_layout.split(self._part_counts)}

    def record(self, slot: int) -> Record:
        self._grow_to(slot + 1)
        column = self._slots.table[:, slot]
        return {"positions": column[:3].tolist(), "holds": (column[5:] >= 0).astype(int).tolist(), "base": column[3:5].tolist()}

    def adopt(self, slot: int, record: Record, blocks: dict[str, Int64s]) -> None:
        self._grow_to(slot + 1)
        holds, ids = np.array(record["holds"], np.bool_), np.concatenate([blocks[self.states.name], blocks[self.tails.name]])
        column = EMPTY_COLUMN.copy()
        column[:3], column[3:5], column[5:][holds] = record["positions"], record["base"], ids
        self._slots.table[:, slot] = column

    def _grow_to(self, n_slots: int) -> None:
        n_missing = n_slots - len(self._slots)
        if n_missing > 0:
            self._slots = Columns(np.concatenate([self._slots.table, Columns.empty(max(n_missing, n_slots)).table], axis=1))

    def check(self, lengths: dict[int, int], peaks: dict[int, int]) -> None:
        for slot, length in lengths.items():
            self.check_slot(slot, length, peaks[slot])
        strangers = np.setdiff1d(np.arange(len(self._slots)), np.fromiter(lengths, np.int64, len(lengths)))
        if (self._slots.table[:, strangers] != EMPTY_COLUMN[:, None])[3:].any():
            raise IntegrityError("states or tails are held for slots that are not open, or their positions are ahead by tokens dropped")
        plans = self._open_plans.values()
        for pool, columns in (
            (self.states, [*self._slots.states, *(ids for plan in plans for ids in plan.fresh[:3])]),
            (self.tails, [self._slots.tail, *(plan.fresh[3] for plan in plans)]),
        ):
            held = np.concatenate(columns)
            pool.check(held[held >= 0])

    def check_slot(self, slot: int, length: int, peak: int) -> None:
        self._grow_to(slot + 1)
        body_at, head_at, kept_at, offset, floor, body, head, kept, tail = self._slots.table[:, slot].tolist()
        if (offset or floor) and not 1 <= floor <= length:
            raise IntegrityError(f"slot {slot} has length {length}, and states from {floor} on")
        length, peak = length + offset, peak + offset
        expected = int(self.rules.body_at(np.array(peak)))
        if body_at != expected:
            raise IntegrityError(f"slot {slot} has its body at {body_at}, its furthest position {peak} puts it at {expected}")
        if not body_at <= length <= peak or (body >= 0) != (body_at > 0):
            raise IntegrityError(f"slot {slot} has length {length}, furthest {peak}, body {body} at {body_at}")
        if length > body_at and (tail < 0 or length - body_at > self.rules.tail_rows):
            raise IntegrityError(f"slot {slot} cannot hold rows [{body_at}, {length}) in tail {tail}")
        if head_at > length or (head_at >= 0 and head < 0):
            raise IntegrityError(f"slot {slot} has length {length} and head {head} at {head_at}")
        if (kept_at >= 0) != (kept >= 0) or (kept >= 0 and not (body_at < kept_at <= length and kept_at % self.rules.fold_tokens == 0)):
            raise IntegrityError(f"slot {slot} has length {length}, its body at {body_at}, and state {kept} kept for {kept_at}")


def _as_states_count(packed: Packed, offsets: Int64s) -> Packed:
    """The step with positions as the states count them: ahead of those of the sequences by (S,) offsets."""
    positions = packed.positions + np.repeat(offsets, packed.counts)
    return replace(packed, starts=packed.starts + offsets, peaks=packed.peaks + offsets, positions=positions)
