"""Keys and values of attention, in pages shared by all attention layers that see as far as each other.

A page holds K and V of `page_tokens` consecutive tokens for each of these layers, so one table per sequence serves them
all. A row is written in place: until the sequence's length moves past it, nobody reads it. A page that several sequences
refer to is never written: the one that wants to append to it takes a copy.

Layers with a window need the last `window` rows from wherever a rollback may lead: pages leave when every row of theirs is older.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from memory.arena import BlockLayout, BlockPool, Store
from memory.errors import IntegrityError, StepError
from memory.interface import AttentionSpec, Int64s, Packed
from memory.kernels import Kernels, PagedBatch, Prepared, Scoring, select_kernels

NO_PAGES: Int64s = np.zeros(0, np.int64)


@dataclass(frozen=True)
class AttentionPlan:
    """Pages set aside for a step, and where its rows are read and written.

    Attributes:
        tables: request -> what its table of pages will be if all tokens are kept, where it changes.
        copies: (request, old page, new page) of last pages that are shared and will be appended to.
        fresh: pages this plan allocated, copies included.
        batch: what the attention kernels need to know.
        rows: (T,) element offset of each new token's row.
    """

    packed: Packed
    tables: dict[int, Int64s]
    copies: list[tuple[int, int, int]]
    fresh: Int64s
    batch: PagedBatch
    rows: tuple[Prepared, ...]


@dataclass(frozen=True)
class PageGrid:
    """How rows are cut into pages, and which pages a sequence keeps.

    Attributes:
        page_tokens: rows a page.
        window: rows that a token sees, itself included; None for all.
        rollback_window: tokens that can always be taken back, counted from the furthest position reached.
    """

    page_tokens: int
    window: int | None
    rollback_window: int

    def pages(self, positions: Int64s) -> Int64s:
        """Pages that rows [0, position) take."""
        return -(-positions // self.page_tokens)

    def first_page(self, peaks: Int64s) -> Int64s:
        """The oldest page that a sequence keeps that has reached `peaks`. It depends on nothing else, as a body's position does."""
        if self.window is None:
            return np.zeros_like(peaks)
        return np.maximum(0, peaks - self.rollback_window - self.window + 1) // self.page_tokens

    def horizon(self, first_page: Int64s) -> Int64s:
        """The earliest position whose window lies in pages [first_page, ...)."""
        return np.where(first_page > 0, first_page * self.page_tokens + (self.window or 0) - 1, 0)


def check_attention(
    spec: AttentionSpec, n_tokens: int, dtype: torch.dtype, device: torch.device, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor
) -> None:
    """Raise StepError unless a layer's queries, keys and values are what its spec and its memory expect."""
    for name, tensor, heads in (("q", q_THD, spec.n_query_heads), ("k", k_TGD, spec.n_kv_heads), ("v", v_TGD, spec.n_kv_heads)):
        if tensor.shape != (n_tokens, heads, spec.head_dim):
            raise StepError(f"{name} has shape {tuple(tensor.shape)}; this attention expects {(n_tokens, heads, spec.head_dim)}")
        if tensor.dtype != dtype or tensor.device.type != device.type:
            raise StepError(f"{name} is {tensor.dtype} on {tensor.device}; this memory holds {dtype} on {device}")


class AttentionCache:
    """Paged K/V of all attention layers of one window: `memory.interface.LayerMemory`.

    Args:
        specs: the attention specs, in the order that `attend` numbers them.
        label: what the name of its pool ends with.
    """

    def __init__(self, specs: list[AttentionSpec], dtype: torch.dtype, grid: PageGrid, store: Store, *, label: str = "") -> None:
        self.grid, self.page_tokens = grid, grid.page_tokens
        fields = [self._page_fields(s) for s in specs]
        self.layout = BlockLayout.of([(shape, dtype) for own in fields for shape in own])
        name = ("pages" if grid.window is None else f"pages over {grid.window}") + label
        self.pool = store.make_pool(name, self.layout.block_bytes, from_top=False)
        self._specs = specs
        self._row_elements = [s.n_kv_heads * s.head_dim for s in specs]
        self._store = store
        self._dtype = dtype
        self._kernels: Kernels = select_kernels(store.device, dtype)
        flats = [] if store.is_dry else [self._kernels.prepare(store.flat(field)) for field in self.layout.fields]
        self._flats = [flats[i :: len(fields[0])] for i in range(len(fields[0]))]
        self._keys, self._values = self._flats[:2]
        self._pages: dict[int, Int64s] = {}
        self._first_page: dict[int, int] = {}  # of those slots that have given up any
        self._open_plans: dict[int, AttentionPlan] = {}

    def _page_fields(self, spec: AttentionSpec) -> list[tuple[int, ...]]:
        """What a page holds of one attention: keys and values first."""
        return [(self.page_tokens, spec.n_kv_heads, spec.head_dim)] * 2

    @property
    def sized_pools(self) -> list[tuple[BlockPool, int]]:
        return [(self.pool, self.layout.padding_bytes)]

    @property
    def least_bytes(self) -> int:
        return self.pool.block_bytes

    # Steps

    def plan(self, packed: Packed) -> AttentionPlan:
        slots = packed.slots.tolist()
        tables = [self._pages.get(slot, NO_PAGES) for slot in slots]
        held, wanted, lengths, positions = self.grid.pages(packed.starts), self.grid.pages(packed.ends), packed.ends, packed.positions
        n_new = wanted - held
        if self._first_page:  # from here on, everything counts from the first page that is held
            first = np.array([self._first_page.get(slot, 0) for slot in slots], np.int64)
            held, wanted, lengths = held - first, wanted - first, lengths - first * self.page_tokens
            positions = positions - np.repeat(first * self.page_tokens, packed.counts)
        if self.pool.counts.max() > 1:
            inside_page = (packed.starts % self.page_tokens).nonzero()[0]
            last_pages = np.array([tables[i][-1] for i in inside_page.tolist()], np.int64)
            is_shared = self.pool.counts[last_pages] > 1
            shared, last_pages = inside_page[is_shared], last_pages[is_shared]
        else:
            shared = last_pages = NO_PAGES
        n_copies = len(shared)
        fresh = self.pool.allocate(n_copies + int(n_new.sum()))
        copies = list(zip(shared.tolist(), last_pages.tolist(), fresh[:n_copies].tolist(), strict=True))
        changed: dict[int, Int64s] = {}
        taken = n_copies
        for i in n_new.nonzero()[0].tolist():
            n = int(n_new[i])
            changed[i] = tables[i] = np.concatenate([tables[i], fresh[taken : taken + n]])
            taken += n
        for i, _, new in copies:
            changed[i] = tables[i] = tables[i].copy()
            tables[i][held[i] - 1] = new
        try:
            batch, rows = self._addresses(packed, tables, wanted, lengths, positions)
            plan = self._plan_reads(AttentionPlan(packed, changed, copies, fresh, batch, rows))
        except BaseException:
            self.pool.release(fresh)
            raise
        self._open_plans[id(plan)] = plan
        return plan

    def _plan_reads(self, plan: AttentionPlan) -> AttentionPlan:
        """For kinds that do not read every page: the plan, and what they read."""
        return plan

    def _addresses(
        self, packed: Packed, tables: list[Int64s], n_pages: Int64s, lengths: Int64s, positions: Int64s
    ) -> tuple[PagedBatch, tuple[Prepared, ...]]:
        """Element offsets of all pages and of every new token's row, per attention (T,).

        Lengths and positions count from the first page that a table holds.
        """
        cu_pages = np.zeros(len(tables) + 1, np.int64)
        n_pages.cumsum(out=cu_pages[1:])
        pages = self.pool.addresses[np.concatenate(tables)] // self._dtype.itemsize
        page_T, slot_T = np.divmod(positions, self.page_tokens)
        page_T += cu_pages[:-1] if packed.is_decode else np.repeat(cu_pages[:-1], packed.counts)
        page_T = pages[page_T]
        rows = {size: self._place(page_T + slot_T * size) for size in set(self._row_elements)}
        batch = PagedBatch(packed.cu_seqlens, lengths, pages=self._place(pages), cu_pages=cu_pages, page_tokens=self.page_tokens)
        return batch, tuple(rows[size] for size in self._row_elements)

    def _place(self, array: Int64s) -> Prepared:
        return self._kernels.prepare(self._store.upload(array))

    def begin(self, plan: AttentionPlan) -> None:
        for _, old, new in plan.copies:
            self._store.copy(int(self.pool.addresses[old]), int(self.pool.addresses[new]), self.pool.block_bytes)

    def attend(self, plan: AttentionPlan, index: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scoring: Scoring) -> Tensor:
        """Write the step's keys and values for attention `index` and attend to everything up to each token: (T, H, D)."""
        spec = self._specs[index]
        n_tokens = len(plan.packed.token_ids)
        check_attention(spec, n_tokens, self._dtype, self._store.device, q_THD, k_TGD, v_TGD)
        self._kernels.write_rows_(self._keys[index], plan.rows[index], k_TGD.reshape(n_tokens, -1))
        self._kernels.write_rows_(self._values[index], plan.rows[index], v_TGD.reshape(n_tokens, -1))
        return self._read(plan, index, q_THD, scoring._replace(window=spec.window))

    def _read(self, plan: AttentionPlan, index: int, q_THD: Tensor, scoring: Scoring) -> Tensor:
        n_heads = self._specs[index].n_kv_heads
        return self._kernels.paged_attention(q_THD, self._keys[index], self._values[index], plan.batch, n_heads, scoring)

    def commit(self, plan: AttentionPlan, kept: Int64s) -> None:
        del self._open_plans[id(plan)]
        packed = plan.packed
        dropped: list[Int64s] = []
        copied = {i: (old, new) for i, old, new in plan.copies}
        n_kept_pages = self.grid.pages(packed.starts + kept)
        for i, table in plan.tables.items():
            slot = int(packed.slots[i])
            before = self._pages.get(slot, NO_PAGES)
            pages = table[: n_kept_pages[i] - self._first_page.get(slot, 0)] if kept[i] else before
            if len(table) > max(len(before), len(pages)):
                dropped.append(table[max(len(before), len(pages)) :])
            if i in copied:
                dropped.append(np.array([copied[i][0 if kept[i] else 1]]))
            self._pages[slot] = pages
        if self.grid.window is not None:
            dropped += self._leave_behind(packed.slots[kept > 0], packed.peaks[kept > 0])
        if dropped:
            self.pool.release(np.concatenate(dropped))

    def _leave_behind(self, slots: Int64s, peaks: Int64s) -> list[Int64s]:
        """Take pages that have left the window off these slots' tables; the pages."""
        left = []
        for slot, first in zip(slots.tolist(), self.grid.first_page(peaks).tolist(), strict=True):
            n_old = first - self._first_page.get(slot, 0)
            if n_old > 0:
                left.append(self._pages[slot][:n_old])
                self._pages[slot], self._first_page[slot] = self._pages[slot][n_old:], first
        return left

    def abort(self, plan: AttentionPlan) -> None:
        del self._open_plans[id(plan)]
        self.pool.release(plan.fresh)

    # Sequences

    def share(self, sources: Int64s, targets: Int64s) -> None:
        tables = [(self._pages.get(slot, NO_PAGES), self._first_page.get(slot, 0)) for slot in sources.tolist()]
        for table, _ in tables:
            self.pool.retain(table)
        for slot, (table, first) in zip(targets.tolist(), tables, strict=True):
            self.release(slot)
            self._pages[slot] = table
            if first:
                self._first_page[slot] = first

    def truncate(self, slot: int, to: int) -> None:
        pages = self._pages.get(slot, NO_PAGES)
        n_kept = -(-to // self.page_tokens) - self._first_page.get(slot, 0)
        if n_kept < len(pages):
            self.pool.release(pages[n_kept:])
            self._pages[slot] = pages[:n_kept]

    def reset(self, slot: int) -> None:
        self.release(slot)

    def release(self, slot: int) -> None:
        self._first_page.pop(slot, None)
        self.pool.release(self._pages.pop(slot, NO_PAGES))

    def horizon(self, slot: int) -> int:
        """0 for dense attention, which forgets from any position on."""
        return int(self.grid.horizon(np.array(self._first_page[slot]))) if slot in self._first_page else 0

    def horizon_after(self, packed: Packed) -> Int64s:
        return self.grid.horizon(self.grid.first_page(packed.peaks))

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        return {self.pool.name: self._pages.get(slot, NO_PAGES)}

    def check(self, lengths: dict[int, int], peaks: dict[int, int]) -> None:
        if strangers := (self._pages.keys() | self._first_page.keys()) - lengths.keys():
            raise IntegrityError(f"pages are held for slots that are not open: {sorted(strangers)}")
        for slot, length in lengths.items():
            n_pages, first = len(self._pages.get(slot, NO_PAGES)), self._first_page.get(slot, 0)
            expected = int(self.grid.first_page(np.array(peaks[slot])))
            if first != expected:
                raise IntegrityError(f"slot {slot} holds pages from {first} on, its furthest position {peaks[slot]} makes it {expected}")
            if n_pages + first != -(-length // self.page_tokens):
                raise IntegrityError(f"slot {slot} holds {length} tokens in {n_pages} pages of {self.page_tokens} from page {first} on")
        self.pool.check(np.concatenate([NO_PAGES, *self._pages.values(), *(p.fresh for p in self._open_plans.values())]))
