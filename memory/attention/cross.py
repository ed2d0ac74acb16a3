"""Keeps keys and values of an encoder's output. They are written when a sequence is opened, and never change.

Every step reads them. They belong to the sequence, not to its tokens. So forks share them, a rollback does not change
them, and closing the sequence frees them. Pages have the same form as those of `attention_cache`. There are as many as
the encoder's rows need.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s, ceil_div, starts_of
from hybridmem.memory.blocks.holdings import Holding, LiveRows, Record
from hybridmem.memory.blocks.layout import BlockLayout
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.blocks.table import BlockTable
from hybridmem.memory.errors import BatchError, IntegrityError, StepError
from hybridmem.memory.interface import Dropped, Encoded, Packed, References, SlotTable, Stretch
from hybridmem.memory.kernels import Kernels, PagedBatch, Prepared, Scoring, select_kernels
from hybridmem.memory.specs import CrossAttentionSpec


@dataclass(frozen=True)
class CrossPlan:
    """Holds what the kernels read in a step. Every query counts as a request of its own, because each sees all rows."""

    n_tokens: int
    batch: PagedBatch

    @property
    def can_capture(self) -> bool:
        return True


class CrossAttentionCache:
    """Keeps the encoder's keys and values of all cross-attention layers: a `memory.interface.LayerMemory`.

    Args:
        specs: the cross-attention specs, in the order in which `cross_attend` numbers them.
        page_tokens: how many rows a page has.
    """

    def __init__(self, specs: list[CrossAttentionSpec], dtype: torch.dtype, page_tokens: int, store: Store) -> None:
        self.page_tokens = page_tokens
        fields = [((s.n_kv_heads, page_tokens, s.head_dim), dtype) for s in specs for _ in ("keys", "values")]
        self.layout = BlockLayout.of(fields, [1] * len(fields)).shared_by([2] * len(specs))
        self.pool = store.make_pool("encoder pages", self.layout, from_top=False)
        self._specs, self._dtype, self._store = specs, dtype, store
        self._heads = {(s.n_query_heads, s.n_kv_heads, s.head_dim) for s in specs}
        self._kernels: Kernels = select_kernels(store.device, dtype, reproducible=store.is_reproducible)
        self._flats = [] if store.is_dry else [self._kernels.prepare(store.flat(field)) for field in self.layout.fields]
        self._table = BlockTable(self.pool, "encoder pages", "n_rows")
        self._n_rows = self._table.numbers["n_rows"]

    @property
    def pools(self) -> list[tuple[BlockPool, BlockLayout]]:
        return [(self.pool, self.layout)]

    @property
    def least_bytes(self) -> int:
        return self.pool.block_bytes

    def bytes_for(self, stretch: Stretch) -> Int64s:
        """Return (4, N) bytes of the encoder's pages, which are allocated when a sequence is opened."""
        return np.stack([self._table.counts(stretch.slots) * self.pool.block_bytes] * 4)

    def write(self, slot: int, encoded: Encoded) -> None:
        """Store an encoder's output for a new sequence. Raises BatchError or CapacityError with nothing changed."""
        n_rows = self._check(encoded)
        pages = self.pool.allocate(ceil_div(n_rows, self.page_tokens))
        self._table.set(slot, pages, n_rows=n_rows)
        try:
            if not self._store.is_dry:
                self._write(pages, n_rows, encoded)
        except BaseException:
            self._table.release(slot)
            raise

    def _write(self, pages: Int64s, n_rows: int, encoded: Encoded) -> None:
        page_R, slot_R = np.divmod(np.arange(n_rows), self.page_tokens)
        starts = self.pool.addresses[pages][page_R] // self._dtype.itemsize
        for i, (spec, tensors) in enumerate(zip(self._specs, encoded, strict=True)):
            head_G = np.arange(spec.n_kv_heads) * self.page_tokens
            offsets = self._place((starts[:, None] + (slot_R[:, None] + head_G) * spec.head_dim).ravel())
            for flat, rows_RGD in zip(self._flats[2 * i : 2 * i + 2], tensors, strict=True):
                self._kernels.write_rows_(flat, offsets, rows_RGD.detach().flatten(0, 1))

    def _check(self, encoded: Encoded) -> int:
        """Return the number of an encoder output's rows, which is the same in every layer. Raises BatchError."""
        if not isinstance(encoded, tuple | list):
            raise BatchError(
                f"encoder={type(encoded).__name__}; give what model.encode returned for one input: "
                "model.encode([ids])[0]"
            )
        if len(encoded) != len(self._specs):
            raise BatchError(
                f"encoder= holds {len(encoded)} pairs of keys and values; this model has {len(self._specs)} "
                "cross-attentions; give model.encode([ids])[0]"
            )
        for pair in encoded:
            if (
                not isinstance(pair, tuple | list)
                or len(pair) != 2
                or not all(isinstance(t, Tensor) and t.dim() == 3 for t in pair)
            ):
                raise BatchError(
                    "encoder= holds something else than pairs of (rows, heads, head_dim); give model.encode([ids])[0]"
                )
        n_rows = len(encoded[0][0])
        if not n_rows:
            raise BatchError("encoder= holds no rows; encode at least one")
        for i, (spec, tensors) in enumerate(zip(self._specs, encoded, strict=True)):
            for name, tensor in zip(("keys", "values"), tensors, strict=True):
                expected = (n_rows, spec.n_kv_heads, spec.head_dim)
                is_ours = (
                    tensor.dtype == self._dtype
                    and tensor.device.type == self._store.device.type
                    and tensor.layout == torch.strided
                )
                if tensor.shape != expected or not (is_ours or self._store.is_dry):
                    raise BatchError(
                        f"{name} of cross-attention {i} are {tensor.dtype} of shape {tuple(tensor.shape)} on "
                        f"{tensor.device}; this memory expects {self._dtype} of shape {expected} on "
                        f"{self._store.device}"
                    )
        return n_rows

    def _place(self, array: Int64s) -> Prepared:
        return self._kernels.prepare(self._store.upload(array))

    # The methods below plan, begin and end steps.

    def plan(self, packed: Packed) -> CrossPlan:
        slots = packed.slots.tolist()  # Every slot has pages, because it was opened with its encoder's output.
        repeats = packed.counts.tolist()
        tables = [self._table[slot] for slot, n in zip(slots, repeats, strict=True) for _ in range(n)]
        n_rows = np.repeat(np.array([self._n_rows[slot] for slot in slots], np.int64), packed.counts)
        cu_pages = starts_of(np.array([len(table) for table in tables], np.int64))
        pages = self._place(self.pool.addresses[np.concatenate(tables)] // self._dtype.itemsize)
        return CrossPlan(len(tables), PagedBatch(np.arange(len(tables) + 1), n_rows, pages, cu_pages, self.page_tokens))

    def cross_attend(self, plan: CrossPlan, index: int, q_THD: Tensor, scoring: Scoring) -> Tensor:
        """Attend to all encoder rows of each token's sequence: (T, H, D)."""
        spec = self._specs[index]
        expected = (plan.n_tokens, spec.n_query_heads, spec.head_dim)
        if q_THD.shape != expected or q_THD.dtype != self._dtype or q_THD.device.type != self._store.device.type:
            raise StepError(
                f"q is {q_THD.dtype} of shape {tuple(q_THD.shape)} on {q_THD.device}; this cross-attention expects "
                f"{self._dtype} of shape {expected} on {self._store.device}"
            )
        keys, values = self._flats[2 * index : 2 * index + 2]
        return self._kernels.paged_attention(q_THD, keys, values, plan.batch, spec.n_kv_heads, scoring)

    def begin(self, plan: CrossPlan) -> None:
        for heads in self._heads:
            self._kernels.plan_attention(plan.batch, heads, self._dtype, self._store.device, None)

    def commit(self, plan: CrossPlan, kept: Int64s) -> None:
        """Do nothing, because a step changes no encoder rows."""

    # The methods below open, copy and close sequences.

    def plan_drop(self, dropped: Dropped) -> None:
        """Do nothing, because encoder rows stay when tokens are dropped."""

    def bytes_to_drop(self, dropped: Dropped) -> int:
        """Return 0, because encoder rows stay where they are."""
        return 0

    def drop(self, plan: None) -> None:
        """Do nothing, like `plan_drop`."""

    def abandon_drop(self, plan: None) -> None:
        """Do nothing, like `plan_drop`."""

    @property
    def tables(self) -> list[SlotTable]:
        return [self._table]

    def truncate(self, slot: int, to: int) -> None:
        """Do nothing, because encoder rows stay when tokens are taken back."""

    def horizon(self, slot: int) -> int:
        return 0

    def horizon_after(self, packed: Packed) -> Int64s:
        return np.zeros_like(packed.starts)

    def blocks_of(self, slot: int) -> dict[str, Int64s]:
        return {self.pool.name: self._table[slot]}

    def live_rows(self, slot: int, length: int) -> LiveRows:
        rows = np.arange(len(self._table[slot]) * self.page_tokens)
        return {self.pool.name: (rows < self._n_rows.get(slot, 0)).reshape(-1, self.page_tokens)}

    def holdings(self, slots: Int64s) -> list[Holding]:
        n_rows = np.array([self._n_rows.get(slot, 0) for slot in slots.tolist()], np.int64)
        return [self._table.holding("body", slots, np.zeros_like(n_rows), n_rows)]

    def record(self, slot: int) -> Record:
        return self._table.record(slot)

    def adopt(self, slot: int, record: Record, blocks: dict[str, Int64s]) -> None:
        self._table.adopt(slot, record, blocks[self.pool.name])

    def _check_slot(self, slot: int) -> None:
        n_pages, n_rows = len(self._table[slot]), self._n_rows.get(slot, 0)
        if n_pages != ceil_div(n_rows, self.page_tokens):
            raise IntegrityError(f"slot {slot} holds {n_rows} encoder rows in {n_pages} pages of {self.page_tokens}")

    def check(self, lengths: dict[int, int], peaks: dict[int, int], *, is_all: bool = True) -> None:
        for slot in lengths:
            self._check_slot(slot)
        if is_all:
            self._table.check(lengths)

    def references(self, plans: list[CrossPlan]) -> References:
        """Return the references of slots. Plans add none, because a step allocates nothing."""
        return {self.pool: self._table.references}
