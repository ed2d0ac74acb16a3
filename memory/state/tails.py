"""Defines the tail table: the blocks of bodies, tails and heads of all slots, and the positions that they are for.

For each sequence it holds

    body   the states after tokens [0, body_at), to which `rollback` can always return
    tail   what is kept of each of the tokens [tail_at, length), in a ring; tail_at is body_at, or earlier
    head   the states after tokens [0, head_at), private to the sequence: a shortcut, never needed
    kept   a head that was left at the position to which the body moves next: another shortcut

When rows fold, the body moves to another block: a kept state becomes the body, or a new body is made. The old body
stays until commit, so an abort loses nothing. Blocks are reference-counted and never written while they are shared.

`memory.sequences.folding` decides when the body moves. The layer memories that use a table read bodies and tails.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from hybridmem.memory.blocks.arrays import Bools, Int64s
from hybridmem.memory.blocks.holdings import Holding, LiveRows, Part, Record
from hybridmem.memory.blocks.layout import BlockLayout
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.errors import CapacityError, IntegrityError
from hybridmem.memory.interface import Dropped, Packed, References, SlotTable, Stretch
from hybridmem.memory.sequences.folding import EMPTY_COLUMN, NOTHING, Columns
from hybridmem.memory.state.tail_blocks import TailBlocks

_EMPTY_LIST: list[int] = EMPTY_COLUMN.tolist()


class TailStep(NamedTuple):
    """Holds the blocks that are allocated for a step, and the columns of its requests in the table before and after it.

    Attributes:
        packed: the step in positions of the states, which are the sequences' positions plus the position offset.
        before, after: the columns of each request (S,) now, and after the step if all tokens are kept.
        fresh: (4, S) ids of the body, head, kept state and tail that are allocated for each request, or NOTHING.
        holds_start: (S,) the requests whose old head the step moves to its start, while it writes the end state to
            another block. If not all tokens are kept, the head stays there, so that the next step replays only those
            that are. None: no request.
    """

    packed: Packed
    before: Columns
    after: Columns
    fresh: Int64s
    holds_start: Bools | None = None


class TailPlan(Protocol):
    """Declares what the table reads of a layer memory's plan for a step."""

    @property
    def step(self) -> TailStep: ...


TailPlanT = TypeVar("TailPlanT", bound=TailPlan)


class TailTable(Generic[TailPlanT]):
    """Maps slots to blocks of a pool of states and a pool of tails, and owns the references to these blocks.

    Recurrent states and evicting attention have it in common: it is the part of `memory.interface.LayerMemory` that is
    about slots. Each of the two adds how a step reads and writes the blocks.

    Positions in arguments and results are those of the sequence. In `slots` and in a `TailStep`, positions are those of
    the states, which are ahead by the position offset. The table never reads the blocks, but it copies a shared tail
    before a slot writes to it.
    """

    def __init__(self, blocks: TailBlocks) -> None:
        self.blocks, self.rules, self.store = blocks, blocks.rules, blocks.store
        self.states, self.tails = blocks.states, blocks.tails
        # The pools are those of body, head, kept state and tail.
        self._pools = (self.states, self.states, self.states, self.tails)
        self.slots = Columns.empty(16)

    @property
    def pools(self) -> list[tuple[BlockPool, BlockLayout]]:
        return [(self.states, self.blocks.state_layout), (self.tails, self.blocks.tail_layout)]

    @property
    def least_bytes(self) -> int:
        """Return the bytes for a step of one token: a head, a tail, and two bodies (or a body and a kept state).

        Without a rollback window, only two bodies are needed.
        """
        n_states = 3 if self.rules.tail_rows and self.rules.has_heads else 2
        return n_states * self.states.block_bytes + self.tails.block_bytes

    def bytes_for(self, stretch: Stretch) -> Int64s:
        """Return (4, N) bytes of stretches; see `LayerMemory.bytes_for`."""
        slots = stretch.slots
        self._reach(int(slots.max(initial=0)))
        offsets = np.where(slots < 0, 0, self.slots.offset.take(slots))
        if np.count_nonzero(offsets):
            stretch = stretch.moved(offsets)
        bodies = np.where(slots < 0, 0, self.slots.body_at.take(slots))
        n_states, n_tails = self.rules.held_blocks(stretch, bodies)
        return n_states * self.states.block_bytes + n_tails * self.tails.block_bytes

    # The methods below plan, begin and end steps.

    def plan_blocks(self, packed: Packed) -> TailStep:
        """Allocate the blocks that the step will write. Raises CapacityError with nothing changed."""
        self._reach(int(packed.slots.max()))
        before = self.slots.take(packed.slots)
        if np.count_nonzero(before.offset):
            packed = _in_state_positions(packed, before.offset)
        starts, ends = packed.starts, packed.ends
        body_at = np.maximum(self.rules.body_at(packed.peaks), before.body_at)
        after, fresh = Columns(before.table.copy()), np.full((4, len(ends)), NOTHING)
        after.body_at[:] = body_at
        has_head = (ends > body_at) & self.rules.has_heads
        after.head_at[:] = np.where(has_head, ends, NOTHING)
        moves = body_at > before.body_at
        if np.count_nonzero(moves):
            # A kept state at the body's new position becomes the body. A kept state before that position is of no use.
            is_kept, is_passed = moves & (before.kept_at == body_at), before.kept_at <= body_at
            after.body[is_kept] = before.kept[is_kept]
            after.kept_at[is_passed] = after.kept[is_passed] = NOTHING
            moves &= ~is_kept
        leaves = np.zeros(len(ends), np.bool_)
        if self.rules.keeps and not packed.is_decode:
            # A step that ends beyond the next fold point leaves no head there that could be kept. So the step stores
            # the state at this fold point as the kept state.
            kept_at = self.rules.next_fold(body_at)
            leaves = (kept_at > starts) & (kept_at < ends)
            after.kept_at[leaves] = kept_at[leaves]
        own_head = (before.head >= 0) & (self.states.counts[before.head] == 1)
        holds_start = None
        if packed.is_verified and self.rules.tail_rows:
            counts = packed.counts
            holds_start = own_head & has_head & (counts > 1) & (counts <= self.rules.rollback_window + 1)
            own_head = own_head & ~holds_start
        fits = (ends - self.rules.tail_at(before.body_at) <= self.rules.tail_rows) & (before.tail >= 0)
        own_tail = fits & (self.tails.counts[before.tail] == 1) if self.rules.tail_rows else np.ones_like(fits)
        masks = (moves, has_head & ~own_head, leaves, ~own_tail)
        try:
            for pool, row, mask in zip(self._pools, range(4), masks, strict=True):
                if n_blocks := int(np.count_nonzero(mask)):
                    fresh[row, mask] = after.ids[row, mask] = pool.allocate(n_blocks)
        except BaseException:
            self._free(fresh, np.ones(len(moves), np.bool_))
            raise
        return TailStep(packed, before, after, fresh, holds_start)

    def _free(self, fresh: Int64s, chosen: Bools) -> None:
        """Release the blocks allocated for the `chosen` requests of a step."""
        if np.count_nonzero(chosen) and np.count_nonzero(taken := (fresh >= 0) & chosen):
            for pool, ids, own in zip(self._pools, fresh, taken, strict=True):
                pool.release(ids[own])

    def begin(self, plan: TailPlanT) -> None:
        """Copy the tails that the step must not write in place, and mark the heads that it overwrites as stale."""
        step = plan.step
        before, after = step.before, step.after
        tail_at = self.rules.tail_at(after.body_at)
        for i in (before.tail != after.tail).nonzero()[0].tolist():
            # No row of the old tail is needed any more, so it need not be copied.
            if before.tail[i] < 0 or tail_at[i] >= step.packed.starts[i]:
                continue
            old, new = self.tails.addresses[before.tail[i]], self.tails.addresses[after.tail[i]]
            self.store.copy(int(old), int(new), self.tails.block_bytes)
        in_place = (before.head >= 0) & (after.head == before.head)
        if step.holds_start is not None:
            in_place |= step.holds_start & (before.head_at < step.packed.starts)
        if np.count_nonzero(in_place):
            self.store.journal.before(self._put_back, step.packed.slots, before.table)
            self.slots.head_at[step.packed.slots[in_place]] = NOTHING

    def commit(self, plan: TailPlanT, kept: Int64s) -> None:
        """Keep the first kept[i] new tokens of each request i, and release blocks that are not needed any more."""
        step = plan.step
        before, after, packed = step.before, step.after, step.packed
        stays, is_whole = kept > 0, kept == packed.counts
        n_staying = np.count_nonzero(stays)
        if not n_staying:
            self.free_blocks(step)
            return
        self._note(packed.slots)
        self._free(step.fresh, ~stays)
        is_cut = stays & ~is_whole
        if np.count_nonzero(is_cut):
            self._cut_heads(step, is_cut)
        # Release the blocks to which slots no longer refer. A state that only changed its role stays.
        differs = before.ids != after.ids
        if np.count_nonzero(differs) and np.count_nonzero(changes := stays & differs.any(0)):
            old, new = before.ids[:, changes], after.ids[:, changes]
            is_gone = (old[:3, None] != new[None, :3]).all(1) & (old[:3] >= 0)
            self.states.release(old[:3][is_gone])
            self.tails.release(old[3][(old[3] != new[3]) & (old[3] >= 0)])
        if np.count_nonzero(is_cut):  # Some states contain tokens that are not kept.
            beyond = is_cut & (after.kept_at > packed.starts + kept)
            self.states.release(after.kept[beyond])
            after.kept_at[beyond] = after.kept[beyond] = NOTHING
        if self.rules.keeps:
            # A head at a later fold point is kept, because the body will move there. The next step makes a new head.
            leaves = is_whole & (after.head_at > after.body_at) & (after.head_at % self.rules.fold_tokens == 0)
            if np.count_nonzero(leaves):
                after.kept_at[leaves], after.kept[leaves] = after.head_at[leaves], after.head[leaves]
                after.head_at[leaves] = after.head[leaves] = NOTHING
        if n_staying < len(kept):
            staying = stays.nonzero()[0]
            self.slots.put(packed.slots[staying], after.take(staying))
        else:
            self.slots.put(packed.slots, after)

    def _cut_heads(self, step: TailStep, is_cut: Bools) -> None:
        """Let the requests whose last tokens are not kept have the head at the step's start, or a stale head."""
        before, after, starts = step.before, step.after, step.packed.starts
        after.head_at[is_cut] = NOTHING
        is_at_start = before.head_at == starts
        if step.holds_start is not None:
            # The step has run old rows up to its start, except where a body or a kept state is there.
            is_at_start |= step.holds_start & (np.maximum(before.body_at, before.kept_at) < starts)
        stays = is_cut & is_at_start & (step.fresh[1] >= 0) & (after.body_at < starts)
        if np.count_nonzero(stays):
            self.states.release(step.fresh[1, stays])
            after.head[stays], after.head_at[stays] = before.head[stays], starts[stays]

    def free_blocks(self, step: TailStep) -> None:
        """Release all blocks that were allocated for a step, and leave every slot as it was."""
        self._free(step.fresh, np.ones(len(step.packed.slots), np.bool_))

    # The methods below open, copy and close slots.

    @property
    def tables(self) -> list[SlotTable]:
        return [self]

    def share(self, sources: Int64s, targets: Int64s) -> None:
        """Make each slot targets[i] refer to the blocks of slot sources[i], all at once. Copies no tensor."""
        self._reach(max(*sources.tolist(), *targets.tolist()))
        new, old = self.slots.take(sources), self.slots.take(targets)
        self.store.journal.before(self._put_back, targets, old.table)
        for pool, taken, left in ((self.states, new.states, old.states), (self.tails, new.tail, old.tail)):
            pool.retain(taken.ravel())
            pool.release(left.ravel())
        self.slots.put(targets, new)

    def _note(self, slots: Int64s | int) -> None:
        """Let the journal keep the columns of slots, because they are about to change."""
        self.store.journal.before(self._put_back, slots, self.slots.table[:, slots].copy())

    def _put_back(self, slots: Int64s | int, columns: Int64s) -> None:
        self.slots.table[:, slots] = columns

    def truncate(self, slot: int, to: int) -> None:
        """Forget the tokens from position `to` on, and states that contain them. `to` is at least horizon(slot)."""
        if not to:
            self.release(slot)
            return
        self._note(slot)
        slots = self.slots
        to += int(slots.offset[slot])
        if slots.head_at[slot] > to:
            slots.head_at[slot] = NOTHING
        if slots.kept_at[slot] > to:
            self.states.release(slots.kept[slot : slot + 1].copy())
            slots.kept_at[slot] = slots.kept[slot] = NOTHING

    def plan_state(self, slot: int, length: int) -> TailStep | None:
        """Allocate a state at the position of a slot of this length, as a step whose body moves to the step's start.

        With fold mode "defer", the step has a meaningless row, and a tail for it that `hold_only_state` releases.

        Returns None if the slot has such a state already, or is empty. Raises CapacityError with nothing changed.
        """
        if not length or self._state_at(slot, length) != NOTHING:
            return None
        at, only = np.array([length + int(self.slots.offset[slot])]), np.zeros(1, np.int64)
        before, arena, defers = self.slots.take(np.array([slot])), self.store.arena, self.rules.defers
        after, fresh = Columns(before.table.copy()), np.full((4, 1), NOTHING)
        needed, free = self.states.block_bytes + defers * self.tails.block_bytes, arena.free_bytes
        try:
            after.body_at[:], after.body[:] = at, self.states.allocate(1)
            fresh[0] = after.body
            if defers:
                fresh[3] = after.tail[:] = self.tails.allocate(1)
        except BaseException as error:
            self._free(fresh, np.ones(1, np.bool_))
            if isinstance(error, CapacityError):
                what = "a checkpoint's state, which is computed from its tail unless holds_tail=True, needs"
                raise CapacityError.of(what, needed, free, arena.capacity_bytes, arena.unit) from None
            raise
        packed = Packed(np.array([slot]), at, np.array([0, 1]), at, only, at, only)
        return TailStep(packed, before, after, fresh)

    def hold_only_state(self, slot: int, length: int, step: TailStep | None) -> None:
        """Let a slot of this length hold only the state at its position. Then it cannot return to earlier positions.

        The state is the one that `step`, from `plan_state`, has made. Without a step, it is one that the slot has. If
        there is no state at that position, the slot stays as it is.
        """
        slots, at = self.slots, length + int(self.slots.offset[slot])
        state = self._state_at(slot, length) if step is None else int(step.after.body[0])
        if state == NOTHING:
            return
        self._note(slot)
        states, tail = slots.states[:, slot], slots.tail[slot : slot + 1]
        gone, gone_tail = states[(states >= 0) & (states != state)].copy(), tail[tail >= 0].copy()
        slots.body_at[slot], slots.body[slot] = at, state
        slots.head_at[slot] = slots.head[slot] = slots.kept_at[slot] = slots.kept[slot] = slots.tail[slot] = NOTHING
        slots.floor[slot] = max(length, slots.floor[slot])
        self.states.release(gone)
        self.tails.release(gone_tail)
        if step is not None and step.fresh[3, 0] != NOTHING:
            self.tails.release(step.fresh[3])

    def _state_at(self, slot: int, length: int) -> int:
        """Return the id of a state at the position of a slot of this length, or NOTHING if the slot has none."""
        slots, at = self.slots, length + int(self.slots.offset[slot])
        roles = ((slots.body_at, slots.body), (slots.kept_at, slots.kept), (slots.head_at, slots.head))
        return next((int(ids[slot]) for where, ids in roles if where[slot] == at), NOTHING)

    def add_offset(self, dropped: Dropped) -> None:
        """Add the dropped tokens to the slot's position offset, because its states still contain them."""
        slots, slot = self.slots, dropped.slot
        self._note(slot)
        slots.floor[slot] = max(1, dropped.start, slots.floor[slot] - dropped.n_tokens)
        slots.offset[slot] += dropped.n_tokens

    def release(self, slot: int) -> None:
        """Release every block that the slot refers to."""
        if slot < len(self.slots):
            column = self.slots.table[:, slot]
            if column.tolist() == _EMPTY_LIST:
                return
            column = column.copy()
            self.store.journal.before(self._put_back, slot, column)
            self.states.release(column[5:8])
            self.tails.release(column[8:])
            self.slots.table[:, slot] = EMPTY_COLUMN

    def horizon(self, slot: int) -> int:
        """Return the earliest position that `truncate` reaches, which is the body's."""
        if slot >= len(self.slots):
            return 0
        return max(int(self.slots.body_at[slot] - self.slots.offset[slot]), int(self.slots.floor[slot]))

    def horizon_after(self, packed: Packed) -> Int64s:
        """Return (S,) what `horizon` will be once the step's tokens are kept."""
        if not np.count_nonzero(self.slots.floor):  # No slot has dropped tokens, and none is slimmed.
            return self.rules.body_at(packed.peaks)
        self._reach(int(packed.slots.max()))
        offsets, floors = self.slots.offset.take(packed.slots), self.slots.floor.take(packed.slots)
        horizons: Int64s = np.maximum(self.rules.body_at(packed.peaks + offsets) - offsets, floors)
        return horizons

    # The methods below say to which blocks slots refer.

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        """Return pool name -> ids of the blocks that the slot refers to."""
        column = self._column(slot)
        states, tail = column[5:8], column[8:]
        return {self.states.name: states[states >= 0], self.tails.name: tail[tail >= 0]}

    def live_rows(self, slot: int, length: int) -> LiveRows:
        """Return pool name -> which rows of the slot's blocks belong to its tokens, as `LayerMemory.live_rows` does.

        A state counts as one row, which is live unless the state is a stale head. In a ring, the rows of tokens
        [tail_at, length) are live.
        """
        body_at, head_at, _, offset, _, *states, tail = self._column(slot).tolist()
        is_fresh = [[fresh] for fresh, block in zip((True, head_at >= 0, True), states, strict=True) if block >= 0]
        ring = np.zeros((int(tail >= 0), self.rules.tail_rows), np.bool_)
        ring[:, np.arange(self.rules.tail_at(body_at), length + offset) % max(1, self.rules.tail_rows)] = True
        return {self.states.name: np.array(is_fresh, np.bool_).reshape(-1, 1), self.tails.name: ring}

    def holdings(self, slots: Int64s) -> list[Holding]:
        """Return the blocks of many slots (S,), and for each block its part: body, tail or head."""
        self._reach(int(slots.max(initial=0)))
        held, start = self.slots.take(slots), np.zeros_like(slots)

        def of(pool: BlockPool, part: Part, ids: Int64s, starts: Int64s, ends: Int64s | None = None) -> Holding:
            counts, fold_tokens = (ids >= 0).astype(np.int64), self.rules.fold_tokens if part == "tail" else None
            return Holding(pool.name, part, counts, ids[ids >= 0], starts, ends, fold_tokens)

        body_at, head_at, kept_at = (
            np.where(at < 0, at, np.maximum(at - held.offset, 0)) for at in (held.body_at, held.head_at, held.kept_at)
        )
        states = [of(self.states, "body", held.body, start, body_at)]
        if self.rules.has_heads:
            heads = ((held.head, head_at), (held.kept, kept_at))
            states += [of(self.states, "head", ids, start, at) for ids, at in heads]
        return [*states, of(self.tails, "tail", held.tail, self.rules.tail_at(body_at))]

    def record(self, slot: int) -> Record:
        """Return the values that `adopt` needs in addition to the blocks of `blocks_of`.

        "base" is the slot's position offset, and the lowest position that a rollback reaches after drops.
        """
        column = self._column(slot)
        holds = (column[5:] >= 0).astype(int).tolist()
        return {"positions": column[:3].tolist(), "holds": holds, "base": column[3:5].tolist()}

    def adopt(self, slot: int, record: Record, blocks: dict[str, Int64s]) -> None:
        """Make an empty slot equal to the slot that `record` describes; see `LayerMemory.adopt`."""
        self._reach(slot)
        holds = np.array(record["holds"], np.bool_)
        states, tail = blocks[self.states.name], blocks[self.tails.name]
        # Without this check, numpy would broadcast one block to several.
        if [len(states), len(tail)] != [holds[:3].sum(), holds[3:].sum()]:
            raise ValueError(f"{len(states)} states and {len(tail)} tails for {record['holds']}")
        column = EMPTY_COLUMN.copy()
        column[:3], column[5:][holds] = record["positions"], [*states, *tail]
        column[3], column[4] = record["base"]
        self._note(slot)
        self.slots.table[:, slot] = column

    def _column(self, slot: int) -> Int64s:
        """Return (9,) the slot's column, in the order of `Columns.table`."""
        self._reach(slot)
        column: Int64s = self.slots.table[:, slot]
        return column

    def _reach(self, slot: int) -> None:
        """Make room for all slots up to this one, and at least double the room."""
        n = len(self.slots)
        if slot >= n:
            new = Columns.empty(max(slot + 1 - n, n))
            self.slots = Columns(np.concatenate([self.slots.table, new.table], axis=1))

    # The methods below check the books.

    def check(self, lengths: dict[int, int], peaks: dict[int, int], *, is_all: bool = True) -> None:
        """Check the blocks of slots; see `memory.interface.LayerMemory.check`."""
        for slot, length in lengths.items():
            self._check_slot(slot, length, peaks[slot])
        if not is_all:
            return
        closed = np.setdiff1d(np.arange(len(self.slots)), np.fromiter(lengths, np.int64, len(lengths)))
        if (self.slots.ids[:, closed] >= 0).any():
            raise IntegrityError("states or tails are held for slots that are not open")
        if ahead := closed[self.slots.table[3:5, closed].any(0)].tolist():
            raise IntegrityError(f"slots that are not open have states ahead of them: {ahead}")

    def references(self, plans: list[TailPlanT]) -> References:
        """Return all references to blocks: those of slots, and those of `plans`, the plans of open steps."""
        steps = [plan.step for plan in plans]
        states = [*self.slots.states, *(ids for step in steps for ids in step.fresh[:3])]
        tails = [self.slots.tail, *(step.fresh[3] for step in steps)]
        return {pool: [ids[ids >= 0] for ids in held] for pool, held in ((self.states, states), (self.tails, tails))}

    def _check_slot(self, slot: int, length: int, peak: int) -> None:
        """Raise IntegrityError unless one slot's blocks fit the length and the peak of its sequence."""
        body_at, head_at, kept_at, offset, floor, body, head, kept, tail = self._column(slot).tolist()
        if (offset or floor) and not 1 <= floor <= length:
            raise IntegrityError(f"slot {slot} has length {length}, and states from {floor} on")
        length, peak = length + offset, peak + offset
        expected = int(self.rules.body_at(np.array(peak)))
        if body_at < expected or (body_at > expected and not floor):
            raise IntegrityError(f"slot {slot} has its body at {body_at}, its peak {peak} puts it at {expected}")
        if not body_at <= length <= peak or (body >= 0) != (body_at > 0):
            raise IntegrityError(f"slot {slot} has length {length}, furthest {peak}, body {body} at {body_at}")
        tail_at = self.rules.tail_at(body_at)
        if length > tail_at and (tail < 0 or length - tail_at > self.rules.tail_rows):
            raise IntegrityError(f"slot {slot} cannot hold rows [{tail_at}, {length}) in tail {tail}")
        if head_at > length or (head_at >= 0 and head < 0):
            raise IntegrityError(f"slot {slot} has length {length} and head {head} at {head_at}")
        is_wanted = body_at < kept_at <= length and kept_at % self.rules.fold_tokens == 0
        if (kept_at >= 0) != (kept >= 0) or (kept >= 0 and not is_wanted):
            where = f"its body at {body_at}, and state {kept} kept for {kept_at}"
            raise IntegrityError(f"slot {slot} has length {length}, {where}")


def _in_state_positions(packed: Packed, offsets: Int64s) -> Packed:
    """Return the step with positions of the states: the sequences' positions plus the position offsets (S,)."""
    positions = packed.positions + np.repeat(offsets, packed.counts)
    return replace(packed, starts=packed.starts + offsets, peaks=packed.peaks + offsets, positions=positions)
