"""Keeps one key of an index for each span of several tokens.

The key of a span is written with its last token, so a page of keys fills by one row for every `span_tokens` tokens. So
positions in this memory count spans: a question about tokens [a, b) becomes one about spans
[a // span_tokens, b // span_tokens). A rollback into a span takes its key back. Making the key again needs what the
model remembers of the tokens of an unfinished span, such as the window of a convolution.

    tokens  0 1 2 3 | 4 5 6 7 | 8 9
    keys          0 |       1 |       the rows of 8 and 9 are read whatever the index chooses
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.attention.indexed import IndexKeys
from hybridmem.memory.blocks.arrays import EMPTY, Int64s, ranges, starts_of
from hybridmem.memory.blocks.holdings import LiveRows
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.errors import DropError
from hybridmem.memory.interface import Dropped, Packed, Stretch
from hybridmem.memory.kernels import PagedBatch, Prepared
from hybridmem.memory.rotary import Rotation
from hybridmem.memory.sequences.choosing import Choosing
from hybridmem.memory.sequences.pages import DropPlan, PageGrid
from hybridmem.memory.sequences.reads import AttentionPlan, Read
from hybridmem.memory.specs import IndexSpec


@dataclass(eq=False, kw_only=True)
class SpanPlan(AttentionPlan):
    """Holds the pages for the keys of those spans that a step completes. All positions in it count spans.

    Attributes:
        requests: (S,) which requests of the step complete a span: those of `packed`.
        starts: (S,) how many tokens they held before the step.
        last_tokens: (K,) the packed index of the last token of each span that is completed.
        n_tokens: how many tokens the step has.
    """

    requests: Int64s
    starts: Int64s
    last_tokens: Tensor
    n_tokens: int

    @property
    def can_capture(self) -> bool:
        # The number of keys that a step writes depends on positions, so kernels differ between steps.
        return False


class SpanKeys(IndexKeys):
    """Keeps the keys of all indexes of a model that choose the same number of spans: a `memory.interface.LayerMemory`.

    Arguments are those of `IndexKeys`. A page of `grid` has `page_tokens` keys.
    """

    def __init__(self, specs: list[IndexSpec], dtype: torch.dtype, grid: PageGrid, store: Store, name: str) -> None:
        turned = [replace(s, rotation=_by_span(s.rotation, s.span_tokens)) for s in specs]
        super().__init__(turned, dtype, grid, store, name)

    def plan(self, packed: Packed, first_read: Int64s | None = None) -> SpanPlan:
        span = self._span_tokens
        before, after = packed.starts // span, packed.ends // span
        chosen = (after > before).nonzero()[0]
        counts = (after - before)[chosen]
        positions = ranges(before[chosen], after[chosen])
        ending = Packed(
            slots=packed.slots[chosen], starts=before[chosen], cu_seqlens=starts_of(counts),
            peaks=packed.peaks[chosen] // span, token_ids=np.zeros_like(positions), positions=positions,
            place=np.arange(len(chosen)),
        )  # fmt: skip
        own = super().plan(ending) if len(chosen) else self._nothing(ending)
        try:
            to_packed = np.repeat((packed.cu_seqlens[:-1] - packed.starts)[chosen], counts)
            last_tokens = self.store.upload((positions + 1) * span - 1 + to_packed)
            tables = self._table.of_all(packed.slots.tolist())
            for i, table in own.tables.items():
                tables[chosen[i]] = table
            reads = self._keys_read(packed, tables)
        except BaseException:
            self.pool.release(own.fresh)
            raise
        return SpanPlan(
            ending, own.tables, own.copies, own.fresh, own.pages, own.batch, own.rows, reads, None,
            requests=chosen, starts=packed.starts[chosen], last_tokens=last_tokens, n_tokens=len(packed.token_ids),
        )  # fmt: skip

    def _nothing(self, ending: Packed) -> AttentionPlan:
        """Return the plan of a step that completes no span."""
        nowhere = PagedBatch(ending.cu_seqlens, EMPTY, self.place(EMPTY), ending.cu_seqlens, self.page_tokens)
        return AttentionPlan(ending, {}, [], EMPTY, EMPTY, nowhere, (), ())

    def _reads(self, packed: Packed, pages: Int64s, batch: PagedBatch) -> tuple[tuple[Read, ...], Prepared | None]:
        return (), None  # Requests that complete no span choose as well: see `_keys_read`.

    def _keys_read(self, packed: Packed, tables: list[Int64s]) -> tuple[Read, ...]:
        """Return what choosing queries read: all keys of their requests. It is nothing if no query chooses."""
        choosing = Choosing.of(packed, self._n_chosen, self._span_tokens)
        if not len(choosing.requests):
            return ()
        own = [tables[i] for i in choosing.requests]
        pages = self.pool.addresses[np.concatenate(own)] // self._dtype.itemsize
        batch = PagedBatch(
            starts_of(packed.counts[choosing.requests]), packed.ends[choosing.requests], self.place(pages),
            starts_of(np.array([*map(len, own)])), self.page_tokens,
        )  # fmt: skip
        return (Read(batch, self.store.upload(choosing.tokens)),)

    def write(self, plan: AttentionPlan, index: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor | None) -> None:
        assert isinstance(plan, SpanPlan)
        self.specs[index].check_rows(plan.n_tokens, self._dtype, self.store.device, q_THD, k_TGD, v_TGD)
        if plan.rows:
            keys, _ = self._keys_values[index]
            self.kernels.write_rows_(keys, plan.rows[index], k_TGD[plan.last_tokens].flatten(0, 1))

    def commit(self, plan: AttentionPlan, kept: Int64s) -> None:
        assert isinstance(plan, SpanPlan)
        super().commit(plan, (plan.starts + kept[plan.requests]) // self._span_tokens - plan.packed.starts)

    # The methods below turn questions about tokens into questions about spans.

    def bytes_for(self, stretch: Stretch) -> Int64s:
        starts, ends, peaks = (at // self._span_tokens for at in (stretch.starts, stretch.ends, stretch.peaks))
        return super().bytes_for(replace(stretch, starts=starts, ends=ends, peaks=peaks))

    def bytes_to_drop(self, dropped: Dropped) -> int:
        return super().bytes_to_drop(self._in_spans(dropped))

    def plan_drop(self, dropped: Dropped) -> DropPlan:
        return super().plan_drop(self._in_spans(dropped))

    def _in_spans(self, dropped: Dropped) -> Dropped:
        """Return the same drop, counted in spans. Raises DropError unless whole spans are dropped."""
        span, start, end = self._span_tokens, dropped.start, dropped.end
        if start % span or end % span:
            raise DropError(
                f"tokens [{start}, {end}) are not whole spans of {span} tokens, which have one key each in the index; "
                f"give multiples of {span}",
                start=start, end=end,
            )  # fmt: skip
        return replace(
            dropped, start=start // span, end=end // span, length=dropped.length // span, peak=dropped.peak // span
        )

    def truncate(self, slot: int, to: int) -> None:
        super().truncate(slot, to // self._span_tokens)

    def live_rows(self, slot: int, length: int) -> LiveRows:
        return super().live_rows(slot, length // self._span_tokens)

    def _check_slot(self, slot: int, length: int, peak: int) -> None:
        super()._check_slot(slot, length // self._span_tokens, peak // self._span_tokens)


def _by_span(rotation: Rotation | None, span_tokens: int) -> Rotation | None:
    """Return the rotation by numbers of spans: a key is rotated by the position of the first token of its span."""
    if rotation is None:
        return None
    return replace(rotation, frequencies=tuple(f * span_tokens for f in rotation.frequencies))
