"""Attention that keeps every row and reads some pages: those that may hold what a query looks for (Tang et al. 2024, "Quest").

A page holds, beside keys and values, the least and the greatest of its keys, element by element. They are written when the page's last
row is, and looked at only while the page is full: what they say follows from the rows of the page and from nothing else. So a rollback
has nothing to undo (a page that is cut is read whole until it is full again, and bounded anew), reaches every position as in dense
attention, and a fork shares bounds as it shares rows.

Which pages a query reads depends on its position and on the rows up to it:

    position 0 ......................................................... query
     pages of sinks | old pages, the best for each head of keys | pages of recent rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from memory.attention_cache import AttentionCache, AttentionPlan, Read
from memory.blocks.arrays import Int64s, ceil_div, ranges, starts_of
from memory.blocks.store import Store
from memory.errors import StepError
from memory.eviction import Quest
from memory.interface import Dropped
from memory.kernels import FoldedRows, PageChoice, PagedBatch, Prepared, Scoring
from memory.sequences.paging import DropPlan, PageGrid
from memory.specs import AttentionSpec


@dataclass(frozen=True)
class SelectionPlan(AttentionPlan):
    """As dense attention's, and who reads what.

    Attributes:
        full: pages that the step fills, element offsets (F,).
        choice: what the queries that choose pages choose from, None if there are none; tokens: packed index of them (Q,).
        chosen: what they read, each a request of its own, but for the pages.
        rest: the requests that read everything, None if there are none; rest_tokens: packed index of their tokens.
    """

    full: Prepared
    choice: PageChoice | None
    tokens: Tensor
    chosen: PagedBatch
    rest: PagedBatch | None
    rest_tokens: Tensor


def part_of(plan: AttentionPlan, requests: Int64s, place: Callable[[Int64s], Prepared]) -> PagedBatch:
    """The part of a step's batch that these requests are."""
    batch = plan.batch
    pages = place(plan.pages[ranges(batch.cu_pages[:-1][requests], batch.cu_pages[1:][requests])])
    cu_seqlens, cu_pages = (starts_of(np.diff(x)[requests]) for x in (batch.cu_seqlens, batch.cu_pages))
    return PagedBatch(cu_seqlens, batch.kv_lengths[requests], pages, cu_pages, batch.page_tokens)


class PageSelection(AttentionCache):
    """Paged K/V of all attention layers of one `Quest`: `memory.interface.LayerMemory`.

    Args:
        specs: the attention specs, in the order that `attend` numbers them; `policy` is that of all of them.
    """

    def __init__(self, specs: list[AttentionSpec], policy: Quest, dtype: torch.dtype, grid: PageGrid, store: Store, name: str) -> None:
        self.policy = policy
        self._n_read = policy.budget_pages(grid.page_tokens)
        super().__init__(specs, dtype, grid, store, name=f"pages of {name}")

    def _page_fields(self, spec: AttentionSpec) -> list[tuple[int, ...]]:
        return [*super()._page_fields(spec), *[(spec.n_kv_heads, spec.head_dim)] * 2]

    def _plan_reads(self, plan: AttentionPlan) -> SelectionPlan:
        packed, batch = plan.packed, plan.batch
        selects = (packed.counts <= self.policy.select_up_to) & (self.grid.pages(packed.ends) > self._n_read)
        chosen, others = selects.nonzero()[0], (~selects).nonzero()[0]
        tokens, rest_tokens = (ranges(packed.cu_seqlens[:-1][x], packed.cu_seqlens[1:][x]) for x in (chosen, others))
        choice, reads = self._choice(plan, packed.positions[tokens] + 1, np.repeat(batch.cu_pages[:-1][chosen], packed.counts[chosen]))
        full = ranges(batch.cu_pages[:-1] + packed.starts // self.page_tokens, batch.cu_pages[:-1] + packed.ends // self.page_tokens)
        return SelectionPlan(
            **{f.name: getattr(plan, f.name) for f in fields(plan)}, full=self.place(plan.pages[full]),
            choice=choice if len(tokens) else None, tokens=self._store.upload(tokens), chosen=reads,
            rest=part_of(plan, others, self.place) if len(others) else None, rest_tokens=self._store.upload(rest_tokens),
        )  # fmt: skip

    def _choice(self, plan: AttentionPlan, n_rows: Int64s, begins: Int64s) -> tuple[PageChoice, PagedBatch]:
        """For queries that see `n_rows`, in pages of the step from `begins` on: what they choose from, and how much they read."""
        n_pages = self.grid.pages(n_rows)
        n_last = n_pages - np.maximum(0, n_rows - self.policy.recent) // self.page_tokens
        n_chosen = np.minimum(n_pages, self._n_read)
        cu_pages, cu_chosen = (starts_of(n) for n in (n_pages, n_chosen))
        pages = self.place(plan.pages[ranges(begins, begins + n_pages)])
        choice = PageChoice(pages, cu_pages, ceil_div(self.policy.sinks, self.page_tokens), n_last, cu_chosen)
        lengths = n_rows - (n_pages - n_chosen) * self.page_tokens
        return choice, PagedBatch(np.arange(len(n_rows) + 1), lengths, choice.pages, cu_chosen, self.page_tokens)

    def read(self, plan: AttentionPlan, index: int, q_THD: Tensor, scoring: Scoring, folded: FoldedRows | None = None) -> Tensor:
        assert isinstance(plan, SelectionPlan) and folded is None
        if scoring.bias_HL is not None:
            raise StepError(f"scores with a bias by distance need every row; take {self.policy.label} off this layer")
        self._bound(index, plan.full)
        if plan.choice is None:
            return super().read(plan, index, q_THD, scoring)
        spec, (keys, values), (least, greatest) = self._specs[index], self._keys_values[index], self._flats[index][-2:]
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        if plan.rest is not None:
            tokens = plan.rest_tokens
            out_THD[tokens] = self.kernels.paged_attention(q_THD[tokens], keys, values, plan.rest, spec.n_kv_heads, scoring)
        q_QHD = q_THD[plan.tokens]
        pages_GC = self.kernels.choose_pages(q_QHD, least, greatest, plan.choice, spec.n_kv_heads)
        chosen = replace(plan.chosen, pages=self.kernels.prepare(pages_GC))
        out_THD[plan.tokens] = self.kernels.paged_attention(q_QHD, keys, values, chosen, spec.n_kv_heads, scoring)
        return out_THD[..., : spec.value_dim]

    def begin(self, plan: AttentionPlan, reads: list[Read] | None = None) -> None:
        assert isinstance(plan, SelectionPlan)
        super().begin(plan, reads)
        if plan.choice is not None:
            self.kernels.plan_choice(plan.choice, self._store.device)

    def _reads(self, plan: AttentionPlan) -> list[Read]:
        assert isinstance(plan, SelectionPlan)
        batches = [plan.batch] if plan.choice is None else [plan.chosen, *([] if plan.rest is None else [plan.rest])]
        return [(batch, None) for batch in batches]

    def can_record(self, plan: AttentionPlan) -> bool:
        return False  # how many pages are chosen, and from how many, is counted on the host

    def plan_drop(self, dropped: Dropped) -> DropPlan:
        plan = super().plan_drop(dropped)
        n_full = (dropped.length - dropped.n_tokens) // self.page_tokens - plan.first_page - plan.n_kept
        if n_full > 0 and not self._store.is_dry:
            full = self.place(self.pool.addresses[plan.fresh[:n_full]] // self._dtype.itemsize)
            for index in range(len(self._specs)):
                self._bound(index, full)
        return plan

    def _bound(self, index: int, full: Prepared) -> None:
        """Write the bounds of pages that are full, element offsets (F,)."""
        if not len(full):
            return
        spec, (keys, *_, least, greatest) = self._specs[index], self._flats[index]
        k_NGPD = self.kernels.read_rows(keys, full, (spec.n_kv_heads, self.page_tokens, spec.head_dim), 0.0)
        self.kernels.write_rows_(least, full, k_NGPD.amin(2).flatten(1))
        self.kernels.write_rows_(greatest, full, k_NGPD.amax(2).flatten(1))
