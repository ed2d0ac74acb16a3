"""Runs recurrences over trees of draft tokens, from body and tail, without a state for each token.

    position 0 ......... body_at ............ start
                          | tail: rows ------ | - 0 - 1 - 3
                                              |    \\- 2

A recurrence first computes the state at `start` in scratch memory. From there it runs the rows of each path that ends
in a leaf as a segment of its own, a few paths at once. Blocks are only read. Scratch memory is that of one layer, which
the layers of a step use one after the other: a few states of one layer, however many tokens the tree has.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import Bools, Int64s, ranges, starts_of
from hybridmem.memory.blocks.layout import BlockLayout
from hybridmem.memory.interface import Packed
from hybridmem.memory.kernels import Prepared
from hybridmem.memory.sequences.draft_trees import Paths
from hybridmem.memory.sequences.folding import NOTHING, Columns
from hybridmem.memory.state.access import BlockAccess, Recurrence, Segments, States
from hybridmem.memory.state.readers import TailReader, TailReads, run_one
from hybridmem.memory.state.tail_blocks import TailBlocks
from hybridmem.memory.state.tails import TailStep

_NO_SOURCE = -1
"""Stands for a source of a segment that begins its sequence."""

_PATHS_AT_ONCE = 8
"""How many paths a kernel call runs at most, so that scratch memory does not grow with the number of leaves."""


@dataclass(frozen=True)
class _Chunk:
    """Describes the paths of one kernel call.

    Attributes:
        own: their segments, in scratch memory.
        rows: the token of each row, as an index of the trees' tokens.
        picks, nodes: the rows whose outputs are wanted, and the tokens that they are for. A token that several paths
            share is taken from the first of them.
    """

    own: Segments
    rows: Tensor
    picks: Tensor
    nodes: Tensor


@dataclass(frozen=True)
class BranchReads:
    """Says what the recurrences of a step read of its trees.

    Attributes:
        starts: element size in bytes -> (R,) element offsets in the arena of each tree's nearest state.
        copies: the places of these states in scratch memory.
        old: the segments of old rows that lead from there to the sequences' ends; None if there are none.
        behind: with fold mode "defer", what is read of body and tail instead.
        n_slots: how many states of one layer scratch memory holds.
        scratch: the scratch memory. The first recurrence of the step allocates it.
    """

    starts: dict[int, Prepared]
    copies: dict[int, Prepared]
    old: Segments | None
    behind: TailReads | None
    chunks: list[_Chunk]
    n_nodes: int
    n_slots: int
    scratch: list[Tensor] = field(default_factory=list)


class BranchReader:
    """Runs the recurrences of `memory.state.readers` over the paths of trees.

    Args:
        reader: the reader of the same blocks. Its access, specs and, with fold mode "defer", its rings are used.
    """

    def __init__(self, reader: Any, blocks: TailBlocks) -> None:
        self._reader, self._blocks = reader, blocks
        self._access: BlockAccess = reader.access
        self._layouts = [BlockLayout.of([(t.shape, t.dtype or blocks.dtype) for t in s.states]) for s in reader.specs]
        self._slot_bytes = max(layout.block_bytes for layout in self._layouts)

    def plan(self, step: TailStep, paths: Paths) -> BranchReads:
        """Find the states and rows that a step reads for its trees.

        Args:
            step: the requests that have trees. Where recurrences read behind a tail, `after` has tails of their own.
        """
        packed, before, store = step.packed, step.before, self._blocks.store
        starts, n = packed.starts, len(packed.starts)
        # A recurrence may treat the first token of a sequence in another way, so its segment has no source.
        slots, behind, old, begins_at = np.arange(n), None, None, np.arange(n)
        if isinstance(self._reader, TailReader):
            at, ids, copies = starts, before.body, n + slots
            behind = self._behind(step, copies, slots)
        else:
            at, ids = _nearest(before, starts)
            copies = slots
            is_begin, has_old = ids < 0, at < starts
            if has_old.any():
                old = self._old(before, has_old, at, starts, np.where(is_begin, _NO_SOURCE, slots))
            begins_at = np.where(is_begin & ~has_old, _NO_SOURCE, slots)
        sources = np.where(ids < 0, NOTHING, self._blocks.states.addresses[ids])
        first = n if behind is None else 2 * n
        chunks, seen = list[_Chunk](), np.zeros(int(paths.rows.max()) + 1, np.bool_)
        for begin in range(0, len(paths.owners), _PATHS_AT_ONCE):
            part = paths.part(begin, begin + _PATHS_AT_ONCE)
            nodes, picks = np.unique(part.rows, return_index=True)
            is_new = ~seen[nodes]
            seen[nodes] = True
            own = self._segments(
                part.cu_rows, starts[part.owners], begins_at[part.owners], first + np.arange(len(part.owners))
            )
            chunks.append(_Chunk(own, *map(store.upload, (part.rows, picks[is_new], nodes[is_new]))))
        elements = self._access.elements
        n_slots = first + min(_PATHS_AT_ONCE, len(paths.owners))
        return BranchReads(
            elements(sources), elements(copies * self._slot_bytes), old, behind, chunks, len(seen), n_slots
        )

    def _old(self, before: Columns, has_old: Bools, at: Int64s, starts: Int64s, sources: Int64s) -> Segments:
        """Find the old rows that lead from the nearest states, `sources`, to the sequences' ends."""
        chosen = has_old.nonzero()[0]
        begin, end = at[chosen], starts[chosen]
        tail_rows = self._access.ring(np.repeat(before.tail[chosen], end - begin), ranges(begin, end))
        return self._segments(starts_of(end - begin), begin, sources[chosen], chosen, tail_rows)

    def _behind(self, step: TailStep, sources: Int64s, targets: Int64s) -> TailReads:
        """Find what a kernel reads after a body, to write the state at the end of the sequence.

        It takes one row for each request, whose output nobody reads: the request's own tail has room for what the row
        changes.
        """
        packed, n = step.packed, len(step.packed.starts)
        only = np.zeros(n, np.int64)
        one_each = Packed(packed.slots, packed.starts, np.arange(n + 1), packed.starts, only, packed.starts, only)
        after = Columns(step.after.table.copy())
        after.body_at[:] = packed.starts
        reads: TailReads = self._reader.plan(TailStep(one_each, step.before, after, step.fresh))
        return replace(reads, own=self._segments(np.arange(n + 1), packed.starts, sources, targets))

    def _segments(
        self, cu_rows: Int64s, begins: Int64s, sources: Int64s, targets: Int64s,
        tail_rows: dict[int, Prepared] | None = None,
    ) -> Segments:  # fmt: skip
        """Return segments between states of scratch memory, which are given by their numbers there."""
        at = (np.where(slots == _NO_SOURCE, NOTHING, slots * self._slot_bytes) for slots in (sources, targets))
        source, target = map(self._access.elements, at)
        return Segments(self._blocks.store.place(cu_rows), begins, source, target, tail_rows, None)

    def run(self, reads: BranchReads, index: int, rows: Tensor, recurrence: Recurrence) -> Tensor:
        """Run recurrence `index` over the trees' rows (N, *row_shape), and return their outputs (N, ...)."""
        spec, access = self._reader.specs[index], self._access
        flats = self._flats(reads, index)
        for arena, flat, state in zip(access.states[index], flats, spec.states, strict=True):
            found = access.kernels.read_rows(arena, reads.starts[flat.itemsize], state.shape, state.initial)
            access.kernels.write_rows_(flat, reads.copies[flat.itemsize], found.flatten(1))
        if reads.behind is not None:
            tails, nothing = self._reader.tails_of(reads.behind, index), rows.new_zeros(1, *rows.shape[1:])
            own = reads.behind.own
            n_requests = len(own.begins)
            run_one(
                States(spec, access.kernels, flats, own, tails),
                nothing.expand(n_requests, *rows.shape[1:]).contiguous(), recurrence,
            )  # fmt: skip
        if reads.old is not None:
            assert reads.old.tail_rows is not None, "these rows are in tails"
            run_one(
                States(spec, access.kernels, flats, reads.old), access.read_rows(index, reads.old.tail_rows), recurrence
            )
        outputs: Tensor | None = None
        for chunk in reads.chunks:
            y = run_one(States(spec, access.kernels, flats, chunk.own), rows[chunk.rows], recurrence)
            if outputs is None:
                outputs = y.new_empty(reads.n_nodes, *y.shape[1:])
            outputs[chunk.nodes] = y[chunk.picks]
        assert outputs is not None, "a tree has a leaf"
        return outputs

    def _flats(self, reads: BranchReads, index: int) -> list[Prepared]:
        """Return scratch memory as flat views, one for each state tensor of a recurrence."""
        if not reads.scratch:
            n_bytes = reads.n_slots * self._slot_bytes
            reads.scratch.append(torch.empty(n_bytes, dtype=torch.uint8, device=self._blocks.store.device))
        (scratch,) = reads.scratch
        return [
            self._access.kernels.prepare(scratch.view(field.dtype)[field.offset_bytes // field.dtype.itemsize :])
            for field in self._layouts[index].fields
        ]


def _nearest(before: Columns, starts: Int64s) -> tuple[Int64s, Int64s]:
    """Return (R,) the position of the last state of each request up to its start, and the id of that state."""
    from_kept = before.kept_at > before.body_at
    at, ids = np.where(from_kept, before.kept_at, before.body_at), np.where(from_kept, before.kept, before.body)
    from_head = (before.head_at >= at) & (before.head_at <= starts)
    return np.where(from_head, before.head_at, at), np.where(from_head, before.head, ids)
