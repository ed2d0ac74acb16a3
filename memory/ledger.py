"""The one record of each sequence: its length, the furthest position it reached, and its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from memory.errors import IntegrityError, SequenceError
from memory.interface import Int64s, Packed, Sequence, SequenceOwner
from memory.interrupts import uninterrupted
from memory.shift import Dropped

_NO_TOKENS: Int64s = np.zeros(0, np.int64)


class Ledger:
    """Slots and what is true of the sequence in each. Slots are reused, ids are not.

    Attributes:
        lengths, peaks: (n_slots,) tokens held, and the furthest position ever reached.
        is_busy: (n_slots,) whether a step is open on the sequence.
        is_away: (n_slots,) whether what it remembers has been swapped out.
        handles: slot -> handle, open ones only.
    """

    def __init__(self, owner: SequenceOwner) -> None:
        self.lengths = np.zeros(16, np.int64)
        self.peaks = np.zeros(16, np.int64)
        self.is_busy = np.zeros(16, np.bool_)
        self.is_away = np.zeros(16, np.bool_)
        self.handles: dict[int, Sequence] = {}
        self._owner = owner
        self._tokens: dict[int, Int64s] = {}
        self._capacities = np.zeros(16, np.int64)
        self._is_mark = np.zeros(16, np.bool_)
        self._free_slots = list(range(15, -1, -1))
        self._n_opened = 0
        self._checkpoints: dict[int, dict[Sequence, None]] = {}  # by lineage, in the order in which they were taken
        self._seams: dict[int, tuple[tuple[int, int], ...]] = {}  # slot -> (the first position that a drop has changed, which drop)
        self._n_drops = 0
        self._away: dict[int, tuple[int, int]] = {}  # slot -> its horizon and its bytes, of those swapped out
        self._found_usable: tuple[list[Sequence], Int64s] = [], _NO_TOKENS

    def open(self, *, lineage: int | None = None, is_checkpoint: bool = False) -> Sequence:
        """An empty sequence in a free slot; `lineage` is shared by a sequence and everything forked from it."""
        if not self._free_slots:
            self._grow()
        # The handle is written down last, so that an interrupt before leaves nothing behind.
        slot, id = self._free_slots[-1], self._n_opened
        handle = Sequence(self._owner, id, slot, id if lineage is None else lineage, is_checkpoint=is_checkpoint)
        self._n_opened += 1
        self._tokens[slot] = _NO_TOKENS
        self._capacities[slot] = 0
        self._is_mark[slot] = is_checkpoint
        if is_checkpoint:
            self._checkpoints.setdefault(handle.lineage, {})[handle] = None
        self.handles[slot] = handle
        del self._free_slots[-1]
        return handle

    def _grow(self) -> None:
        with uninterrupted():
            n = len(self.lengths)
            self.lengths, self.peaks, self._capacities = (
                np.concatenate([a, np.zeros(n, np.int64)]) for a in (self.lengths, self.peaks, self._capacities)
            )
            self.is_busy, self.is_away, self._is_mark = (
                np.concatenate([a, np.zeros(n, np.bool_)]) for a in (self.is_busy, self.is_away, self._is_mark)
            )
            self._free_slots = list(range(2 * n - 1, n - 1, -1))

    def close(self, sequence: Sequence) -> None:
        sequence.closed = True
        self._found_usable = [], _NO_TOKENS
        del self.handles[sequence.slot], self._tokens[sequence.slot]
        self.lengths[sequence.slot] = self.peaks[sequence.slot] = 0
        self.bring_back(sequence.slot)
        self._seams.pop(sequence.slot, None)
        self._free_slots.append(sequence.slot)
        if sequence.is_checkpoint:
            del self._checkpoints[sequence.lineage][sequence]
            if not self._checkpoints[sequence.lineage]:
                del self._checkpoints[sequence.lineage]

    def tokens(self, slot: int) -> Int64s:
        """(length,): a view, valid until the sequence changes."""
        return self._tokens[slot][: self.lengths[slot]]

    def reserve(self, packed: Packed) -> None:
        """Make room for a step's tokens, so that `append` has nothing left that could fail."""
        for i in (packed.ends > self._capacities[packed.slots]).nonzero()[0].tolist():
            slot, end = int(packed.slots[i]), int(packed.ends[i])
            buffer = self._tokens[slot]
            self._tokens[slot] = np.concatenate([buffer, np.zeros(end - len(buffer) + max(len(buffer), 16), np.int64)])
            self._capacities[slot] = len(self._tokens[slot])

    def append(self, packed: Packed, kept: Int64s) -> None:
        """Move the sequences of a step on by kept[i] tokens each. Fed tokens count as reached, kept or not."""
        moved = kept.nonzero()[0]
        slots, starts, begins, n_tokens = packed.slots[moved], packed.starts[moved], packed.cu_seqlens[moved], kept[moved]
        self.lengths[slots] = starts + n_tokens
        self.peaks[slots] = packed.peaks[moved]
        buffers = self._tokens
        if packed.is_decode:
            for slot, start, token in zip(slots.tolist(), starts.tolist(), packed.token_ids[moved].tolist(), strict=True):
                buffers[slot][start] = token
            return
        for slot, start, begin, n in zip(slots.tolist(), starts.tolist(), begins.tolist(), n_tokens.tolist(), strict=True):
            buffers[slot][start : start + n] = packed.token_ids[begin : begin + n]

    def occupy(self, slots: Int64s) -> None:
        """A step is open on these, until `vacate`."""
        self.is_busy[slots] = True
        self._found_usable = [], _NO_TOKENS

    def vacate(self, slots: Int64s) -> None:
        self.is_busy[slots] = False

    def truncate(self, slot: int, to: int) -> None:
        self.lengths[slot] = to
        if slot in self._seams:
            self._seams[slot] = tuple(seam for seam in self._seams[slot] if seam[0] <= to)

    def reset(self, slot: int) -> None:
        """Position 0, as if nothing had ever been fed."""
        self.lengths[slot] = self.peaks[slot] = 0
        self._seams.pop(slot, None)

    def drop(self, dropped: Dropped, changed_from: int) -> None:
        """Tokens leave from the middle; at positions from `changed_from` on the memory is no longer what feeding the tokens would give."""
        slot, tokens = dropped.slot, self.tokens(dropped.slot)
        self._tokens[slot] = np.concatenate([tokens[: dropped.start], tokens[dropped.end :]])
        self._capacities[slot] = len(self._tokens[slot])
        self.lengths[slot] -= dropped.n_tokens
        self.peaks[slot] -= dropped.n_tokens
        self._n_drops += 1
        before = tuple(seam for seam in self._seams.get(slot, ()) if seam[0] < changed_from)
        self._seams[slot] = (*before, (changed_from, self._n_drops))

    def seams(self, slot: int) -> list[int]:
        """Positions from which on the memory is not what feeding the tokens would give, because others were dropped before."""
        return [position for position, _ in self._seams.get(slot, ())]

    def record(self, slot: int) -> dict[str, Any]:
        """What `restore` needs: tokens (length,), and the rest as JSON can say it."""
        return {"tokens": self.tokens(slot), "peak": int(self.peaks[slot]), "seams": self.seams(slot)}

    def restore(self, slot: int, record: dict[str, Any], vocab_size: int) -> None:
        """An empty record becomes that of another sequence, perhaps of another process. Raises ValueError, KeyError or TypeError."""
        tokens, peak, seams = np.asarray(record["tokens"], np.int64).ravel(), int(record["peak"]), [int(x) for x in record["seams"]]
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise ValueError(f"token ids {tokens.min()} ... {tokens.max()} are not in a vocabulary of {vocab_size}")
        self._tokens[slot] = tokens.copy()
        self._capacities[slot] = self.lengths[slot] = len(tokens)
        self.peaks[slot] = peak
        if seams:
            self._seams[slot] = tuple((position, self._n_drops + i) for i, position in enumerate(seams, 1))
            self._n_drops += len(seams)

    def send_away(self, slot: int, horizon: int, n_bytes: int) -> None:
        """What the slot remembers has been swapped out, with this horizon, until `bring_back`."""
        self._away[slot] = horizon, n_bytes
        self.is_away[slot] = True
        self._found_usable = [], _NO_TOKENS

    def bring_back(self, slot: int) -> None:
        self._away.pop(slot, None)
        self.is_away[slot] = False

    def horizon_away(self, slot: int) -> int | None:
        """The horizon that a sequence will have when it is back; None of one that is here."""
        return self._away[slot][0] if slot in self._away else None

    def bytes_away(self, slot: int) -> int:
        """That wait outside of the budget."""
        return self._away[slot][1] if slot in self._away else 0

    def copy(self, sources: list[Sequence], targets: list[Sequence]) -> None:
        """All at once: each target's record becomes a copy of its source's."""
        records = [
            (self.lengths[s.slot], self.peaks[s.slot], self.tokens(s.slot).copy(), s.lineage, self._seams.get(s.slot)) for s in sources
        ]
        for target, (length, peak, tokens, lineage, seams) in zip(targets, records, strict=True):
            self.lengths[target.slot], self.peaks[target.slot] = length, peak
            self._tokens[target.slot] = tokens
            self._capacities[target.slot] = len(tokens)
            target.lineage = lineage
            self._seams.pop(target.slot, None)
            if seams:
                self._seams[target.slot] = seams

    def checkpoints(self, sequence: Sequence) -> list[Sequence]:
        """Open checkpoints of the sequence's family that are not swapped out."""
        return [mark for mark in self._checkpoints.get(sequence.lineage, ()) if not self.is_away[mark.slot]]

    def common_prefix(self, a: Sequence, b: Sequence) -> int:
        """How many leading tokens of `a` stand in `b` as well, remembered there as in `a` or as if fed anew. Cost: O(shorter length)."""
        n = int(min(self.lengths[a.slot], self.lengths[b.slot]))
        foreign = set(self._seams.get(b.slot, ())) - set(self._seams.get(a.slot, ()))
        n = max(0, min(n, *(position - 1 for position, _ in foreign))) if foreign else n
        differs = self._tokens[a.slot][:n] != self._tokens[b.slot][:n]
        return int(differs.argmax()) if differs.any() else n

    def check_usable(self, sequence: Sequence, *, to_advance: bool = True, may_be_away: bool = False) -> None:
        """Raise SequenceError unless the handle is open, of this memory, not in an open step, here and, `to_advance`, no checkpoint."""
        self.check_open(sequence)
        if self.is_busy[sequence.slot] and not (self._owner.abort_abandoned() and not self.is_busy[sequence.slot]):
            raise SequenceError(f"{sequence!r} is in an open step; leave the step first")
        if self.is_away[sequence.slot] and not may_be_away:
            raise SequenceError(f"{sequence!r} is swapped out; bring it back with memory.swap_in(sequence) first")
        if to_advance and sequence.is_checkpoint:
            raise SequenceError(f"{sequence!r} is a checkpoint and stays as it is; fork it and use the fork")

    def check_open(self, sequence: Sequence) -> None:
        """Raise SequenceError unless the handle is open, and of this memory."""
        if not isinstance(sequence, Sequence):
            raise SequenceError(f"{sequence!r} is no sequence; use a handle from memory.open(), fork() or checkpoint()")
        if sequence.closed:
            raise SequenceError(f"sequence {sequence.id} is closed; open or fork another one")
        if self.handles.get(sequence.slot) is not sequence:
            raise SequenceError(f"{sequence!r} belongs to another memory; use handles with the memory that made them")

    def check_mark(self, sequence: Sequence, mark: Sequence) -> None:
        """Raise SequenceError unless the mark is an open checkpoint of the sequence's family."""
        self.check_usable(mark, to_advance=False)
        if not mark.is_checkpoint:
            raise SequenceError(f"{mark!r} is no checkpoint; to continue as another live sequence does, use reorder or fork")
        if mark.lineage != sequence.lineage:
            raise SequenceError(f"{mark!r} was not taken from {sequence!r} or its family; fork the checkpoint instead")

    def check_all_usable(self, sequences: list[Sequence]) -> Int64s:
        """As `check_usable` to advance, for every one; their slots (S,).

        Asked when a step is made and again when it is entered; most often nothing was closed or entered in between.
        """
        if sequences == self._found_usable[0]:
            return self._found_usable[1]
        numbers = [s.slot for s in sequences]
        slots = np.array(numbers, np.int64)
        if list(map(self.handles.get, numbers)) != sequences or (self.is_busy[slots] | self.is_away[slots] | self._is_mark[slots]).any():
            for sequence in sequences:
                self.check_usable(sequence)
        self._found_usable = sequences.copy(), slots
        return slots

    def check(self) -> None:
        """Raise IntegrityError if slots, handles and positions do not fit together."""
        if sorted([*self.handles, *self._free_slots]) != list(range(len(self.lengths))):
            raise IntegrityError("a slot is lost, or used and free at once")
        if self.lengths[self._free_slots].any() or self.is_busy[self._free_slots].any():
            raise IntegrityError("a free slot has a length or an open step")
        if self.is_away[self._free_slots].any():
            raise IntegrityError("a free slot is swapped out")
        if self._seams.keys() - self.handles.keys():
            raise IntegrityError("a free slot has dropped tokens")
        for slot, handle in self.handles.items():
            length, peak = self.lengths[slot], self.peaks[slot]
            if handle.slot != slot or handle.closed or not length <= min(peak, self._capacities[slot]):
                raise IntegrityError(f"the record of slot {slot} contradicts itself: {handle!r}, furthest {peak}")
