"""Attention that keeps a budget of old rows: the body holds what a policy has kept, the tail the newest rows verbatim.

Body and tail are a recurrent layer's: blocks, folding, forks and rollback are `RecurrentState`'s. There is no head, for attention
reads body and tail as they are. A step sees the body as it was before the step, the rows of the tail, and its own; then those that
have become older than the rollback window fold into a new body.

    position 0 .......................... body_at ............... start ......... end
             kept rows, at most the budget |  tail rows, verbatim  |  rows of the step
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memory.arena import Field, Store
from memory.attention_cache import check_attention
from memory.batch import ranges
from memory.errors import DropError, StepError
from memory.eviction import Candidates, EvictionPolicy
from memory.folding import Columns, TailGrid
from memory.interface import AttentionSpec, Int64s, Packed, RecurrentSpec, StateTensor
from memory.kernels import PagedBatch, Prepared, Scoring
from memory.recurrent_state import RecurrentPlan, RecurrentState
from memory.shift import Dropped


@dataclass(frozen=True)
class SparsePlan(RecurrentPlan):
    """As a recurrence's, without runs.

    Attributes:
        in_place: requests all of whose rows are in the arena while the step runs: its new ones fit into the tail.
        tokens: (t,) packed index of their tokens; None if they are all.
        cu_seqlens, lengths, cu_rows: as `PagedBatch` has them, of the requests in place; a page is a row.
        blocks, rows, is_tail: of each row that they see: the block's address in elements, the row in it, and which kind of block it is.
    """

    in_place: Int64s
    tokens: Tensor | None
    cu_seqlens: Int64s
    lengths: Int64s
    cu_rows: Int64s
    blocks: Int64s
    rows: Int64s
    is_tail: NDArray[np.bool_]


class SparseAttention(RecurrentState):
    """Kept rows and tails of all attention layers of one policy: `memory.interface.LayerMemory`.

    Args:
        specs: the attention specs, in the order that `attend` numbers them; `policy` is that of all of them.
    """

    def __init__(
        self, specs: list[AttentionSpec], policy: EvictionPolicy, dtype: torch.dtype, rollback_window: int, store: Store, name: str
    ) -> None:
        grid = TailGrid.headless(rollback_window, policy.every)
        super().__init__([_rows_of(s, policy) for s in specs], dtype, grid, store, label=f" of {name}")
        self.policy = policy
        self._attention = specs
        # Each row holds its keys and then its values: found from one offset, in a flat of the whole arena and in one that starts later.
        self._all: dict[int, tuple[Prepared, Prepared]] = {}
        if not store.is_dry:
            for n_elements in {s.n_kv_heads * s.head_dim for s in specs}:
                flats = (store.flat(Field(first * dtype.itemsize, (), dtype)) for first in (0, n_elements))
                self._all[n_elements] = tuple(map(self._kernels.prepare, flats))

    def _plan_runs(self, packed: Packed, before: Columns, after: Columns, fresh: Int64s) -> SparsePlan:
        in_place = (packed.starts >= after.body_at).nonzero()[0]
        chosen = before.take(in_place)
        starts, ends, counts = packed.starts[in_place], packed.ends[in_place], packed.counts[in_place]
        # For each request three stretches of rows: what was kept, the old rows of the tail, the new ones.
        n_kept = np.minimum(chosen.body_at, self.policy.budget_tokens)
        ids = np.stack([chosen.body, chosen.tail, after.tail[in_place]], 1)
        begins = np.stack([np.zeros_like(starts), chosen.body_at, starts], 1)
        lengths = np.stack([n_kept, starts - chosen.body_at, counts], 1)
        addresses = np.stack([self.states.addresses[ids[:, 0]], *(self.tails.addresses[ids[:, i]] for i in (1, 2))], 1)
        is_tail = np.repeat(np.tile([False, True, True], len(in_place)), lengths.ravel())
        rows = ranges(begins.ravel(), (begins + lengths).ravel())
        rows[is_tail] %= self.grid.tail_rows
        tokens = None
        if len(in_place) < len(packed.starts):
            first = packed.cu_seqlens[:-1][in_place]
            tokens = self._store.upload(ranges(first, first + ends - starts))
        return SparsePlan(
            packed, before, after, fresh, [], self._writes(packed, after), in_place, tokens, _cumulated(counts), lengths.sum(1),
            _cumulated(lengths.sum(1)), np.repeat(addresses.ravel() // self._dtype.itemsize, lengths.ravel()), rows, is_tail,
        )  # fmt: skip

    def attend(self, plan: SparsePlan, index: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scoring: Scoring) -> Tensor:
        """Attend to what each sequence has kept, its tail and the step's rows up to each token: (T, H, D). Then fold."""
        check_attention(self._attention[index], len(plan.packed.token_ids), self._dtype, self._store.device, q_THD, k_TGD, v_TGD)
        if scoring.bias_HL is not None:
            raise StepError(f"scores with a bias by distance need every row; take {self.policy.label} off this layer")
        rows_TRD = torch.cat([k_TGD, v_TGD, q_THD] if self.policy.needs_queries else [k_TGD, v_TGD], 1)
        self._write_tail(plan, index, rows_TRD)
        if plan.tokens is None:
            out_THD = self._attend_in_place(plan, index, q_THD, scoring)
        else:
            out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
            if len(plan.in_place):
                out_THD[plan.tokens] = self._attend_in_place(plan, index, q_THD[plan.tokens], scoring)
            for i in np.setdiff1d(np.arange(len(plan.packed.starts)), plan.in_place).tolist():
                own = slice(*plan.packed.cu_seqlens[i : i + 2].tolist())
                kept, tail_RXD = self._kept(plan, index, i), self._tail(plan, index, i)
                n = k_TGD.shape[1]
                k_RGD = torch.cat([kept[0][:, 0], tail_RXD[:, :n], k_TGD[own]])
                v_RGD = torch.cat([kept[0][:, 1], tail_RXD[:, n : 2 * n], v_TGD[own]])
                out_THD[own] = self._kernels.attend_rows(q_THD[own], k_RGD, v_RGD, scoring)
        for i in (plan.after.body_at > plan.before.body_at).nonzero()[0].tolist():
            self._fold(plan, index, i, rows_TRD, scoring)
        return out_THD

    def plan_drop(self, dropped: Dropped) -> NoReturn:
        raise DropError(
            f"attention with {self.policy.label} cannot drop tokens [{dropped.start}, {dropped.end}): which rows it kept depends on them; "
            f"roll back to {dropped.start} and feed the rest again",
            start=dropped.start, end=dropped.end,
        )  # fmt: skip

    def drop(self, plan: NoReturn) -> None:
        """`plan_drop` never makes a plan."""

    def abandon_drop(self, plan: NoReturn) -> None:
        """As `drop`."""

    def kept_positions(self, slot: int, index: int) -> Tensor:
        """Positions of the rows that attention `index` has kept of a sequence, (R, G) int64, ascending; the tail's come on top."""
        body_at, body = int(self._slots.body_at[slot]), self._slots.body[slot : slot + 1]
        shape = (min(body_at, self.policy.budget_tokens), self._attention[index].n_kv_heads)
        if not body_at:
            return torch.zeros(shape, dtype=torch.int64)
        flat = self._state_flats[index][_POSITIONS]
        offset = self._place(self.states.addresses[body] // flat.itemsize)
        return self._kernels.read_rows(flat, offset, shape, 0.0)[0].long()

    def _attend_in_place(self, plan: SparsePlan, index: int, q_THD: Tensor, scoring: Scoring) -> Tensor:
        spec, itemsize = self._attention[index], self._dtype.itemsize
        n_elements = spec.n_kv_heads * spec.head_dim
        body = self.state_layout.fields[_N_STATES * index].offset_bytes // itemsize
        tail = self.tail_layout.fields[index].offset_bytes // itemsize
        offsets = plan.blocks + np.where(plan.is_tail, tail + plan.rows * self._row_elements[index], body + plan.rows * (2 * n_elements))
        batch = PagedBatch(plan.cu_seqlens, plan.lengths, self._place(offsets), plan.cu_rows, page_tokens=1)
        return self._kernels.paged_attention(q_THD, *self._all[n_elements], batch, spec.n_kv_heads, scoring)

    def _kept(self, plan: SparsePlan, index: int, request: int) -> tuple[Tensor, Tensor, Tensor]:
        """What was kept of a request before the step: rows (R, 2, G, D), positions (R, G) as float32, scores (R, G)."""
        n_kept = min(int(plan.before.body_at[request]), self.policy.budget_tokens)
        block = self.states.addresses[plan.before.body[request : request + 1]] if n_kept else np.zeros(1, np.int64)
        parts = []
        for state, flat in zip(self._specs[index].states, self._state_flats[index], strict=True):
            shape = (n_kept, *state.shape[1:])
            if n_kept:
                parts.append(self._kernels.read_rows(flat, self._place(block // flat.itemsize), shape, 0.0)[0])
            else:
                parts.append(torch.zeros(shape, dtype=state.dtype or self._dtype, device=self._store.device))
        return parts[0], parts[1], parts[2]

    def _tail(self, plan: SparsePlan, index: int, request: int) -> Tensor:
        """The old rows of a request's tail, (R, *row_shape)."""
        old = np.arange(plan.before.body_at[request], plan.packed.starts[request])
        offsets = self._ring(np.full(len(old), plan.before.tail[request]), old)[self._row_elements[index]]
        return self._kernels.read_rows(self._tail_flats[index], offsets, self._specs[index].row_shape, 0.0)

    def _fold(self, plan: SparsePlan, index: int, request: int, rows_TRD: Tensor, scoring: Scoring) -> None:
        """A new body for a request: its old one, and the rows up to the new one's position, `every` at a time."""
        n_heads, every = self._attention[index].n_kv_heads, self.policy.every
        first, last = int(plan.before.body_at[request]), int(plan.after.body_at[request])
        own = slice(*plan.packed.cu_seqlens[request : request + 2].tolist())
        rows_NXD = torch.cat([self._tail(plan, index, request), rows_TRD[own]])[: last - first]
        kv_R2GD, positions_RG, scores_RG = self._kept(plan, index, request)
        kept = (kv_R2GD[:, 0].transpose(0, 1), kv_R2GD[:, 1].transpose(0, 1), positions_RG.T.long(), scores_RG.T)
        for begin in range(first, last, every):
            chunk_NXD = rows_NXD[begin - first : begin - first + every]
            k_GND, v_GND, q_HND = torch.split(chunk_NXD.transpose(0, 1), [n_heads, n_heads, len(chunk_NXD[0]) - 2 * n_heads])
            positions_GN = torch.arange(begin, begin + every, device=k_GND.device).expand(n_heads, -1)
            new = (k_GND, v_GND, positions_GN, torch.zeros(n_heads, every, device=k_GND.device))
            k, v, positions, scores = (torch.cat(pair, 1) for pair in zip(kept, new, strict=True))
            queries = q_HND.transpose(0, 1) if self.policy.needs_queries else None
            chosen_GB, scores = self.policy.keep(Candidates(k, v, positions, scores, queries, scoring))
            k, v = (x.gather(1, chosen_GB[:, :, None].expand(-1, -1, x.shape[2])) for x in (k, v))
            kept = (k, v, positions.gather(1, chosen_GB), scores.gather(1, chosen_GB))
        k, v, positions, scores = kept
        block = self.states.addresses[plan.after.body[request : request + 1]]
        ended = (torch.stack([k, v]).permute(2, 0, 1, 3), positions.T.float(), scores.T)
        for flat, tensor in zip(self._state_flats[index], ended, strict=True):
            self._kernels.write_rows_(flat, self._place(block // flat.itemsize), tensor.reshape(1, -1))


_N_STATES, _POSITIONS = 3, 1
"""State tensors of an attention, and which of them holds positions."""


def _rows_of(spec: AttentionSpec, policy: EvictionPolicy) -> RecurrentSpec:
    """A row: keys, values and, where the policy observes them, queries. The body: kept rows, their positions and their scores."""
    n_heads, budget = spec.n_kv_heads, policy.budget_tokens
    states = (
        StateTensor("kept", (budget, 2, n_heads, spec.head_dim), dtype=None),
        StateTensor("positions", (budget, n_heads)),  # exact in float32 up to 16 million
        StateTensor("scores", (budget, n_heads)),
    )
    return RecurrentSpec(policy.label, (2 * n_heads + policy.needs_queries * spec.n_query_heads, spec.head_dim), states)


def _cumulated(counts: Int64s) -> Int64s:
    ends = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=ends[1:])
    return ends
