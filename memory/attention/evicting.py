"""Keeps keys and values under an eviction policy: the body holds the kept rows, the tail the newest rows unchanged.

Blocks, fold points, forks and rollback are those of a `TailTable`. There is no head, because attention reads body and
tail as they are. A step reads the body as it was before the step, the rows of the tail, and the step's own rows. Then
rows that have become older than the rollback window fold into a new body.

    position 0 .......................... body_at ............... start ......... end
             kept rows, at most the budget |  tail rows, verbatim  |  rows of the step

A sequence that was rolled back may begin a step at a length below body_at + rollback_window. At this length, its body's
newest rows would not have folded yet. The step must then see what a sequence sees that never went further: the body of
the last fold point that such a sequence has passed, and exact rows after that. `KeptRows` gathers both from the present
body. The present body's choice of rows stays valid, and is used again when the sequence is long enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.attention.kept_rows import KeptRows
from hybridmem.memory.blocks.arrays import EMPTY, Int64s, ranges, starts_of
from hybridmem.memory.blocks.holdings import LiveRows
from hybridmem.memory.blocks.layout import Field
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.errors import StepError
from hybridmem.memory.eviction import EvictionPolicy
from hybridmem.memory.interface import Packed
from hybridmem.memory.kernels import FoldedRows, PagedBatch, Prepared, Scoring, as_tensor, select_kernels
from hybridmem.memory.quantization import Parts, Storage
from hybridmem.memory.sequences.drop import CannotDrop
from hybridmem.memory.sequences.folding import TailRules
from hybridmem.memory.specs import AttentionSpec
from hybridmem.memory.state.access import BlockAccess, RowWrites
from hybridmem.memory.state.tail_blocks import TailBlocks, TailMember
from hybridmem.memory.state.tails import TailStep, TailTable


@dataclass(frozen=True)
class Copied:
    """Says how to read a request whose rows must be copied, because some are not in the arena or not in order.

    Attributes:
        fold_point: the last fold point that the request has passed at its present length. After a rollback, the body is
            at a later one.
        batch: a batch of only this request, in which a page is one row. With `is_paged`, the rows that a storage holds
            are not in these pages.
        is_paged: True if the kernel that reads rows in place reads these rows too, so that both ways give the same
            bits.
        cu_bodies, n_kept: the fields of `FoldedRows`, if a storage holds some of the rows.
    """

    fold_point: int
    batch: PagedBatch
    is_paged: bool
    cu_bodies: Int64s
    n_kept: Int64s


@dataclass(frozen=True)
class Reads:
    """Says where the rows are that a step reads.

    Attributes:
        in_place: the requests whose rows are all in the arena while the step runs, because the new ones fit into the
            tail. A page is one row. Its address differs between attentions.
        tokens: (t,) the packed indices of the tokens of these requests. None: all tokens of the step.
        rows: elements per row in a tail and in a body -> the element offset of each row that these tokens see. The
            offset does not include that of an attention's field in its block.
        is_tail: for each of these rows, 1 if it is in a tail and 0 if it is in a body.
        bodies, cu_bodies, n_kept: with a storage, the fields of `FoldedRows` for the bodies that hold these requests'
            kept rows.
        copied: all requests that are not read in place.
        tails: for each request that is copied or folds, two things: the position of the first row of its tail that is
            read, and, by elements per row, the element offset of each old row from there on.
    """

    in_place: PagedBatch
    tokens: Tensor | None
    rows: dict[tuple[int, int], Tensor]
    is_tail: Tensor
    bodies: Tensor
    cu_bodies: Int64s
    n_kept: Int64s
    copied: dict[int, Copied]
    tails: dict[int, tuple[int, dict[int, Prepared]]]


@dataclass(frozen=True)
class EvictingPlan:
    """Holds the blocks allocated for a step, what it reads (None in a dry run), and where its rows are written."""

    step: TailStep
    reads: Reads | None
    writes: RowWrites

    @property
    def can_capture(self) -> bool:
        return False  # The host decides what to evict, so a CUDA graph cannot replay the step.


class EvictingAttention(CannotDrop, TailTable[EvictingPlan]):
    """Keeps body and tail of all attention layers of one eviction policy: a `memory.interface.LayerMemory`.

    Args:
        specs: the attention specs, in the order in which `attend` numbers them. All have the same `policy`.
    """

    def __init__(
        self, specs: list[AttentionSpec], policy: EvictionPolicy, storage: Storage | None, dtype: torch.dtype,
        rollback_window: int, store: Store, name: str,
    ) -> None:  # fmt: skip
        for spec in specs:
            if storage is not None:
                storage.check(spec.head_dim)
        self._kept_rows = kept_rows = KeptRows(policy, storage, rollback_window)
        members = [_member(spec, kept_rows) for spec in specs]
        row_axes = [kept_rows.row_axis_of(state) for member in members for state in member.states]
        # With a storage, rows that have folded lately stay in the tail as well, in exact form.
        overlap_tokens = 0 if storage is None else kept_rows.ring_rows
        rules = TailRules.of_attention(rollback_window, policy.every, overlap_tokens)
        super().__init__(TailBlocks(members, dtype, rules, store, label=f" of {name}", row_axes=row_axes))
        self.policy, self.storage = policy, storage
        self._specs, self._dtype, self._store = specs, dtype, store
        self._kernels = select_kernels(store.device, dtype)
        self._access = access = BlockAccess(self.blocks, self._kernels)
        self._sizes = [(n_row, _kept_elements(s)) for n_row, s in zip(access.row_elements, specs, strict=True)]
        self._heads = {(s.n_query_heads, s.n_kv_heads, s.head_dim) for s in specs}
        # A row holds its keys and then its values. One offset finds both, in two flat tensors. The first tensor is the
        # whole arena. The second begins later by as many elements as keys take, or by none if values are a part of the
        # keys.
        self._all: dict[int, Prepared] = {}
        if not store.is_dry:
            for first in {0, *(_values_at(s) for s in specs)}:
                self._all[first] = self._kernels.prepare(store.flat(Field(first * dtype.itemsize, (), dtype)))

    def plan(self, packed: Packed) -> EvictingPlan:
        step = self.plan_blocks(packed)
        try:
            reads = None if self._store.is_dry else self._plan_reads(step)
            return EvictingPlan(step, reads, self._access.plan_writes(step))
        except BaseException:
            self.free_blocks(step)
            raise

    def _plan_reads(self, step: TailStep) -> Reads:
        packed, before, after, states, tails = step.packed, step.before, step.after, self.states, self.tails
        rules, upload, tokens = self.rules, self._store.upload, None
        # If a sequence was longer once, before a rollback, its body may be after the last fold point that a sequence of
        # its present length has passed.
        has_gone_beyond = (packed.starts < before.body_at + rules.rollback_window) & (before.body_at > 0)
        is_copied = (packed.starts < after.body_at) | has_gone_beyond
        in_place = (~is_copied).nonzero()[0]
        chosen = before.take(in_place)
        starts, counts = packed.starts[in_place], packed.counts[in_place]
        # Each request reads three ranges of rows: the kept rows, the old rows of the tail, and the new rows.
        n_kept = np.minimum(chosen.body_at, self.policy.budget_tokens)
        bodies = states.addresses[chosen.body[n_kept > 0]]
        n_in_place = np.zeros_like(n_kept) if self.storage else n_kept
        ids = np.stack([chosen.body, chosen.tail, after.tail[in_place]], 1)
        begins = np.stack([np.zeros_like(starts), chosen.body_at, starts], 1)
        lengths = np.stack([n_in_place, starts - chosen.body_at, counts], 1)
        addresses = np.stack([states.addresses[ids[:, 0]], *(tails.addresses[ids[:, i]] for i in (1, 2))], 1)
        blocks = np.repeat(addresses.ravel() // self._dtype.itemsize, lengths.ravel())
        is_tail = np.repeat(np.tile([False, True, True], len(in_place)), lengths.ravel())
        rows = ranges(begins.ravel(), (begins + lengths).ravel())
        rows[is_tail] %= rules.tail_rows
        if len(in_place) < len(packed.starts):
            tokens = upload(ranges(packed.cu_seqlens[:-1][in_place], packed.cu_seqlens[1:][in_place]))
        copied, tail_rows = dict[int, Copied](), dict[int, tuple[int, dict[int, Prepared]]]()
        for i in is_copied.nonzero()[0].tolist():
            copied[i] = self._copied(packed, i)
        for i in ((after.body_at > before.body_at) | is_copied).nonzero()[0].tolist():
            tail_at = copied[i].fold_point if i in copied and self.storage else int(before.body_at[i])
            old = np.arange(tail_at, packed.starts[i])
            tail_rows[i] = tail_at, self._access.ring(np.full(len(old), before.tail[i]), old)
        return Reads(
            PagedBatch(starts_of(counts), lengths.sum(1), EMPTY, starts_of(lengths.sum(1)), page_tokens=1), tokens,
            {sizes: upload(blocks + rows * np.where(is_tail, *sizes)) for sizes in set(self._sizes)},
            upload(is_tail.astype(np.int64)), upload(bodies), starts_of((n_kept > 0).astype(np.int64)),
            n_kept, copied, tail_rows,
        )  # fmt: skip

    def _copied(self, packed: Packed, i: int) -> Copied:
        start, end = packed.starts[i : i + 1], packed.ends[i : i + 1]
        fold_point, next_fold_point = int(self.rules.body_at(start)[0]), int(self.rules.body_at(end)[0])
        # Requests at the same positions are read by the same kernel, whatever their sequences have seen before.
        is_paged = next_fold_point <= start[0]
        n_kept, n_new = self._kept_rows.n_kept(fold_point), packed.counts[i : i + 1]
        is_stored = bool(is_paged and self.storage is not None and n_kept > 0)
        n_rows = end - fold_point + (not is_stored) * n_kept
        batch = PagedBatch(starts_of(n_new), n_rows, EMPTY, starts_of(n_rows), page_tokens=1)
        return Copied(fold_point, batch, bool(is_paged), np.array([0, int(is_stored)]), np.array([is_stored * n_kept]))

    def begin(self, plan: EvictingPlan) -> None:
        super().begin(plan)
        if (reads := plan.reads) is None:
            return
        batches = [(copied.batch, self._folded_copy(copied, 0, ())) for copied in reads.copied.values()]
        if len(reads.in_place.kv_lengths):
            batches.append((reads.in_place, self._folded(reads, 0)))
        for batch, folded in batches:
            for heads in self._heads:
                self._kernels.plan_attention(batch, heads, self._dtype, self._store.device, None, folded)

    def attend(
        self, plan: EvictingPlan, index: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """Attend to each sequence's kept rows, its tail, and the step's rows up to each token. Then fold.

        Returns (T, H, D or value_dim).
        """
        packed = plan.step.packed
        self._specs[index].check_rows(len(packed.token_ids), self._dtype, self._store.device, q_THD, k_TGD, v_TGD)
        if scoring.bias_HL is not None:
            raise StepError(f"scores with a bias by distance need every row; take {self.policy.label} off this layer")
        reads = plan.reads
        assert reads is not None, "a dry run does not attend"
        kv = [k_TGD] if v_TGD is None else [k_TGD, v_TGD]
        rows_TXD = torch.cat([*kv, q_THD] if self.policy.needs_queries else kv, 1)
        self._access.write_rows(index, plan.writes, rows_TXD)
        if reads.tokens is None:
            out_THD = self._attend_in_place(reads, index, q_THD, scoring)
        else:
            out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
            if len(reads.in_place.kv_lengths):
                out_THD[reads.tokens] = self._attend_in_place(reads, index, q_THD[reads.tokens], scoring)
        for i, (tail_at, offsets) in reads.tails.items():
            own = slice(*packed.cu_seqlens[i : i + 2].tolist())
            rows_RXD = torch.cat([self._access.read_rows(index, offsets), rows_TXD[own]])
            body = self._body(index, int(plan.step.before.body[i]))
            body_at, target_at = int(plan.step.before.body_at[i]), int(plan.step.after.body_at[i])
            if i in reads.copied:
                out_THD[own] = self._attend_copied(reads.copied[i], index, q_THD[own], body, body_at, rows_RXD, scoring)
            if target_at > body_at:
                spec, new_body = self._specs[index], self._body(index, int(plan.step.after.body[i]))
                folding_NXD = rows_RXD[body_at - tail_at : target_at - tail_at]
                found = self._kept_rows.fold(body, body_at, target_at, folding_NXD, spec, scoring)
                self._kept_rows.write(new_body, target_at, *found)
        return out_THD[..., : self._specs[index].value_dim]

    def why_not(self) -> str:
        return f"which rows attention with {self.policy.label} has kept depends on them"

    def live_rows(self, slot: int, length: int) -> LiveRows:
        """Mark the rows of a body that are in use.

        A body has room for the policy's budget and for rows that were evicted lately.
        """
        live = super().live_rows(slot, length)
        own, name = self._kept_rows.are_live(int(self.slots.body_at[slot])), self.states.name
        return live | {name: live[name] & own}

    def kept_positions(self, slot: int, index: int) -> Tensor:
        """Return the positions of the rows that attention `index` has kept of a sequence, (R, G) int64, ascending.

        The tail's positions are not included.
        """
        slots = self.slots
        return self._kept_rows.kept_of(self._body(index, int(slots.body[slot])), int(slots.body_at[slot])).positions.T

    def _attend_in_place(self, reads: Reads, index: int, q_THD: Tensor, scoring: Scoring) -> Tensor:
        spec, blocks, itemsize = self._specs[index], self.blocks, self._dtype.itemsize
        body = blocks.state_layout.fields[len(blocks.members[index].states) * index].offset_bytes // itemsize
        tail = blocks.tail_layout.fields[index].offset_bytes // itemsize
        rows = torch.add(reads.rows[self._sizes[index]], reads.is_tail, alpha=tail - body).add_(body)
        batch = reads.in_place.at(self._kernels.prepare(rows))
        keys, values = self._all[0], self._all[_values_at(spec)]
        return self._kernels.paged_attention(
            q_THD, keys, values, batch, spec.n_kv_heads, scoring, self._folded(reads, index)
        )

    def _folded(self, reads: Reads, index: int) -> FoldedRows | None:
        if self.storage is None or not len(reads.bodies):
            return None
        shapes = self._stored_shapes(index)
        flats = tuple(self._access.states[index][: len(shapes)])
        return FoldedRows(
            self.storage, shapes, flats, reads.bodies, reads.cu_bodies, reads.n_kept, self._specs[index].head_dim
        )

    def _stored_shapes(self, index: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of a body's rows as they are stored: all its tensors except the positions and scores."""
        return tuple(state.shape for state in self.blocks.members[index].states[:-2])

    def _attend_copied(
        self, copied: Copied, index: int, q_THD: Tensor, body: list[Tensor], body_at: int, rows_RXD: Tensor,
        scoring: Scoring,
    ) -> Tensor:  # fmt: skip
        """Attend to the rows of a body as they were seen at `copied.fold_point`, and to `rows_RXD` after them."""
        spec, kept_rows, kernels = self._specs[index], self._kept_rows, self._kernels
        if copied.fold_point == body_at:
            seen = kept_rows.kept_of(body, body_at)
        else:
            seen = kept_rows.seen_at(body, body_at, copied.fold_point)
        newer_RGD = [rows_RXD[:, n * spec.n_kv_heads : (n + 1) * spec.n_kv_heads] for n in range(spec.n_parts)]
        if (folded := self._folded_copy(copied, index, seen.parts)) is None:
            older_GRD = kept_rows.decoded(seen.parts, self._dtype)[: spec.n_parts]
            newer_RGD = [torch.cat([old.transpose(0, 1), new]) for old, new in zip(older_GRD, newer_RGD, strict=True)]
        if not copied.is_paged:
            return kernels.attend_rows(q_THD, newer_RGD[0], newer_RGD[-1], scoring, copied.batch)
        flat = torch.cat(newer_RGD, 1).flatten()
        pages = self._store.upload(np.arange(len(newer_RGD[0])) * _kept_elements(spec))
        keys, values = kernels.prepare(flat), kernels.prepare(flat[_values_at(spec) :])
        batch = copied.batch.at(kernels.prepare(pages))
        return kernels.paged_attention(q_THD, keys, values, batch, spec.n_kv_heads, scoring, folded)

    def _folded_copy(self, copied: Copied, index: int, parts: Parts) -> FoldedRows | None:
        """Return one request's stored rows, which are not in a body, as if they were the only block.

        While a step is planned, `parts` is empty, because the rows are not copied yet.
        """
        if self.storage is None or not copied.n_kept.any():
            return None
        n_missing = self._kept_rows.body_rows - int(copied.n_kept[0])
        flats = tuple(self._kernels.prepare(F.pad(part, (0, 0, 0, n_missing)).flatten()) for part in parts)
        block = self._store.upload(np.zeros(1, np.int64))
        return FoldedRows(
            self.storage, self._stored_shapes(index), flats, block, copied.cu_bodies, copied.n_kept,
            self._specs[index].head_dim,
        )  # fmt: skip

    def _body(self, index: int, block: int) -> list[Tensor]:
        """Return views of attention `index`'s state tensors in a block. Without a block, return zeros."""
        states = self.blocks.members[index].states
        if block < 0:
            return [torch.zeros(s.shape, dtype=s.dtype or self._dtype, device=self._store.device) for s in states]
        views = []
        for flat, state in zip(map(as_tensor, self._access.states[index]), states, strict=True):
            at = int(self.states.addresses[block]) // flat.element_size()
            views.append(flat[at : at + math.prod(state.shape)].view(state.shape))
        return views


def _member(spec: AttentionSpec, kept_rows: KeptRows) -> TailMember:
    """Describe what the blocks hold for an attention.

    A row of a tail holds keys, then values unless they are part of the keys, then queries if the policy observes them.
    """
    n_queries = kept_rows.policy.needs_queries * spec.n_query_heads
    return TailMember(kept_rows.states_of(spec), (spec.n_parts * spec.n_kv_heads + n_queries, spec.head_dim))


def _kept_elements(spec: AttentionSpec) -> int:
    """Return the number of elements of a row in a body."""
    return spec.n_parts * spec.n_kv_heads * spec.head_dim


def _values_at(spec: AttentionSpec) -> int:
    """Return the distance, in elements, from a row's keys to its values."""
    return (spec.n_parts - 1) * spec.n_kv_heads * spec.head_dim
