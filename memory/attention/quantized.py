"""Keeps old keys and values in few bits: the body consists of quantized pages, the tail of exact pages.

The tail is an `AttentionCache` that releases old pages, like one with a window. When `group` rows have become older
than the rollback window, they fold: a quantized page replaces them. Groups are at fixed positions, so forks, prefixes
and repeated runs have the same groups. Each group is quantized once, from exact rows. A step reads the body as it was
before the step.

    position 0 ............................. body_at ............... start ......... end
             quantised pages of `group` rows  |  exact pages, verbatim | rows of the step

The exact pages of a group stay for one more rollback window. So a sequence may be rolled back to a length at which the
group would not have folded yet. It then reads the group's exact rows, like a sequence that never went further. When it
is long enough again, it reads the quantized page.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.attention.selection import Selection
from hybridmem.memory.attention_cache import AttentionCache
from hybridmem.memory.blocks.arrays import EMPTY, Int64s, starts_of
from hybridmem.memory.blocks.holdings import Holding, LiveRows, Record
from hybridmem.memory.blocks.layout import BlockLayout
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.blocks.table import BlockTable
from hybridmem.memory.errors import IntegrityError, SpecError
from hybridmem.memory.interface import Packed, References, SlotTable, Stretch
from hybridmem.memory.kernels import FoldedRows, Prepared, Scoring, reference
from hybridmem.memory.quantization import Shaped, Storage
from hybridmem.memory.sequences.drop import CannotDrop
from hybridmem.memory.sequences.folding import FoldPoints
from hybridmem.memory.sequences.pages import PageGrid
from hybridmem.memory.sequences.reads import AttentionPlan, Body, Read, attend_each
from hybridmem.memory.specs import AttentionSpec


@dataclass(frozen=True)
class FoldGrid(PageGrid):
    """Divides rows into pages that are released `group` rows at a time, one rollback window after they have folded."""

    group: int

    @property
    def leaves(self) -> bool:
        return True

    def n_groups(self, peaks: Int64s) -> Int64s:
        """Return the number of folded groups of sequences with these peaks."""
        return FoldPoints(self.rollback_window, self.group).count(peaks)

    @property
    def group_pages(self) -> int:
        return self.group // self.page_tokens

    def first_page(self, peaks: Int64s) -> Int64s:
        return self.n_groups(peaks - self.rollback_window) * self.group_pages

    def horizon_of(self, n_groups: Int64s, first_page: Int64s) -> Int64s:
        """Return the earliest position whose past is complete, in quantized or exact rows."""
        exact_from = first_page * self.page_tokens
        return np.maximum(n_groups * self.group, (exact_from > 0) * (exact_from + self.rollback_window))


@dataclass(frozen=True)
class QuantizedPlan:
    """Holds the blocks that are allocated for a step, and what it reads and writes.

    Attributes:
        exact: the plan of the pages that are exact while the step runs.
        folding: (S,) for each request, the index of the first unfolded page among the exact pages that it reads.
        n_new: (S,) how many groups fold at the end of the step.
        fresh: the blocks of these groups, request after request.
        targets: element size in bytes -> element offset of each fresh block.
        reads: what the queries read of the body before the step, and of exact pages.
    """

    packed: Packed
    exact: AttentionPlan
    folding: Int64s
    n_new: Int64s
    fresh: Int64s
    targets: dict[int, Tensor]
    reads: tuple[Read, ...]

    @property
    def can_capture(self) -> bool:
        # A CUDA graph cannot hold what the host does: it folds groups, and counts the groups from which a query
        # chooses.
        return not self.n_new.any() and all(read.choice is None for read in self.reads)


class QuantizedAttention(CannotDrop):
    """Keeps quantized pages and exact tails of attention layers with one storage: a `memory.interface.LayerMemory`.

    Args:
        specs: the attention specs, in the order in which `attend` numbers them. All have the same `storage`.
        page_tokens: how many tokens an exact page has. It must divide `storage.group`.
        selection: chooses the groups that are read. None: all are read.
    Raises SpecError if pages do not divide groups, or if groups or bits do not suit the heads.
    """

    def __init__(
        self, specs: list[AttentionSpec], storage: Storage, dtype: torch.dtype, page_tokens: int, rollback_window: int,
        store: Store, name: str, *, selection: Selection | None = None,
    ) -> None:  # fmt: skip
        if storage.group % page_tokens:
            raise SpecError(
                f"groups of {storage.group} tokens are no whole number of pages of {page_tokens}; give {storage} "
                "another group, or the memory page_tokens= that divide it"
            )
        self.storage, self._selection, self._dtype = storage, selection, dtype
        self.grid = FoldGrid(page_tokens, None, rollback_window, storage.group)
        self.exact = AttentionCache(specs, dtype, self.grid, store, name=f"exact pages of {name}")
        self._specs, self._store = specs, store
        for spec in specs:
            storage.check(spec.head_dim)
        shapes = [
            [*storage.shapes(*size, by_channel=True), *storage.shapes(*size, by_channel=False)]
            for size in ((s.n_kv_heads, storage.group, s.head_dim) for s in specs)
        ]
        own_fields = [[*own, *self._bound_fields(spec)] for spec, own in zip(specs, shapes, strict=True)]
        self.layout = BlockLayout.of([field for own in own_fields for field in own]).shared_by([*map(len, own_fields)])
        self.bodies = store.make_pool(f"pages of {name}", self.layout, from_top=False)
        n_fields = len(own_fields[0])
        fields = [self.layout.fields[i : i + n_fields] for i in range(0, len(self.layout.fields), n_fields)]
        self._part_sizes = {field.dtype.itemsize for field in self.layout.fields}
        self._shapes = [tuple(shape for shape, _ in own) for own in shapes]
        self._flats: list[tuple[Prepared, ...]] = [
            () if store.is_dry else tuple(map(store.flat, own)) for own in fields
        ]
        self._table = BlockTable(self.bodies, "quantised pages")

    def _bound_fields(self, spec: AttentionSpec) -> list[Shaped]:
        """Return the fields of a block for the bounds of its keys. There are none if no selection reads them."""
        if self._selection is None:
            return []
        return [(shape, self._dtype) for shape in self._selection.bound_shapes(spec.n_kv_heads, spec.head_dim)]

    @property
    def pools(self) -> list[tuple[BlockPool, BlockLayout]]:
        return [*self.exact.pools, (self.bodies, self.layout)]

    @property
    def least_bytes(self) -> int:
        return self.exact.least_bytes

    def bytes_for(self, stretch: Stretch) -> Int64s:
        before = self.grid.n_groups(stretch.peaks)
        after = self.grid.n_groups(np.maximum(stretch.peaks, stretch.ends))
        return self.exact.bytes_for(stretch) + np.stack([before, after, after, before]) * self.bodies.block_bytes

    # The methods below plan, begin and end steps.

    def plan(self, packed: Packed) -> QuantizedPlan:
        tables, group_pages = [self._table[slot] for slot in packed.slots.tolist()], self.grid.group_pages
        n_blocks = np.array([len(table) for table in tables], np.int64)
        n_new = self.grid.n_groups(packed.peaks) - n_blocks
        n_read = self.grid.n_groups(packed.starts)  # After a rollback, a step may read fewer groups than have folded.
        if (n_read != n_blocks).any():
            tables = [table[:n] for table, n in zip(tables, n_read.tolist(), strict=True)]
        exact, fresh = self.exact.plan(packed, n_read * group_pages), EMPTY
        try:
            placed = self._store.place(self.bodies.addresses[np.concatenate(tables)])
            body = Body(placed, starts_of(n_read), n_read * self.storage.group)
            fresh = self.bodies.allocate(int(n_new.sum()))
            for i in n_new.nonzero()[0].tolist():  # All blocks are allocated here, so that `commit` cannot fail.
                self._table.reserve(int(packed.slots[i]), int(n_blocks[i]), int(n_blocks[i] + n_new[i]))
            folding, reads = (n_blocks - n_read) * group_pages, self._reads(packed, exact, body)
            return QuantizedPlan(packed, exact, folding, n_new, fresh, self._targets(fresh), reads)
        except BaseException:
            self.bodies.release(fresh)
            self.exact.commit(exact, packed.nothing)
            raise

    def _targets(self, fresh: Int64s) -> dict[int, Tensor]:
        if self._store.is_dry or not len(fresh):
            return {}
        return {size: self._store.upload(self.bodies.addresses[fresh] // size) for size in self._part_sizes}

    def _reads(self, packed: Packed, exact: AttentionPlan, body: Body) -> tuple[Read, ...]:
        if self._selection is None:
            return (Read(exact.batch, body=body),)
        return self._selection.groups_read(
            packed, exact.batch, exact.pages, self.exact.place, body, self._dtype.itemsize
        )

    def begin(self, plan: QuantizedPlan) -> None:
        self.exact.copy_shared(plan.exact)
        for read in plan.reads:
            self.exact.plan_read(read, self._folded(0, read.body))

    def attend(
        self, plan: QuantizedPlan, index: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor | None, scoring: Scoring
    ) -> Tensor:
        """Write the step's keys and values, and attend to all tokens up to each token: (T, H, D). Then fold."""
        self.exact.write(plan.exact, index, q_THD, k_TGD, v_TGD)
        out_THD = attend_each(plan.reads, q_THD, lambda read, q_QHD: self._read(read, index, q_QHD, scoring))
        taken = 0
        for i in plan.n_new.nonzero()[0].tolist():
            n_new = int(plan.n_new[i])
            targets = {size: offsets[taken : taken + n_new] for size, offsets in plan.targets.items()}
            self._fold(plan, index, i, targets, n_new)
            taken += n_new
        return out_THD

    def _read(self, read: Read, index: int, q_QHD: Tensor, scoring: Scoring) -> Tensor:
        folded = self._folded(index, read.body)
        if read.choice is not None and folded is not None:
            places_GC = self.exact.choose(read.choice, index, q_QHD, self._flats[index][-2:])
            folded = replace(folded, blocks=places_GC * self._dtype.itemsize)
        return self.exact.read(read.batch, index, q_QHD, scoring.of(read.tokens), folded)

    def _folded(self, index: int, body: Body | None) -> FoldedRows | None:
        if body is None or not len(body.blocks.host):
            return None
        shapes = self._shapes[index]
        flats = self._flats[index][: len(shapes)]
        return FoldedRows(
            self.storage, shapes, flats, body.blocks.device, body.cu_blocks, body.lengths, self._specs[index].head_dim
        )

    def _fold(self, plan: QuantizedPlan, index: int, request: int, targets: dict[int, Tensor], n_new: int) -> None:
        """Quantize the oldest exact rows of a request, one group into each block."""
        first, n_pages = int(plan.folding[request]), n_new * self.grid.group_pages
        parts, bounds = list[Tensor](), list[Tensor]()
        keys_values = self.exact.rows_of(plan.exact, index, request, slice(first, first + n_pages))
        for rows, is_key in zip(keys_values, (True, False), strict=True):
            rows_BGRD = rows.view(n_new, -1, *rows.shape[1:]).transpose(1, 2).flatten(2, 3)
            parts += self.storage.encode(rows_BGRD, by_channel=is_key)
            if is_key and self._selection is not None:
                bounds = self._selection.bounds(rows_BGRD)
        for flat, part in zip(self._flats[index], [*parts, *bounds], strict=True):
            reference.write_rows_(flat, targets[part.element_size()], part.flatten(1))

    def commit(self, plan: QuantizedPlan, kept: Int64s) -> None:
        self.exact.commit(plan.exact, kept)
        ends = plan.n_new.cumsum()
        for i in plan.n_new.nonzero()[0].tolist():
            slot, fresh = int(plan.packed.slots[i]), plan.fresh[ends[i] - plan.n_new[i] : ends[i]]
            if kept[i]:
                self._table.append(slot, fresh)
            else:
                self.bodies.release(fresh)

    # The methods below drop tokens.

    def why_not(self) -> str:
        return f"rows that share a scale, in attention of {self.storage.label}, lie at fixed positions"

    # The methods below open, copy and close sequences.

    @property
    def tables(self) -> list[SlotTable]:
        return [*self.exact.tables, self._table]

    def truncate(self, slot: int, to: int) -> None:
        self.exact.truncate(slot, to)
        if not to:
            self._table.release(slot)

    def horizon(self, slot: int) -> int:
        slots = np.array([slot])
        return int(self.grid.horizon_of(self._table.counts(slots), self.exact.first_pages(slots))[0])

    def horizon_after(self, packed: Packed) -> Int64s:
        first_page = np.maximum(self.grid.first_page(packed.peaks), self.exact.first_pages(packed.slots))
        return self.grid.horizon_of(self.grid.n_groups(packed.peaks), first_page)

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        return self.exact.blocks_of(slot) | {self.bodies.name: self._table[slot]}

    def live_rows(self, slot: int, length: int) -> LiveRows:
        """Mark all rows of folded groups as live: groups fold as a whole, and rollbacks take no folded rows back."""
        return self.exact.live_rows(slot, length) | {self.bodies.name: np.ones((len(self._table[slot]), 1), np.bool_)}

    def holdings(self, slots: Int64s) -> list[Holding]:
        bodies = self._table.holding("body", slots, np.zeros_like(slots))
        tails = (replace(h, part="tail", fold_tokens=self.storage.group) for h in self.exact.holdings(slots))
        return [*tails, replace(bodies, ends=bodies.counts * self.storage.group)]

    def record(self, slot: int) -> Record:
        return self.exact.record(slot)

    def adopt(self, slot: int, record: Record, blocks: dict[str, Int64s]) -> None:
        self.exact.adopt(slot, record, blocks)
        self._table.adopt(slot, {}, blocks[self.bodies.name])

    def _check_slot(self, slot: int, peak: int) -> None:
        n_blocks, expected = len(self._table[slot]), int(self.grid.n_groups(np.array(peak)))
        if n_blocks != expected:
            raise IntegrityError(f"slot {slot} holds {n_blocks} quantised pages, its peak {peak} makes it {expected}")

    def check(self, lengths: dict[int, int], peaks: dict[int, int], *, is_all: bool = True) -> None:
        self.exact.check(lengths, peaks, is_all=is_all)
        for slot in lengths:
            self._check_slot(slot, peaks[slot])
        if is_all:
            self._table.check(lengths)

    def references(self, plans: list[QuantizedPlan]) -> References:
        bodies = {self.bodies: [*self._table.references, *(plan.fresh for plan in plans)]}
        return self.exact.references([plan.exact for plan in plans]) | bodies
