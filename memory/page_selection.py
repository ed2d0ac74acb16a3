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

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from memory.arena import Store
from memory.attention_cache import AttentionCache, AttentionPlan, DropPlan
from memory.batch import ranges
from memory.errors import StepError
from memory.eviction import Quest
from memory.interface import Int64s
from memory.kernels import FoldedRows, PagedBatch, Prepared, Scoring
from memory.page_grid import PageGrid
from memory.shift import Dropped
from memory.specs import AttentionSpec


@dataclass(frozen=True)
class Query:
    """One token that selects what it reads.

    Attributes:
        token: its place in the step.
        n_rows: rows up to it, itself included.
        begin, end: its request has the pages [begin, end) of those of the step.
    """

    token: int
    n_rows: int
    begin: int
    end: int


@dataclass(frozen=True)
class SelectionPlan(AttentionPlan):
    """As dense attention's, and who reads what.

    Attributes:
        full: pages that the step fills, element offsets (F,).
        queries: those that select pages.
        rest: the requests that read everything, None if there are none; rest_tokens: packed index of their tokens.
    """

    full: Prepared
    queries: list[Query]
    rest: PagedBatch | None
    rest_tokens: Tensor


def page_scores(q_HD: Tensor, least_NGD: Tensor, greatest_NGD: Tensor) -> Tensor:
    """(G, N) float32: the most that any query head of a group could score a key within a page's bounds, before scaling.

    sum_d max(q_d least_d, q_d greatest_d): elements above zero meet the greatest key, those below the least.
    """
    q_GSD = q_HD.float().view(least_NGD.shape[1], -1, q_HD.shape[1])
    least_GDN, greatest_GDN = (x.float().permute(1, 2, 0) for x in (least_NGD, greatest_NGD))
    scores_GSN = q_GSD.clamp(min=0) @ greatest_GDN + q_GSD.clamp(max=0) @ least_GDN
    return scores_GSN.amax(1)


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
        queries = []
        for i in selects.nonzero()[0].tolist():
            begin, end = batch.cu_pages[i : i + 2].tolist()
            first, start = int(packed.cu_seqlens[i]), int(packed.starts[i])
            queries += [Query(first + n, start + n + 1, begin, end) for n in range(int(packed.counts[i]))]
        reads_all = (~selects).nonzero()[0]
        tokens = ranges(packed.cu_seqlens[:-1][reads_all], packed.cu_seqlens[1:][reads_all])
        full = ranges(batch.cu_pages[:-1] + packed.starts // self.page_tokens, batch.cu_pages[:-1] + packed.ends // self.page_tokens)
        return SelectionPlan(
            **{f.name: getattr(plan, f.name) for f in fields(plan)}, full=self._pages_at(batch, full), queries=queries,
            rest=self._batch_of(batch, reads_all) if len(reads_all) else None, rest_tokens=self._store.upload(tokens),
        )  # fmt: skip

    def _pages_at(self, batch: PagedBatch, places: Int64s) -> Prepared:
        return self._kernels.prepare(torch.as_tensor(batch.pages)[self._store.upload(places)])

    def _batch_of(self, batch: PagedBatch, requests: Int64s) -> PagedBatch:
        """The part of a batch that these requests are."""
        pages = self._pages_at(batch, ranges(batch.cu_pages[:-1][requests], batch.cu_pages[1:][requests]))
        cu_seqlens, cu_pages = (np.concatenate([[0], np.diff(x)[requests].cumsum()]) for x in (batch.cu_seqlens, batch.cu_pages))
        return PagedBatch(cu_seqlens, batch.kv_lengths[requests], pages, cu_pages, batch.page_tokens)

    def read(self, plan: AttentionPlan, index: int, q_THD: Tensor, scoring: Scoring, folded: FoldedRows | None = None) -> Tensor:
        assert isinstance(plan, SelectionPlan) and folded is None
        if scoring.bias_HL is not None:
            raise StepError(f"scores with a bias by distance need every row; take {self.policy.label} off this layer")
        self._bound(index, plan.full)
        if not plan.queries:
            return super().read(plan, index, q_THD, scoring)
        spec, (keys, values) = self._specs[index], self._keys_values[index]
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        if plan.rest is not None:
            tokens = plan.rest_tokens
            out_THD[tokens] = self._kernels.paged_attention(q_THD[tokens], keys, values, plan.rest, spec.n_kv_heads, scoring)
        # Each head reads rows of its own: to the kernel a query is a request, and a page a row of one head.
        rows = [self._rows(plan, index, query, q_THD[query.token]) for query in plan.queries]
        lengths = np.array([x.shape[1] for x in rows])
        cu_rows, cu_seqlens = np.concatenate([[0], lengths.cumsum()]), np.arange(len(rows) + 1)
        rows_GR, tokens = torch.cat(rows, 1), torch.tensor([query.token for query in plan.queries], device=q_THD.device)
        n_shared = spec.n_query_heads // spec.n_kv_heads
        for g, rows_R in enumerate(rows_GR):
            heads = slice(g * n_shared, (g + 1) * n_shared)
            own = scoring._replace(sinks_H=None if scoring.sinks_H is None else scoring.sinks_H[heads])
            batch = PagedBatch(cu_seqlens, lengths, self._kernels.prepare(rows_R.contiguous()), cu_rows, page_tokens=1)
            out_THD[tokens, heads] = self._kernels.paged_attention(q_THD[tokens, heads], keys, values, batch, 1, own)
        return out_THD[..., : spec.value_dim]

    def plan_drop(self, dropped: Dropped) -> DropPlan:
        plan = super().plan_drop(dropped)
        n_full = (dropped.length - dropped.n_tokens) // self.page_tokens - plan.first_page - plan.n_kept
        if n_full > 0 and not self._store.is_dry:
            full = self._place(self.pool.addresses[plan.fresh[:n_full]] // self._dtype.itemsize)
            for index in range(len(self._specs)):
                self._bound(index, full)
        return plan

    def _bound(self, index: int, full: Prepared) -> None:
        """Write the bounds of pages that are full, element offsets (F,)."""
        if not len(full):
            return
        spec, (keys, *_, least, greatest) = self._specs[index], self._flats[index]
        k_NPGD = self._kernels.read_rows(keys, full, (self.page_tokens, spec.n_kv_heads, spec.head_dim), 0.0)
        self._kernels.write_rows_(least, full, k_NPGD.amin(1).flatten(1))
        self._kernels.write_rows_(greatest, full, k_NPGD.amax(1).flatten(1))

    def _rows(self, plan: SelectionPlan, index: int, query: Query, q_HD: Tensor) -> Tensor:
        """Element offsets of the rows that a query reads, (G, R), ascending in position."""
        policy, size, spec = self.policy, self.page_tokens, self._specs[index]
        pages = torch.as_tensor(plan.batch.pages)[query.begin : query.end]
        n_old, n_pages = max(0, query.n_rows - policy.recent) // size, -(-query.n_rows // size)
        recent_N = torch.arange(n_old, n_pages, device=pages.device).expand(spec.n_kv_heads, -1)
        chosen_GN = torch.cat([self._select(pages[:n_old], index, q_HD, self._n_read - (n_pages - n_old)), recent_N], 1)
        row_elements = spec.n_kv_heads * spec.head_dim
        slots_P = torch.arange(size, device=pages.device) * row_elements
        heads_G1 = torch.arange(spec.n_kv_heads, device=pages.device)[:, None] * spec.head_dim
        rows_GR = (pages[chosen_GN][:, :, None] + slots_P).flatten(1) + heads_G1
        return rows_GR[:, : rows_GR.shape[1] - (n_pages * size - query.n_rows)]

    def _select(self, pages: Tensor, index: int, q_HD: Tensor, n_read: int) -> Tensor:
        """Which of these full pages a query reads, (G, at most n_read), ascending."""
        spec = self._specs[index]
        if len(pages) <= n_read:
            return torch.arange(len(pages), device=pages.device).expand(spec.n_kv_heads, -1)
        bounds, shape, places = self._flats[index][spec.n_parts :], (spec.n_kv_heads, spec.head_dim), self._kernels.prepare(pages)
        least, greatest = (self._kernels.read_rows(flat, places, shape, 0.0) for flat in bounds)
        scores_GN = page_scores(q_HD, least, greatest)
        scores_GN[:, : -(-self.policy.sinks // self.page_tokens)] = torch.inf
        best_first = scores_GN.sort(dim=-1, descending=True, stable=True).indices
        return best_first[:, :n_read].sort(dim=-1).values
