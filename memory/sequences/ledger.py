"""The ledger holds the one record of each sequence: its slot, its length, its peak and its tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hybridmem.memory.blocks.arrays import EMPTY, Int64s
from hybridmem.memory.blocks.journal import Journal
from hybridmem.memory.errors import IntegrityError, SequenceError
from hybridmem.memory.interface import Dropped, Packed, Sequence, SequenceOwner
from hybridmem.memory.sequences.soft_tokens import kept_back, positions_back
from hybridmem.memory.sequences.token_buffer import Checkpoint, TokenBuffer, common_prefix, is_roomy, write_tokens

_COLUMNS = ("lengths", "peaks", "backs", "_writable", "is_busy", "is_away", "_is_checkpoint")
"""Names of the arrays of a ledger that have an element for each slot."""


class Ledger:
    """Holds the slots, lengths and tokens of all sequences. Slots are reused, ids are not.

    The records of a slot are its handle, length, peak, buffer of tokens, drops, and whether it is swapped out.
    Everything else is computed from the records: see `rebuild`.

    Args:
        journal: the memory's journal.
        sees: whether tokens may stand for rows of pictures.
    Attributes:
        lengths, peaks: (n_slots,) how many tokens each slot holds, and the furthest position that it has ever reached.
        backs: (n_slots,) by how many rotary positions a slot's tokens move text after them back (`soft_tokens`).
        is_busy, is_away: (n_slots,) True while the sequence is in an open step, and while it is swapped out.
        handles: slot -> the handle of an open sequence or checkpoint.
        n_drops: how many drops there were so far, which is the number of the latest drop.
    """

    def __init__(self, owner: SequenceOwner, journal: Journal, *, sees: bool) -> None:
        self._journal, self._sees = journal, sees
        self.lengths = np.zeros(16, np.int64)
        self.peaks = np.zeros(16, np.int64)
        self.backs = np.zeros(16, np.int64)
        self.is_busy = np.zeros(16, np.bool_)
        self.is_away = np.zeros(16, np.bool_)
        self.handles: dict[int, Sequence] = {}
        self._owner = weakref.ref(owner)
        self._buffers: dict[int, TokenBuffer] = {}  # Maps a slot to the buffer of its tokens, once it has any.
        self._writable = np.zeros(16, np.int64)  # Slots may write into buffers up to these positions. 0: not known.
        self._reserved: dict[int, Int64s] = {}  # Maps a slot to a larger array, for the tokens of an open step.
        self._is_checkpoint = np.zeros(16, np.bool_)
        self._free_slots = list(range(15, -1, -1))
        self._n_opened = 0
        self._families: dict[int, dict[TokenBuffer, None]] = {}  # Maps a lineage to its buffers with checkpoints.
        self._seams: dict[int, tuple[tuple[int, int], ...]] = {}  # Maps a slot to what `drops` returns.
        self.n_drops = 0
        self._swapped: dict[int, tuple[int, int]] = {}  # Maps a slot that is swapped out to its horizon and its bytes.
        self._found_usable: list[tuple[list[Sequence], Int64s]] = []  # Each change replaces the list.

    def open(self, *, lineage: int | None = None, is_checkpoint: bool = False) -> Sequence:
        """Open an empty sequence in a free slot. All sequences forked from the same one have the same `lineage`."""
        if not self._free_slots:
            self._grow()
        slot, id = self._free_slots[-1], self._n_opened
        handle = Sequence(self._owner, id, slot, id if lineage is None else lineage, is_checkpoint=is_checkpoint)
        self._n_opened += 1
        self._journal.before(self._forget, handle)
        self._is_checkpoint[slot] = is_checkpoint
        self.handles[slot] = handle
        del self._free_slots[-1]
        return handle

    def _forget(self, handle: Sequence) -> None:
        """Remove a sequence that was just opened."""
        self.handles.pop(handle.slot, None)
        handle.closed = True

    def _grow(self) -> None:
        """Double the number of slots, because all are in use. An exception may stop it half-way without harm."""
        n = len(self.handles)
        for name in _COLUMNS:
            setattr(self, name, np.pad(getattr(self, name)[:n], (0, n)))
        self._free_slots = list(range(2 * n - 1, n - 1, -1))

    def _note(self, sequence: Sequence) -> None:
        """Note the records of a sequence, because they are about to change."""
        slot = sequence.slot
        position = self.lengths.item(slot), self.peaks.item(slot), self.backs.item(slot)
        found = self._buffers.get(slot), self._seams.get(slot), self._swapped.get(slot)
        self._journal.before(self._put_back, sequence, sequence.lineage, sequence.closed, position, found)

    def _put_back(
        self, sequence: Sequence, lineage: int, closed: bool, position: tuple[int, int, int], found: tuple[Any, ...]
    ) -> None:
        slot = sequence.slot
        sequence.lineage, sequence.closed = lineage, closed
        self.handles[slot], self._is_checkpoint[slot] = sequence, sequence.is_checkpoint
        self.lengths[slot], self.peaks[slot], self.backs[slot] = position
        columns: tuple[dict[int, Any], ...] = self._buffers, self._seams, self._swapped
        for column, value in zip(columns, found, strict=True):
            if value is None:
                column.pop(slot, None)
            else:
                column[slot] = value
        self.is_away[slot] = slot in self._swapped

    def rebuild(self, open_slots: Iterable[Int64s], horizon_of: Callable[[int], int]) -> None:
        """Compute everything that follows from the records of the slots.

        Args:
            open_slots: the slots of each open step.
            horizon_of: slot -> horizon, for a slot that is in the budget.
        """
        n_slots = min(len(getattr(self, name)) for name in _COLUMNS)
        for name in _COLUMNS:
            setattr(self, name, getattr(self, name)[:n_slots])
        self._free_slots = [slot for slot in range(n_slots - 1, -1, -1) if slot not in self.handles]
        free = self._free_slots
        self.lengths[free] = self.peaks[free] = self.backs[free] = 0
        for by_slot in (self._buffers, self._seams, self._swapped, self._reserved):
            for slot in by_slot.keys() - self.handles.keys():
                del by_slot[slot]
        self._writable[:] = 0
        self.is_busy[:] = self.is_away[:] = False
        self.is_away[list(self._swapped)] = True
        for slots in open_slots:
            self.is_busy[slots] = True
        self._reserved = {slot: ids for slot, ids in self._reserved.items() if self.is_busy[slot]}
        self._found_usable = []
        self._rebuild_buffers(horizon_of)

    def _rebuild_buffers(self, horizon_of: Callable[[int], int]) -> None:
        """Find which slots hold each buffer of tokens. `reserve` later finds which slot may write to it."""
        self._families = {}
        for held in self._buffers.values():
            held.clear()
        handles = sorted(self.handles.values(), key=lambda handle: (int(self.lengths[handle.slot]), handle.id))
        for handle in handles:
            buffer, slot = self._buffers.get(handle.slot), handle.slot
            if buffer is not None and handle.is_checkpoint:
                horizon = self._swapped[slot][0] if slot in self._swapped else horizon_of(slot)
                buffer.add_checkpoint(Checkpoint(int(self.lengths[slot]), handle.id, horizon, handle))
                self._families.setdefault(handle.lineage, {})[buffer] = None
            elif buffer is not None:
                buffer.live.add(slot)

    def close(self, sequence: Sequence) -> None:
        self._note(sequence)
        sequence.closed = True
        del self.handles[sequence.slot]
        self._found_usable = []
        self._leave_buffer(sequence)
        self.lengths[sequence.slot] = self.peaks[sequence.slot] = self.backs[sequence.slot] = 0
        if self._swapped.pop(sequence.slot, None) is not None:
            self.is_away[sequence.slot] = False
        self._seams.pop(sequence.slot, None)
        self._free_slots.append(sequence.slot)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of all token ids. Ids that several slots share count once. Cost: O(slots)."""
        return sum(buffer.ids.nbytes for buffer in {*self._buffers.values()})

    def tokens(self, slot: int) -> Int64s:
        """Return a view of the slot's token ids, (length,). It is valid until the sequence changes."""
        return self._buffers[slot].ids[: self.lengths[slot]] if slot in self._buffers else EMPTY

    def reserve(self, packed: Packed) -> None:
        """Make room for a step's tokens, until `vacate`, so that `append` cannot fail."""
        for i in (packed.ends > self._writable[packed.slots]).nonzero()[0].tolist():
            slot, start, end = int(packed.slots[i]), int(packed.starts[i]), int(packed.ends[i])
            buffer = self._buffers.get(slot)
            if buffer is not None and buffer.writer is None and self._reach(buffer, but=slot) <= start:
                buffer.writer = slot
            if buffer is not None and buffer.writer == slot and end <= len(buffer.ids):
                self._writable[slot] = len(buffer.ids)
                continue
            ids = np.empty(end + max(start, 16), np.int64)
            ids[:start] = self.tokens(slot)
            self._reserved[slot] = ids

    def _reach(self, buffer: TokenBuffer, *, but: int | None = None) -> int:
        """Return the greatest length of sequences and checkpoints in a buffer, leaving out the live slot `but`."""
        return max([buffer.checkpoint_tokens, *(int(self.lengths[slot]) for slot in buffer.live if slot != but)])

    def _place(self, slot: int, ids: Int64s) -> None:
        """Move the slot's tokens into `ids`. If the slot is its buffer's writer, the other holders move with it."""
        buffer = self._buffers.get(slot)
        if buffer is not None and buffer.writer == slot:
            buffer.ids = ids
        else:
            self._leave_buffer(self.handles[slot])
            self._buffers[slot] = TokenBuffer(ids, slot)
        self._writable[slot] = len(ids)

    def _leave_buffer(self, sequence: Sequence) -> None:
        """Remove a slot from its buffer of tokens, and free the tokens that no other slot holds."""
        buffer = self._buffers.pop(sequence.slot, None)
        self._writable[sequence.slot] = 0
        if buffer is None:
            return
        if sequence.is_checkpoint:
            buffer.remove_checkpoint(int(self.lengths[sequence.slot]), sequence.id)
            if not buffer.checkpoints:
                family = self._families[sequence.lineage]
                del family[buffer]
                if not family:
                    del self._families[sequence.lineage]
        self._release(buffer, sequence.slot)

    def _release(self, buffer: TokenBuffer, slot: int) -> None:
        buffer.live.discard(slot)
        if buffer.writer == slot:
            buffer.writer = None
        self._journal.after(self._trim, buffer)

    def _go_back_to(self, slot: int, length: int) -> None:
        """Stop a slot from writing to its buffer until `reserve` has checked whether other holders have more tokens."""
        buffer = self._buffers.get(slot)
        self._writable[slot] = 0
        if buffer is not None and buffer.writer == slot:
            buffer.writer = None
            self._journal.after(self._trim, buffer, length)

    def _trim(self, buffer: TokenBuffer, at_least: int = 0) -> None:
        """Shrink a buffer if it is far larger than its holders need. One of the holders needs `at_least` tokens."""
        # Checking `at_least` first saves most calls of `_reach`.
        if buffer.writer is None and is_roomy(buffer.ids, at_least) and is_roomy(buffer.ids, n := self._reach(buffer)):
            buffer.ids = buffer.ids[:n].copy()

    def append(self, packed: Packed, kept: Int64s) -> None:
        """Append the first kept[i] tokens of each request. Peaks count all tokens that were fed, kept or not."""
        moved = kept.nonzero()[0]
        slots, starts, n_tokens = packed.slots[moved], packed.starts[moved], kept[moved]
        self._journal.before(self._take_back, slots, starts, self.peaks[slots])
        self.lengths[slots] = starts + n_tokens
        self.peaks[slots] = packed.peaks[moved]
        if self._sees:
            self._journal.before(self.backs.__setitem__, slots, self.backs[slots])
            self.backs[slots] += kept_back(packed, kept)[moved]
        for slot in self._reserved.keys() & slots.tolist() if self._reserved else ():
            self._note(self.handles[slot])
            self._place(slot, self._reserved.pop(slot))
        write_tokens(self._buffers, packed, moved, slots.tolist(), starts.tolist(), n_tokens)

    def _take_back(self, slots: Int64s, lengths: Int64s, peaks: Int64s) -> None:
        """Put back the positions of slots. Further tokens in their buffers do no harm."""
        self.lengths[slots], self.peaks[slots] = lengths, peaks

    def occupy(self, slots: Int64s) -> None:
        """Mark these slots as being in an open step, until `vacate`."""
        self.is_busy[slots] = True
        self._found_usable = []

    def vacate(self, slots: Int64s) -> None:
        self.is_busy[slots] = False
        for slot in self._reserved.keys() & slots.tolist() if self._reserved else ():
            del self._reserved[slot]

    def truncate(self, slot: int, to: int) -> None:
        self._note(self.handles[slot])
        self.lengths[slot] = to
        if self._sees:
            self.backs[slot] = positions_back(self.tokens(slot)).sum()
        self._go_back_to(slot, to)
        if slot in self._seams:
            self._seams[slot] = tuple(seam for seam in self._seams[slot] if seam[0] <= to)

    def reset(self, slot: int) -> None:
        """Return a slot to position 0, as if it had never been fed."""
        self._note(self.handles[slot])
        self._leave_buffer(self.handles[slot])
        self.lengths[slot] = self.peaks[slot] = self.backs[slot] = 0
        self._seams.pop(slot, None)

    def drop(self, dropped: Dropped, changed_from: int) -> None:
        """Remove tokens. From `changed_from` on, memory differs from what feeding only the remaining tokens gives."""
        slot, tokens = dropped.slot, self.tokens(dropped.slot)
        self._note(self.handles[slot])
        left = np.concatenate([tokens[: dropped.start], tokens[dropped.end :]])
        self._leave_buffer(self.handles[slot])
        self._place(slot, left)
        self.lengths[slot] -= dropped.n_tokens
        self.peaks[slot] -= dropped.n_tokens
        self.n_drops += 1
        before = tuple(seam for seam in self.drops(slot) if seam[0] < changed_from)
        self._seams[slot] = (*before, (changed_from, self.n_drops))

    def drops(self, slot: int) -> tuple[tuple[int, int], ...]:
        """Return pairs (position, drop): from this position on, memory is not what feeding the tokens would give.

        The drop with this number is the reason. Slots with an equal pair have this drop in common.
        """
        return self._seams.get(slot, ())

    def record(self, slot: int) -> dict[str, Any]:
        """Return what a saved file holds of a slot: its tokens (length,), its peak, and the positions of its seams."""
        return {"tokens": self.tokens(slot), "peak": int(self.peaks[slot]), "seams": [at for at, _ in self.drops(slot)]}

    def restore(self, slot: int, ids: Int64s, peak: int) -> None:
        """Fill an empty slot from what a saved file holds of it: its tokens (n,), which are checked, and its peak."""
        self._note(self.handles[slot])
        self._place(slot, ids.copy())
        self.restore_position(slot, len(ids), peak, ())

    def restore_position(self, slot: int, length: int, peak: int, drops: tuple[tuple[int, int], ...]) -> None:
        """Set a slot's length, peak and drops."""
        self._note(self.handles[slot])
        self.lengths[slot], self.peaks[slot] = length, peak
        self.backs[slot] = positions_back(self.tokens(slot)).sum()
        self._seams.pop(slot, None)
        if drops:
            self._seams[slot], self.n_drops = drops, max(self.n_drops, drops[-1][1])

    def send_away(self, slot: int, horizon: int, n_bytes: int) -> None:
        """Mark a slot as swapped out until `bring_back`, and remember its horizon and its bytes."""
        self._note(self.handles[slot])
        self._swapped[slot] = horizon, n_bytes
        self.is_away[slot] = True
        self._found_usable = []

    def bring_back(self, slot: int) -> None:
        self._note(self.handles[slot])
        self._swapped.pop(slot, None)
        self.is_away[slot] = False

    def horizon_away(self, slot: int) -> int | None:
        """Return the horizon that a swapped-out sequence will have after swap-in, or None if it is not swapped out."""
        return self._swapped[slot][0] if slot in self._swapped else None

    def bytes_away(self, slots: Int64s) -> Int64s:
        """Return (S,) how many bytes of each sequence are swapped out."""
        if not self._swapped:
            return np.zeros_like(slots)
        return np.array([self._swapped[slot][1] if slot in self._swapped else 0 for slot in slots.tolist()], np.int64)

    def copy(self, sources: list[Sequence], targets: list[Sequence], horizon_of: Callable[[int], int]) -> None:
        """Make each target's record a copy of its source's, all at once. Tokens are shared.

        Args:
            horizon_of: slot -> horizon, for a target that already holds the memory of its source.
        """
        before = [(target, self._buffers.get(target.slot)) for target in targets]
        records = [
            (s.lineage, self.lengths.item(s.slot), self.peaks.item(s.slot), self.backs.item(s.slot),
             self._buffers.get(s.slot), self._seams.get(s.slot))
            for s in sources
        ]  # fmt: skip
        for (target, own), (lineage, length, peak, back, buffer, seams) in zip(before, records, strict=True):
            slot = target.slot
            self._note(target)
            self.lengths[slot], self.peaks[slot], self.backs[slot], target.lineage = length, peak, back, lineage
            self._seams.pop(slot, None)
            if seams:
                self._seams[slot] = seams
            if buffer is None:
                self._buffers.pop(slot, None)
            else:
                self._buffers[slot] = buffer
            if buffer is not None and target.is_checkpoint:
                buffer.add_checkpoint(Checkpoint(length, target.id, horizon_of(slot), target))
                self._families.setdefault(lineage, {})[buffer] = None
            elif buffer is not None and buffer is not own:
                buffer.live.add(slot)
        # Old buffers come last, because the old buffer of one target may hold the tokens of another's source.
        for (target, own), source in zip(before, sources, strict=True):
            if target is not source and own is self._buffers.get(target.slot):
                self._go_back_to(target.slot, int(self.lengths[target.slot]))
            elif target is not source and own is not None:
                self._writable[target.slot] = 0
                self._release(own, target.slot)

    def checkpoints(self, sequence: Sequence) -> list[Sequence]:
        """Return the open checkpoints of the sequence's family that are not swapped out, oldest first."""
        return [
            # This is a copy, because other threads may open sequences meanwhile.
            handle for handle in [*self.handles.values()]
            if handle.is_checkpoint and handle.lineage == sequence.lineage and not self.is_away[handle.slot]
        ]  # fmt: skip

    def nearest_checkpoint(self, sequence: Sequence, to: int) -> tuple[int, Sequence | None]:
        """Return the furthest position <= `to` that a checkpoint of the family reaches, and the checkpoint; or 0, None.

        Up to that position the checkpoint must have the sequence's tokens, and remember them as the sequence does or as
        if they were fed anew. Cost: O(log checkpoints) for each buffer of the family's checkpoints, and O(to) for a
        buffer that has more tokens in common with the sequence than the others.
        """
        tokens, own = self.tokens(sequence.slot)[:to], self._buffers.get(sequence.slot)
        family = self._families.get(sequence.lineage, {})
        best: tuple[int, Sequence | None] = (0, None)
        for buffer in sorted(family, key=lambda buffer: buffer is not own):
            limit = min(to, buffer.checkpoint_tokens)
            if limit <= best[0] or buffer.ids[best[0]] != tokens[best[0]]:
                continue  # In most buffers, this one token is already different.
            if buffer is not own:
                limit = common_prefix(tokens, buffer.ids[:limit])
            # Tokens dropped from the longest checkpoint were dropped from all others that are long enough, too.
            foreign = {*self._seams.get(buffer.checkpoints[-1].handle.slot, ())} - {*self._seams.get(sequence.slot, ())}
            found = buffer.nearest(min([limit, *(position - 1 for position, _ in foreign)]), self.is_away)
            best = found if found[0] > best[0] else best
        return best

    def check_usable(self, sequence: Sequence, *, to_advance: bool = True, may_be_away: bool = False) -> None:
        """Raise SequenceError unless the handle is of this memory, open, in no open step, and not swapped out.

        With `to_advance` it must not be a checkpoint. With `may_be_away` it may be swapped out.
        """
        if type(sequence) is not Sequence or self.handles.get(sequence.slot) is not sequence:
            self.check_open(sequence)
        if self.is_busy[sequence.slot]:
            if (owner := self._owner()) is not None:
                owner.abort_abandoned()
            if self.is_busy[sequence.slot]:
                raise SequenceError(f"{sequence!r} is in an open step; leave the step first")
        if self.is_away[sequence.slot] and not may_be_away:
            raise SequenceError(f"{sequence!r} is swapped out; bring it back with memory.swap_in(sequence) first")
        if to_advance and sequence.is_checkpoint:
            raise SequenceError(f"{sequence!r} is a checkpoint and stays as it is; fork it and use the fork")

    def can_change(self, sequence: Sequence) -> bool:
        """True if a sequence is open, in the budget and in no open step."""
        slot = sequence.slot
        return not sequence.closed and not self.is_busy[slot] and not self.is_away[slot]

    def check_open(self, sequence: Sequence) -> None:
        """Raise SequenceError unless the handle is open and of this memory."""
        if not isinstance(sequence, Sequence):
            raise SequenceError(f"{sequence!r} is no sequence; use a handle from memory.open(), fork() or checkpoint()")
        if sequence.closed:
            raise SequenceError(f"sequence {sequence.id} is closed; open or fork another one")
        if self.handles.get(sequence.slot) is not sequence:
            raise SequenceError(f"{sequence!r} belongs to another memory; use handles with the memory that made them")

    def check_mark(self, sequence: Sequence, target: Sequence) -> None:
        """Raise SequenceError unless the target of a rollback is an open checkpoint of the sequence's family."""
        self.check_usable(target, to_advance=False)
        if not target.is_checkpoint:
            raise SequenceError(
                f"{target!r} is no checkpoint; to continue as a live sequence does, use reorder or fork"
            )
        if target.lineage != sequence.lineage:
            raise SequenceError(f"{target!r} was not taken from {sequence!r} or its family; fork it instead")

    def check_all_usable(self, sequences: list[Sequence]) -> Int64s:
        """Raise SequenceError unless `check_usable` allows all sequences to advance. Return their slots (S,).

        It is called when a step is made, and again when it is entered. In most cases nothing has changed in between.
        """
        # This is read first, because a change in another thread from here on replaces the list by a new one.
        found = self._found_usable
        for known, slots in found:
            if known == sequences:
                return slots
        numbers = [s.slot for s in sequences]
        slots = np.array(numbers, np.int64)
        are_open = list(map(self.handles.get, numbers)) == sequences
        if not are_open or (self.is_busy[slots] | self.is_away[slots] | self._is_checkpoint[slots]).any():
            for sequence in sequences:
                self.check_usable(sequence)
        found[:] = [(sequences.copy(), slots)]
        return slots

    def check(self) -> None:
        """Raise IntegrityError if slots, handles and positions do not fit together."""
        if sorted([*self.handles, *self._free_slots]) != list(range(len(self.lengths))):
            raise IntegrityError("a slot is lost, or used and free at once")
        free = self._free_slots
        if (self.lengths[free] | self.is_busy[free] | self.is_away[free]).any() or self._seams.keys() & set(free):
            raise IntegrityError("a free slot has a length, an open step or dropped tokens, or is swapped out")
        for slot in self.handles:
            self.check_slot(slot)
        self._check_buffers()

    def check_slot(self, slot: int) -> None:
        """Raise IntegrityError if the record of one open slot contradicts itself."""
        handle, length, peak = self.handles[slot], self.lengths[slot], self.peaks[slot]
        if handle.slot != slot or handle.closed or not length <= peak or len(self.tokens(slot)) != length:
            raise IntegrityError(f"the record of slot {slot} contradicts itself: {handle!r}, furthest {peak}")

    def _check_buffers(self) -> None:
        """Raise IntegrityError unless buffers and slots refer to each other, and writers are the longest holders."""
        live: dict[TokenBuffer, set[int]] = {buffer: set() for buffer in self._buffers.values()}
        checkpoints: dict[TokenBuffer, list[Sequence]] = {buffer: [] for buffer in live}
        for slot, buffer in self._buffers.items():
            is_checkpoint = (handle := self.handles[slot]).is_checkpoint
            checkpoints[buffer].append(handle) if is_checkpoint else live[buffer].add(slot)
        for buffer, slots in live.items():
            writer, own = buffer.writer, checkpoints[buffer]
            held = [(int(self.lengths[handle.slot]), handle.id) for handle in own]
            if buffer.live != slots or sorted(held) != [checkpoint[:2] for checkpoint in buffer.checkpoints]:
                raise IntegrityError(f"the tokens of {sorted(slots)} and of checkpoints {own} are held by others")
            if writer is not None and (writer not in slots or self._reach(buffer) > self.lengths[writer]):
                raise IntegrityError(f"slot {writer} may overwrite tokens that others hold")
        ends = {buffer.writer: len(buffer.ids) for buffer in live}
        wrong = [slot for slot in self._writable.nonzero()[0].tolist() if self._writable[slot] != ends.get(slot)]
        if wrong or self._reserved.keys() - set(self.is_busy.nonzero()[0].tolist()):
            raise IntegrityError(f"slots {wrong} may write where they must not, or tokens are reserved for no step")
        found = {(handle.lineage, buffer) for buffer, handles in checkpoints.items() for handle in handles}
        if found != {(lineage, buffer) for lineage, family in self._families.items() for buffer in family}:
            raise IntegrityError("checkpoints of a family cannot be found")
