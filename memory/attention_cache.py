"""The attention cache keeps keys and values in pages, which all attention layers with the same window share.

A page holds K and V of `page_tokens` consecutive tokens for each of these layers, head by head. So one page table per
sequence serves all layers, and the rows of one head are contiguous within a page. A row is written in place: it is not
read before the sequence's length moves past it. A page that several sequences refer to is never written: a sequence
that appends to it takes a copy.

A layer with a window needs the last `window` rows before every position that a rollback may reach; a page is released
when all its rows are older. When tokens are dropped from the middle, the rows after them are copied to their new
positions, and their keys are rotated to match. Earlier pages stay.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import EMPTY, Int64s, ceil_div, ranges, starts_of
from hybridmem.memory.blocks.holdings import Holding, LiveRows, Record
from hybridmem.memory.blocks.layout import BlockLayout
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.blocks.table import BlockTable
from hybridmem.memory.errors import DropError, IntegrityError, StepError
from hybridmem.memory.interface import Dropped, Packed, References, SlotTable, Stretch
from hybridmem.memory.kernels import (
    FoldedRows,
    Kernels,
    PageChoice,
    PagedBatch,
    Prepared,
    Scoring,
    TreePaths,
    select_kernels,
)
from hybridmem.memory.sequences.pages import DropPlan, PageGrid
from hybridmem.memory.sequences.reads import AttentionPlan, Read, Selects, attend_each
from hybridmem.memory.specs import AttentionSpec

_ROWS_AT_ONCE = 4096
"""The number of rows of a layer that `drop` copies at once. It bounds the temporary memory that long sequences need."""


class AttentionCache:
    """Keeps keys and values of all attention layers of one window in pages: a `memory.interface.LayerMemory`.

    Args:
        specs: the attention specs, in the order in which `attend` numbers them.
        name: the name of the pool. By default it is "pages", or "pages over WINDOW".
        selection: chooses the pages that queries read. None: they read all pages.
    Attributes:
        specs, store: what it was made with.
        kv_shapes: the shapes of one token's keys, as in `AttentionSpec.kv_shape`, of all these attentions.
    """

    def __init__(
        self, specs: list[AttentionSpec], dtype: torch.dtype, grid: PageGrid, store: Store, *, name: str | None = None,
        selection: Selects | None = None,
    ) -> None:  # fmt: skip
        self.grid, self.page_tokens = grid, grid.page_tokens
        self._selection, self.specs = selection, specs
        fields = [self._page_fields(s) for s in specs]
        shapes = [shape for own in fields for shape in own]
        row_axes = [1 if len(shape) == 3 else None for shape in shapes]
        self.layout = BlockLayout.of([(shape, dtype) for shape in shapes], row_axes).shared_by([*map(len, fields)])
        name = name or ("pages" if grid.window is None else f"pages over {grid.window}")
        self.pool = store.make_pool(name, self.layout, from_top=False)
        self.kv_shapes = {s.kv_shape for s in specs}
        self._heads = {(s.n_query_heads, s.n_kv_heads, s.head_dim) for s in specs}
        self.store, self._dtype = store, dtype
        self.kernels: Kernels = select_kernels(store.device, dtype, reproducible=store.is_reproducible)
        remaining, self._flats = iter(self.layout.fields), list[list[Prepared]]()
        if not store.is_dry:
            self._flats = [[self.kernels.prepare(store.flat(next(remaining))) for _ in own] for own in fields]
        # Where values are a part of the keys, keys and values are read from the same flat tensor.
        self._keys_values = [(own[0], own[s.n_parts - 1]) for s, own in zip(specs, self._flats, strict=False)]
        # A slot that has released pages has a `first_page`. `oldest` is the oldest row that the slot still needs. It
        # may lie inside the first page.
        self._table = BlockTable(self.pool, "pages", "first_page", "oldest")
        self._first_page, self._oldest = self._table.numbers.values()

    def _page_fields(self, spec: AttentionSpec) -> list[tuple[int, ...]]:
        """Return the shapes of one layer's fields in a page: keys, values if they are stored, then bounds of keys."""
        bounds = [] if self._selection is None else self._selection.bound_shapes(spec.n_kv_heads, spec.head_dim)
        return [(spec.n_kv_heads, self.page_tokens, spec.head_dim)] * spec.n_parts + bounds

    @property
    def selects(self) -> bool:
        """True if queries read chosen pages only."""
        return self._selection is not None

    @property
    def pools(self) -> list[tuple[BlockPool, BlockLayout]]:
        return [(self.pool, self.layout)]

    @property
    def least_bytes(self) -> int:
        return self.pool.block_bytes

    def bytes_for(self, stretch: Stretch) -> Int64s:
        return self.grid.held_pages(stretch) * self.pool.block_bytes

    def plan(self, packed: Packed, first_read: Int64s | None = None) -> AttentionPlan:
        """See `LayerMemory.plan`. With `first_read`, queries of request i read no page before page first_read[i]."""
        tables = self._table.of_all(slots := packed.slots.tolist())
        held, wanted = self.grid.pages(packed.starts), self.grid.pages(packed.ends)
        lengths, positions, n_new = packed.ends, packed.positions, wanted - held
        # From here on, positions and pages count from the first page that is read.
        if self._first_page or first_read is not None:
            first = self.first_pages(packed.slots) if first_read is None else first_read
            held, wanted, lengths = held - first, wanted - first, lengths - first * self.page_tokens
            positions = positions - np.repeat(first * self.page_tokens, packed.counts)
        shared = last_pages = EMPTY
        if self.pool.counts.max() > 1:
            inside_page = (packed.starts % self.page_tokens).nonzero()[0]
            last_pages = np.array([tables[i][-1] for i in inside_page.tolist()], np.int64)
            is_shared = self.pool.counts[last_pages] > 1
            shared, last_pages = inside_page[is_shared], last_pages[is_shared]
        fresh, taken = self.pool.allocate(len(shared) + int(n_new.sum())), len(shared)
        copies = list(zip(shared.tolist(), last_pages.tolist(), fresh[:taken].tolist(), strict=True))
        changed: dict[int, Int64s] = {}
        for i in n_new.nonzero()[0].tolist():
            start, taken = taken, taken + int(n_new[i])
            changed[i] = tables[i] = np.concatenate([tables[i], fresh[start:taken]])
        for i, _, new in copies:
            changed[i] = tables[i] = tables[i].copy()
            tables[i][-1 - n_new[i]] = new
        try:
            copied = {i for i, _, _ in copies}
            for i, table in changed.items():  # All blocks are allocated here, so that `commit` cannot fail.
                self._table.reserve(slots[i], len(table) - int(n_new[i]) - (i in copied), len(table))
            if first_read is not None:
                held_from = [self._first_page.get(slot, 0) for slot in slots]
                tables = [t[n - own :] for t, n, own in zip(tables, first_read.tolist(), held_from, strict=True)]
            pages = self.pool.addresses[np.concatenate(tables)] // self._dtype.itemsize
            rows = self._rows_at(packed, pages, wanted, positions)
            cu_seqlens, lengths, cu_pages = map(self.store.on_host, (packed.cu_seqlens, lengths, starts_of(wanted)))
            batch = PagedBatch(cu_seqlens, lengths, self.place(pages, room=True), cu_pages, self.page_tokens)
            reads, full = self._reads(packed, pages, batch)
            return AttentionPlan(packed, changed, copies, fresh, pages, batch, rows, reads, full)
        except BaseException:
            self.pool.release(fresh)
            raise

    def _reads(self, packed: Packed, pages: Int64s, batch: PagedBatch) -> tuple[tuple[Read, ...], Prepared | None]:
        """Return what a step reads, and the addresses of the pages that it fills.

        The step then writes the bounds of the keys of these full pages.
        """
        if self._selection is None:
            return (Read(batch),), None
        reads = self._selection.pages_read(packed, batch, pages, self.place)
        first = batch.cu_pages[:-1]
        full = ranges(first + packed.starts // self.page_tokens, first + packed.ends // self.page_tokens)
        return reads, self.place(pages[full])

    def _rows_at(self, packed: Packed, pages: Int64s, n_pages: Int64s, positions: Int64s) -> tuple[Prepared, ...]:
        """Compute for each layer the element offsets of the new tokens' rows.

        Positions count from the first page that is read.
        """
        page_T, slot_T = np.divmod(positions, self.page_tokens)
        begins = n_pages.cumsum() - n_pages
        page_T += begins if packed.is_decode else np.repeat(begins, packed.counts)
        page_T = pages[page_T]
        rows = {shape: self.place(self._row_offsets(shape, page_T, slot_T)) for shape in self.kv_shapes}
        return tuple(rows[s.kv_shape] for s in self.specs)

    def _row_offsets(self, kv_shape: tuple[int, int], page_T: Int64s, slot_T: Int64s) -> Int64s:
        """Return (T * G,) element offsets of each head's rows: row `slot_T` of the page at element offset `page_T`."""
        n_heads, head_dim = kv_shape
        first_T = page_T + slot_T * head_dim
        return (first_T[:, None] + np.arange(n_heads) * (self.page_tokens * head_dim)).ravel()

    def place(self, array: Int64s, *, room: bool = False) -> Prepared:
        """Upload an array for the kernels.

        With `room`, the upload gets a rounded-up capacity, so that the arrays of later plans keep the same address.
        """
        return self.kernels.prepare(self.store.upload(array, room=room))

    def begin(self, plan: AttentionPlan) -> None:
        self.copy_shared(plan)
        for read in plan.reads:
            self.plan_read(read)

    def copy_shared(self, plan: AttentionPlan) -> None:
        """Copy each request's last page if the step appends to it and other sequences refer to it as well."""
        for _, old, new in plan.copies:
            self.store.copy(int(self.pool.addresses[old]), int(self.pool.addresses[new]), self.pool.block_bytes)

    def plan_read(self, read: Read, folded: FoldedRows | None = None) -> None:
        """Let the kernels plan one read of the step."""
        for heads in self._heads:
            self.kernels.plan_attention(read.batch, heads, self._dtype, self.store.device, self.grid.window, folded)
        if read.choice is not None:
            self.kernels.plan_choice(read.choice, self.store.device)

    def attend(
        self, plan: AttentionPlan, index: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """Write the step's keys and values.

        Return each token's attention over all tokens up to itself: (T, H, D or value_dim).
        """
        self.write(plan, index, q_THD, k_TGD, v_TGD)
        if self._selection is None:
            return self.read(plan.batch, index, q_THD, scoring)
        if scoring.bias_HL is not None:
            raise StepError(f"a bias by distance needs every row; take {self._selection.label} off this layer")
        if plan.full is not None:
            self._bound(index, plan.full)
        return attend_each(plan.reads, q_THD, lambda read, q_QHD: self._read_chosen(read, index, q_QHD, scoring))

    def _read_chosen(self, read: Read, index: int, q_QHD: Tensor, scoring: Scoring) -> Tensor:
        batch = read.batch
        if read.choice is not None:
            pages = self.choose(read.choice, index, q_QHD, self._flats[index][-2:])
            batch = batch.at(self.kernels.prepare(pages))
        return self.read(batch, index, q_QHD, scoring)

    def choose(self, choice: PageChoice, index: int, q_QHD: Tensor, bounds: Sequence[Prepared]) -> Tensor:
        """Return the pages that queries choose by these bounds of keys, (G, C): C pages for each key/value head."""
        least, greatest = bounds
        return self.kernels.choose_pages(q_QHD, least, greatest, choice, self.specs[index].n_kv_heads)

    def write(self, plan: AttentionPlan, index: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor | None) -> None:
        self.specs[index].check_rows(len(plan.packed.token_ids), self._dtype, self.store.device, q_THD, k_TGD, v_TGD)
        keys, values = self._keys_values[index]
        self.kernels.write_rows_(keys, plan.rows[index], k_TGD.flatten(0, 1))
        if v_TGD is not None:
            self.kernels.write_rows_(values, plan.rows[index], v_TGD.flatten(0, 1))

    def read(
        self, batch: PagedBatch, index: int, q_THD: Tensor, scoring: Scoring, folded: FoldedRows | None = None
    ) -> Tensor:
        """Attend to the rows that have folded, and to the pages after them.

        Where values are a part of the keys, the kernel sums all D elements of the keys, though only the first value_dim
        are wanted. With DeepSeek's sizes, D = 576 and value_dim = 512, that is an eighth more work on values.
        """
        spec, (keys, values) = self.specs[index], self._keys_values[index]
        scoring = scoring._replace(window=spec.window)
        out_THD = self.kernels.paged_attention(q_THD, keys, values, batch, spec.n_kv_heads, scoring, folded)
        return out_THD[..., : spec.value_dim]

    def read_paths(
        self, batch: PagedBatch, paths: TreePaths, index: int, q_QHD: Tensor, scoring: Scoring
    ) -> Tensor:  # fmt: skip
        """Attend from trees of tokens, each to the rows of its sequence and those on its path."""
        spec, (keys, values) = self.specs[index], self._keys_values[index]
        scoring = scoring._replace(window=spec.window)
        out_QHD = self.kernels.tree_attention(q_QHD, keys, values, batch, paths, spec.n_kv_heads, scoring)
        return out_QHD[..., : spec.value_dim]

    def rows_of(self, plan: AttentionPlan, index: int, request: int, chosen: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values of some of the pages that a request holds, (n_pages, G, page_tokens, D) each."""
        spec, pages = self.specs[index], plan.batch.pages[plan.batch.cu_pages[request] :][chosen]
        shape = (spec.n_kv_heads, self.page_tokens, spec.head_dim)
        keys, values = self._keys_values[index]
        return self.kernels.read_rows(keys, pages, shape, 0.0), self.kernels.read_rows(values, pages, shape, 0.0)

    def move_rows(self, kv_shape: tuple[int, int], sources: Int64s, targets: Int64s) -> None:
        """Copy rows of all attentions of this shape, given by the element offsets of their first heads (R,) each."""
        if self.store.is_dry or not len(sources):
            return
        n_heads, head_dim = kv_shape
        apart = np.arange(n_heads) * (self.page_tokens * head_dim)
        source, target = (self.place((offsets[:, None] + apart).ravel()) for offsets in (sources, targets))
        for spec, own in zip(self.specs, self._flats, strict=True):
            for flat in own[: spec.n_parts] if spec.kv_shape == kv_shape else ():
                rows = self.kernels.read_rows(flat, source, (head_dim,), 0.0)
                self.kernels.write_rows_(flat, target, rows)

    def commit(self, plan: AttentionPlan, kept: Int64s) -> None:
        if not plan.tables and not self.grid.leaves:
            return
        if not np.count_nonzero(kept):
            self.pool.release(plan.fresh)
            return
        packed = plan.packed
        dropped, copied = list[Int64s](), {i: (old, new) for i, old, new in plan.copies}
        n_kept_pages = self.grid.pages(packed.starts + kept)
        for i, table in plan.tables.items():
            slot = int(packed.slots[i])
            n_before = n_after = len(self._table[slot])
            if kept[i]:
                n_after = int(n_kept_pages[i]) - self._first_page.get(slot, 0)
                self._table.replace(slot, at := n_before - (i in copied), table[at:n_after])
            if len(table) > n_after:
                dropped.append(table[n_after:])
            if i in copied:
                dropped.append(np.array([copied[i][0 if kept[i] else 1]]))
        if self.grid.leaves:
            dropped += self._leave_behind(packed.slots[kept > 0], packed.peaks[kept > 0])
        if dropped:
            self.pool.release(np.concatenate(dropped))

    def _leave_behind(self, slots: Int64s, peaks: Int64s) -> list[Int64s]:
        """Remove the pages that have left the window from these slots' page tables, and return the removed pages."""
        left = []
        for slot, first in zip(slots.tolist(), self.grid.first_page(peaks).tolist(), strict=True):
            n_old = first - self._first_page.get(slot, 0)
            if n_old > 0:
                left.append(self._table.leave_behind(slot, n_old))
                self._first_page[slot] = first
        return left

    # The methods below drop tokens.

    def bytes_to_drop(self, dropped: Dropped) -> int:
        return self.grid.after_drop(dropped, self._oldest_row(dropped.slot))[3] * self.pool.block_bytes

    def plan_drop(self, dropped: Dropped) -> DropPlan:
        for spec in self.specs:
            if spec.rotation is None:
                raise DropError(
                    f"tokens behind [{dropped.start}, {dropped.end}) cannot move: the spec of {spec.name!r} does not "
                    "say how its keys carry positions, or they do not; give AttentionSpec(rotation=...) if they do",
                    start=dropped.start, end=dropped.end,
                )  # fmt: skip
        oldest = self._oldest_row(dropped.slot)
        first_page, oldest_after, n_kept, n_fresh = self.grid.after_drop(dropped, oldest)
        n_after, fresh = dropped.length - dropped.n_tokens, self.pool.allocate(n_fresh)
        try:
            if not self.store.is_dry:
                positions = np.arange((first_page + n_kept) * self.page_tokens, n_after)
                for begin in range(0, len(positions), _ROWS_AT_ONCE):
                    self._copy_moved(dropped, oldest, positions[0], positions[begin : begin + _ROWS_AT_ONCE], fresh)
                if self._selection is not None:
                    full = fresh[: max(0, n_after // self.page_tokens - first_page - n_kept)]
                    for index in range(len(self.specs)):
                        self._bound(index, self.place(self.pool.addresses[full] // self._dtype.itemsize))
        except BaseException:
            self.pool.release(fresh)
            raise
        return DropPlan(dropped.slot, first_page, oldest_after, n_kept, fresh)

    def _copy_moved(self, dropped: Dropped, oldest: int, origin: int, new_R: Int64s, fresh: Int64s) -> None:
        """Write the rows of positions `new_R` into pages `fresh`, which begin at position `origin`.

        Rows older than `oldest` are no longer held, and nobody will read them. Zeros are written in their place.
        """
        old_R = new_R + (new_R >= dropped.start) * dropped.n_tokens
        is_held, table = old_R >= oldest, self._table[dropped.slot]
        first_row = self._first_page.get(dropped.slot, 0) * self.page_tokens
        page_R, slot_R = np.divmod(np.maximum(old_R - first_row, 0), self.page_tokens)
        sources = self.pool.addresses[table[page_R]] // self._dtype.itemsize
        new_page_R, new_slot_R = np.divmod(new_R - origin, self.page_tokens)
        targets = self.pool.addresses[fresh[new_page_R]] // self._dtype.itemsize
        rotations = {s.rotation for s in self.specs if s.rotation is not None}
        angles = {rotation: rotation.angles_between(old_R, new_R) for rotation in rotations}
        for spec, (keys, values) in zip(self.specs, self._keys_values, strict=True):
            assert spec.rotation is not None, "`plan_drop` has refused these"
            is_held_RG = np.repeat(is_held, spec.n_kv_heads)
            source = self.place(np.where(is_held_RG, self._row_offsets(spec.kv_shape, sources, slot_R), -1))
            target = self.place(self._row_offsets(spec.kv_shape, targets, new_slot_R))
            for flat in (keys, values)[: spec.n_parts]:
                rows_RGD = self.kernels.read_rows(flat, source, (spec.head_dim,), 0.0).view(len(new_R), *spec.kv_shape)
                if flat is keys:
                    rows_RGD = spec.rotation.rotated(rows_RGD, angles[spec.rotation])
                self.kernels.write_rows_(flat, target, rows_RGD.flatten(0, 1))

    def _bound(self, index: int, full: Prepared) -> None:
        """Write the bounds of the keys of full pages (F,), which are given by their element offsets."""
        if self._selection is None or not len(full):
            return
        spec, flats = self.specs[index], self._flats[index]
        k_NGPD = self.kernels.read_rows(flats[0], full, (spec.n_kv_heads, self.page_tokens, spec.head_dim), 0.0)
        for flat, bound in zip(flats[spec.n_parts :], self._selection.bounds(k_NGPD), strict=True):
            self.kernels.write_rows_(flat, full, bound.flatten(1))

    def drop(self, plan: DropPlan) -> None:
        self._table.truncate(plan.slot, plan.n_kept)
        ids = np.concatenate([self._table[plan.slot], plan.fresh])
        self._table.set(plan.slot, ids, first_page=plan.first_page, oldest=plan.oldest)

    def abandon_drop(self, plan: DropPlan) -> None:
        self.pool.release(plan.fresh)

    # The methods below open, copy and close sequences.

    @property
    def tables(self) -> list[SlotTable]:
        return [self._table]

    def truncate(self, slot: int, to: int) -> None:
        if to:
            self._table.truncate(slot, ceil_div(to, self.page_tokens) - self._first_page.get(slot, 0))
        else:
            self._table.release(slot)

    def horizon(self, slot: int) -> int:
        """Return the earliest position that `truncate` reaches: 0 for dense attention."""
        return int(self.grid.horizon(np.array(self._oldest_row(slot)))) if self.grid.leaves else 0

    def horizon_after(self, packed: Packed) -> Int64s:
        oldest = self.grid.first_page(packed.peaks) * self.page_tokens
        if self._oldest:
            oldest = np.maximum(oldest, self._table.column("oldest", packed.slots))
        return self.grid.horizon(oldest)

    def first_pages(self, slots: Int64s) -> Int64s:
        """Return (S,) the page number of the oldest page that each slot holds."""
        return self._table.column("first_page", slots)

    def _oldest_row(self, slot: int) -> int:
        return max(self._first_page.get(slot, 0) * self.page_tokens, self._oldest.get(slot, 0))

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        return {self.pool.name: self._table[slot]}

    def live_rows(self, slot: int, length: int) -> LiveRows:
        page_N = self._first_page.get(slot, 0) + np.arange(len(self._table[slot]))
        positions = page_N[:, None] * self.page_tokens + np.arange(self.page_tokens)
        return {self.pool.name: (positions >= self._oldest_row(slot)) & (positions < length)}

    def holdings(self, slots: Int64s) -> list[Holding]:
        starts = np.maximum(self.first_pages(slots) * self.page_tokens, self._table.column("oldest", slots))
        return [self._table.holding("body", slots, starts)]

    def record(self, slot: int) -> Record:
        return self._table.record(slot)

    def adopt(self, slot: int, record: Record, blocks: dict[str, Int64s]) -> None:
        self._table.adopt(slot, record, blocks[self.pool.name])

    def _check_slot(self, slot: int, length: int, peak: int) -> None:
        n_pages, first, page_tokens = len(self._table[slot]), self._first_page.get(slot, 0), self.page_tokens
        expected = int(self.grid.first_page(np.array(peak)))
        if first != expected:
            raise IntegrityError(f"slot {slot} holds pages from {first} on, its peak {peak} makes it {expected}")
        if not 0 <= (oldest := self._oldest.get(slot, 0)) <= self.grid.oldest_wanted(np.array(peak)):
            raise IntegrityError(f"slot {slot} has rows from {oldest} on, its peak {peak} needs older ones")
        if n_pages + first != ceil_div(length, page_tokens):
            pages = f"{n_pages} pages of {page_tokens} from page {first} on"
            raise IntegrityError(f"slot {slot} holds {length} tokens in {pages}")

    def check(self, lengths: dict[int, int], peaks: dict[int, int], *, is_all: bool = True) -> None:
        for slot, length in lengths.items():
            self._check_slot(slot, length, peaks[slot])
        if is_all:
            self._table.check(lengths)

    def references(self, plans: list[AttentionPlan]) -> References:
        return {self.pool: [*self._table.references, *(plan.fresh for plan in plans)]}
