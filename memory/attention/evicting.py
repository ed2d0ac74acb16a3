"""Keeps keys and values under an eviction policy: the body holds the kept rows, the tail the newest rows verbatim.

Blocks, fold points, forks and rollback are those of a `TailTable`. There is no head, for attention reads body and tail
as they are. A step reads the body as it was before the step, the rows of the tail, and its own; then rows that have
become older than the rollback window fold into a new body.

    position 0 .......................... body_at ............... start ......... end
             kept rows, at most the budget |  tail rows, verbatim  |  rows of the step
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from memory.blocks.arrays import EMPTY, Int64s, ranges, starts_of
from memory.blocks.holdings import LiveRows
from memory.blocks.layout import Field
from memory.blocks.staging import is_apart
from memory.blocks.store import Store
from memory.errors import SpecError, StepError
from memory.eviction import Candidates, EvictionPolicy
from memory.interface import Packed
from memory.kernels import FoldedRows, PagedBatch, Prepared, Scoring, select_kernels
from memory.quantization import Parts, Storage
from memory.sequences.drop import CannotDrop
from memory.sequences.folding import TailRules
from memory.specs import AttentionSpec, StateTensor
from memory.state.access import BlockAccess, RowWrites
from memory.state.tail_memory import TailMemory
from memory.state.tails import TailMember, TailStep, TailTable


@dataclass(frozen=True)
class Reads:
    """Says where the rows are that a step reads.

    Attributes:
        in_place: the requests whose rows are all in the arena while the step runs, because new ones fit into the tail.
            A page is one row; its address differs from attention to attention.
        tokens: (t,) packed index of their tokens; None if they are all.
        rows: elements a row in a tail and in a body -> element offset of each row that they see, without the offset of
            an attention's field in its block.
        is_tail: 1 for each of these rows that is in a tail, 0 in a body.
        bodies, cu_bodies, n_kept: with a storage, the bodies that hold their kept rows: as in `FoldedRows`.
        beside: for each other request a batch of its own, whose rows are copied together.
        old_rows: of each request that folds, elements a row -> element offset of each old row of its tail.
    """

    in_place: PagedBatch
    tokens: Tensor | None
    rows: dict[tuple[int, int], Tensor]
    is_tail: Tensor
    bodies: Tensor
    cu_bodies: Int64s
    n_kept: Int64s
    beside: dict[int, PagedBatch]
    old_rows: dict[int, dict[int, Prepared]]


@dataclass(frozen=True)
class EvictingPlan:
    """Holds the blocks that are allocated for a step, what it reads (None in a dry run), and where its rows go."""

    step: TailStep
    reads: Reads | None
    writes: RowWrites

    @property
    def can_capture(self) -> bool:
        return False  # eviction is decided on the host, so a CUDA graph cannot replay it


class EvictingAttention(CannotDrop, TailMemory):
    """Keeps body and tail of all attention layers of one eviction policy: a `memory.interface.LayerMemory`.

    Args:
        specs: the attention specs, in the order in which `attend` numbers them; `policy` is that of all of them.
    """

    def __init__(
        self, specs: list[AttentionSpec], policy: EvictionPolicy, storage: Storage | None, dtype: torch.dtype,
        rollback_window: int, store: Store, name: str,
    ) -> None:  # fmt: skip
        for spec in specs:
            if storage is not None:
                storage.check(spec.head_dim)
        members = [_member(s, policy, storage) for s in specs]
        # The parts of a storage are laid out head by head, so rows are their second axis.
        row_axes = [0 if storage is None or t.name in _BESIDE else 1 for m in members for t in m.states]
        rules = TailRules.of_attention(rollback_window, policy.every)
        super().__init__(TailTable(members, dtype, rules, store, label=f" of {name}", row_axes=row_axes))
        self.policy, self.storage = policy, storage
        self._specs, self._dtype, self._store = specs, dtype, store
        self._kernels = select_kernels(store.device, dtype)
        self._access = access = BlockAccess(self.table, self._kernels)
        self._sizes = [(n_row, _kept_elements(s)) for n_row, s in zip(access.row_elements, specs, strict=True)]
        self._heads = {(s.n_query_heads, s.n_kv_heads, s.head_dim) for s in specs}
        # A row holds its keys and then its values. One offset finds both: in a flat tensor of the whole arena, and in
        # one that begins as many elements later as keys take; none, where values are a part of the keys.
        self._all: dict[int, Prepared] = {}
        if not store.is_dry:
            for first in {0, *(_values_at(s) for s in specs)}:
                self._all[first] = self._kernels.prepare(store.flat(Field(first * dtype.itemsize, (), dtype)))

    def plan(self, packed: Packed) -> EvictingPlan:
        step = self.table.plan(packed)
        try:
            reads = None if self._store.is_dry else self._plan_reads(step)
            return EvictingPlan(step, reads, self._access.plan_writes(step))
        except BaseException:
            self.table.abort(step)
            raise

    def _plan_reads(self, step: TailStep) -> Reads:
        packed, before, after, states, tails = step.packed, step.before, step.after, self.table.states, self.table.tails
        in_place = (packed.starts >= after.body_at).nonzero()[0]
        chosen = before.take(in_place)
        starts, counts = packed.starts[in_place], packed.counts[in_place]
        # Each request reads three stretches of rows: those that were kept, the old ones of the tail, the new ones.
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
        rows[is_tail] %= self.table.rules.tail_rows
        upload, tokens = self._store.upload, None
        if len(in_place) < len(packed.starts):
            tokens = upload(ranges(packed.cu_seqlens[:-1][in_place], packed.cu_seqlens[1:][in_place]))
        beside, old_rows = dict[int, PagedBatch](), dict[int, dict[int, Prepared]]()
        for i in (after.body_at > before.body_at).nonzero()[0].tolist():
            old = np.arange(before.body_at[i], packed.starts[i])
            old_rows[i] = self._access.ring(np.full(len(old), before.tail[i]), old)
            if packed.starts[i] < after.body_at[i]:
                n_rows = np.minimum(before.body_at[i : i + 1], self.policy.budget_tokens) + len(old) + packed.counts[i]
                beside[i] = PagedBatch(
                    starts_of(packed.counts[i : i + 1]), n_rows, EMPTY, starts_of(n_rows), page_tokens=1
                )
        return Reads(
            PagedBatch(starts_of(counts), lengths.sum(1), EMPTY, starts_of(lengths.sum(1)), page_tokens=1), tokens,
            {sizes: upload(blocks + rows * np.where(is_tail, *sizes)) for sizes in set(self._sizes)},
            upload(is_tail.astype(np.int64)), upload(bodies), starts_of((n_kept > 0).astype(np.int64)),
            n_kept, beside, old_rows,
        )  # fmt: skip

    def begin(self, plan: EvictingPlan) -> None:
        self.table.begin(plan.step)
        if (reads := plan.reads) is None:
            return
        batches: list[tuple[PagedBatch, FoldedRows | None]] = [(batch, None) for batch in reads.beside.values()]
        if len(reads.in_place.kv_lengths):
            batches.append((reads.in_place, self._folded(reads, 0)))
        for batch, folded in batches:
            for heads in self._heads:
                self._kernels.plan_attention(batch, heads, self._dtype, self._store.device, None, folded)

    def attend(
        self, plan: EvictingPlan, index: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """Attend to what each sequence has kept, its tail and the step's rows up to each token. Then fold.

        Returns (T, H, D or value_dim).
        """
        self._specs[index].check_rows(
            len(plan.step.packed.token_ids), self._dtype, self._store.device, q_THD, k_TGD, v_TGD
        )
        if scoring.bias_HL is not None:
            raise StepError(f"scores with a bias by distance need every row; take {self.policy.label} off this layer")
        reads = plan.reads
        assert reads is not None, "a dry run does not attend"
        kv = [k_TGD] if v_TGD is None else [k_TGD, v_TGD]
        rows_TRD = torch.cat([*kv, q_THD] if self.policy.needs_queries else kv, 1)
        self._access.write_rows(index, plan.writes, rows_TRD)
        if reads.tokens is None:
            out_THD = self._attend_in_place(reads, index, q_THD, scoring)
        else:
            out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
            if len(reads.in_place.kv_lengths):
                out_THD[reads.tokens] = self._attend_in_place(reads, index, q_THD[reads.tokens], scoring)
            for i, batch in reads.beside.items():
                own = slice(*plan.step.packed.cu_seqlens[i : i + 2].tolist())
                parts, tail_RXD, n = self._kept(plan, index, i)[0], self._tail(reads, index, i), k_TGD.shape[1]
                k_GRD, v_GRD = self._rows(parts)
                k_RGD = torch.cat([k_GRD.transpose(0, 1), tail_RXD[:, :n], k_TGD[own]])
                v_RGD = (
                    k_RGD if v_TGD is None else torch.cat([v_GRD.transpose(0, 1), tail_RXD[:, n : 2 * n], v_TGD[own]])
                )
                out_THD[own] = self._kernels.attend_rows(q_THD[own], k_RGD, v_RGD, scoring, batch)
        for i in reads.old_rows:
            own = slice(*plan.step.packed.cu_seqlens[i : i + 2].tolist())
            self._fold(plan, index, i, torch.cat([self._tail(reads, index, i), rows_TRD[own]]), scoring)
        return out_THD[..., : self._specs[index].value_dim]

    def commit(self, plan: EvictingPlan, kept: Int64s) -> None:
        self.table.commit(plan.step, kept)

    def why_not(self) -> str:
        return f"which rows attention with {self.policy.label} has kept depends on them"

    def live_rows(self, slot: int, length: int) -> LiveRows:
        """Mark the rows of a body that were kept; a body is as long as the policy's budget."""
        live = super().live_rows(slot, length)
        kept, name = np.arange(self.policy.budget_tokens) < self.table.slots.body_at[slot], self.table.states.name
        return live | {name: live[name] & kept}

    def kept_positions(self, slot: int, index: int) -> Tensor:
        """Return the positions of the rows that attention `index` has kept of a sequence, (R, G) int64, ascending.

        Positions of the tail are not among them.
        """
        slots = self.table.slots
        n_kept = min(int(slots.body_at[slot]), self.policy.budget_tokens)
        return self._body(index, int(slots.body[slot]))[_POSITIONS][:n_kept].long()

    def _attend_in_place(self, reads: Reads, index: int, q_THD: Tensor, scoring: Scoring) -> Tensor:
        spec, table, itemsize = self._specs[index], self.table, self._dtype.itemsize
        body = table.state_layout.fields[len(table.members[index].states) * index].offset_bytes // itemsize
        tail = table.tail_layout.fields[index].offset_bytes // itemsize
        rows = torch.add(reads.rows[self._sizes[index]], reads.is_tail, alpha=tail - body).add_(body)
        batch = reads.in_place.at(self._kernels.prepare(rows))
        keys, values = self._all[0], self._all[_values_at(spec)]
        return self._kernels.paged_attention(
            q_THD, keys, values, batch, spec.n_kv_heads, scoring, self._folded(reads, index)
        )

    def _folded(self, reads: Reads, index: int) -> FoldedRows | None:
        if self.storage is None or not len(reads.bodies):
            return None
        shapes = tuple(s.shape for s in self.table.members[index].states[:_POSITIONS])
        flats = tuple(self._access.states[index][:_POSITIONS])
        return FoldedRows(
            self.storage, shapes, flats, reads.bodies, reads.cu_bodies, reads.n_kept, self._specs[index].head_dim
        )

    # Bodies. Parts are rows (G, R, D) in stored form: keys and values, or what a storage encodes them as.

    def _body(self, index: int, block: int) -> list[Tensor]:
        """Return views of the state tensors of attention `index` in a block; without a block, zeros of their shapes."""
        states = self.table.members[index].states
        if block < 0:
            return [torch.zeros(s.shape, dtype=s.dtype or self._dtype, device=self._store.device) for s in states]
        views = []
        for flat, state in zip(map(torch.as_tensor, self._access.states[index]), states, strict=True):
            at = int(self.table.states.addresses[block]) // flat.element_size()
            views.append(flat[at : at + math.prod(state.shape)].view(state.shape))
        return views

    def _kept(self, plan: EvictingPlan, index: int, request: int) -> tuple[Parts, Tensor, Tensor]:
        """Return what a request's body held before the step: parts, positions (G, R) int64, and scores (G, R)."""
        n_kept = min(int(plan.step.before.body_at[request]), self.policy.budget_tokens)
        *parts, positions_RG, scores_RG = self._body(index, int(plan.step.before.body[request]))
        if self.storage is None:
            parts = list(parts[0][:n_kept].permute(1, 2, 0, 3))
        return tuple(part[:, :n_kept] for part in parts), positions_RG[:n_kept].T.long(), scores_RG[:n_kept].T

    def _parts(self, rows_GRD: list[Tensor]) -> Parts:
        if self.storage is None:
            return tuple(rows_GRD)
        return tuple(part for x_GRD in rows_GRD for part in self.storage.encode(x_GRD, by_channel=False))

    def _rows(self, parts: Parts) -> tuple[Tensor, Tensor]:
        """Return keys and values, (G, R, D) each; the same tensor where values are a part of the keys."""
        if self.storage is None:
            return parts[0], parts[-1]
        n = len(parts) // 2
        return self.storage.decode(parts[:n]).to(self._dtype), self.storage.decode(parts[n:]).to(self._dtype)

    def _tail(self, reads: Reads, index: int, request: int) -> Tensor:
        """Read the old rows of a request's tail, (R, *row_shape)."""
        return self._access.read_rows(index, reads.old_rows[request])

    def _fold(self, plan: EvictingPlan, index: int, request: int, rows_NXD: Tensor, scoring: Scoring) -> None:
        """Write a request's new body: the policy chooses from its old one and the folding rows, `every` at a time."""
        spec, every = self._specs[index], self.policy.every
        n_heads, n_parts = spec.n_kv_heads, spec.n_parts
        first, last = int(plan.step.before.body_at[request]), int(plan.step.after.body_at[request])
        parts, positions, scores = self._kept(plan, index, request)
        for begin in range(first, last, every):
            chunk_NXD = rows_NXD[begin - first : begin - first + every]
            sizes = [n_heads] * n_parts + [len(chunk_NXD[0]) - n_parts * n_heads]
            *kv_GND, q_HND = torch.split(chunk_NXD.transpose(0, 1), sizes)
            parts = tuple(torch.cat(pair, 1) for pair in zip(parts, self._parts(kv_GND), strict=True))
            positions = torch.cat(
                [positions, torch.arange(begin, begin + every, device=rows_NXD.device).expand(n_heads, -1)], 1
            )
            scores = F.pad(scores, (0, every))
            queries = q_HND.transpose(0, 1) if self.policy.needs_queries else None
            k_GRD, v_GRD = self._rows(parts)
            chosen_GB, scores = _kept_by(
                self.policy, Candidates(k_GRD, v_GRD[..., : spec.value_dim], positions, scores, queries, scoring)
            )
            parts = tuple(part.gather(1, chosen_GB[:, :, None].expand(-1, -1, part.shape[2])) for part in parts)
            positions, scores = positions.gather(1, chosen_GB), scores.gather(1, chosen_GB)
        n_kept = positions.shape[1]
        *targets, positions_RG, scores_RG = self._body(index, int(plan.step.after.body[request]))
        if self.storage is None:
            targets = list(targets[0].permute(1, 2, 0, 3))
        for target, part in zip(targets, parts, strict=True):
            target[:, :n_kept] = part
        positions_RG[:n_kept], scores_RG[:n_kept] = positions.T.float(), scores.T


_BESIDE = ("positions", "scores")
"""State tensors whose first axis is that of rows, with each storage."""

_POSITIONS = -2
"""Index of the positions among an attention's state tensors: scores are behind them, stored rows before them."""


def _kept_by(policy: EvictionPolicy, rows: Candidates) -> tuple[Tensor, Tensor]:
    """Call `EvictionPolicy.keep`, of any policy. Raises SpecError unless what it returns fits a body."""
    chosen_GB, scores_GR = policy.keep(rows)
    n_heads, n_rows = rows.positions.shape
    n_kept = min(n_rows, policy.budget_tokens)
    if chosen_GB.shape != (n_heads, n_kept) or chosen_GB.dtype != torch.int64 or scores_GR.shape != (n_heads, n_rows):
        raise SpecError(
            f"{type(policy).__name__}.keep must give int64 indices {(n_heads, n_kept)} and scores {(n_heads, n_rows)}, "
            f"and gave {tuple(chosen_GB.shape)} of {chosen_GB.dtype} and {tuple(scores_GR.shape)}"
        )
    is_own = type(policy).keep is not EvictionPolicy.keep and not is_apart(chosen_GB.device)
    if is_own and not ((chosen_GB >= 0) & (chosen_GB < n_rows)).all():
        raise SpecError(f"{type(policy).__name__}.keep gave indices of rows that are not there; give 0 to {n_rows - 1}")
    return chosen_GB, scores_GR


def _member(spec: AttentionSpec, policy: EvictionPolicy, storage: Storage | None) -> TailMember:
    """Return what the blocks hold for an attention.

    A row of a tail holds keys, values unless they are part of the keys, and, where the policy observes them, queries. A
    body holds kept rows, their positions and scores.
    """
    n_heads, budget = spec.n_kv_heads, policy.budget_tokens
    if storage is None:
        kept = [StateTensor("kept", (budget, spec.n_parts, n_heads, spec.head_dim), dtype=None)]
    else:  # single rows are evicted, so keys are grouped by row, as values are
        shapes = storage.shapes(n_heads, budget, spec.head_dim, by_channel=False)
        kept = [StateTensor(f"{name} {i}", *shape) for name in ("keys", "values") for i, shape in enumerate(shapes)]
    states = (
        *kept,
        StateTensor("positions", (budget, n_heads)),  # exact in float32 up to 16 million
        StateTensor("scores", (budget, n_heads)),
    )
    return TailMember(states, (spec.n_parts * n_heads + policy.needs_queries * spec.n_query_heads, spec.head_dim))


def _kept_elements(spec: AttentionSpec) -> int:
    """Return the number of elements of a row in a body."""
    return spec.n_parts * spec.n_kv_heads * spec.head_dim


def _values_at(spec: AttentionSpec) -> int:
    """Return the number of elements from a row's keys to its values."""
    return (spec.n_parts - 1) * spec.n_kv_heads * spec.head_dim
