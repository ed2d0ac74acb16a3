"""Keeps a small key of an index for each token, and lets queries attend to the rows that they choose by these keys.

DeepSeek-AI 2025, "DeepSeek-V3.2". The keys of an index are rows like any others, in pages of their own size: a page
table for each sequence, so a fork shares them and a rollback shortens them. What is chosen is not kept: it follows from
the query and the keys up to it. So attention and index never have to agree about more than the length of a sequence.

    position 0 ............................................................ query
     index:      every key is scored, which are a small part of a row's bytes
     attention:  n_chosen rows are read, one by one, wherever they are

Spans of several rows may have one key, and are chosen together (`memory.attention.span_keys`). A query always reads the
rows after the last whole span before it.

A request that has at most `n_chosen` rows, not counting those after its last whole span, reads them all. Then nothing
is scored, and rows are read as by dense attention. That is decided for each request alone, so that its bits do not
depend on others.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hybridmem.memory.attention.selection import part_of
from hybridmem.memory.attention_cache import AttentionCache
from hybridmem.memory.blocks.arrays import Int64s, starts_of
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.errors import StepError
from hybridmem.memory.interface import Packed
from hybridmem.memory.kernels import PagedBatch, Prepared, Scoring, as_tensor
from hybridmem.memory.sequences.choosing import Choosing, ChosenRows, Spread
from hybridmem.memory.sequences.pages import PageGrid
from hybridmem.memory.sequences.reads import AttentionPlan, Read, attend_each
from hybridmem.memory.specs import AttentionSpec, IndexSpec


class IndexKeys(AttentionCache):
    """Keeps the keys of all indexes of a model that choose the same number of rows: a `memory.interface.LayerMemory`.

    Args:
        specs: the specs of the indexes, in the order in which `choose_rows` numbers them.
    """

    def __init__(self, specs: list[IndexSpec], dtype: torch.dtype, grid: PageGrid, store: Store, name: str) -> None:
        # For a cache of pages, an index is an attention that keeps only keys.
        super().__init__(specs, dtype, grid, store, name=name)  # type: ignore[arg-type]
        self._n_chosen, self._span_tokens = specs[0].n_chosen, specs[0].span_tokens

    def _reads(self, packed: Packed, pages: Int64s, batch: PagedBatch) -> tuple[tuple[Read, ...], Prepared | None]:
        """Return what choosing queries read: all keys of their requests. It is nothing if no query chooses."""
        choosing = Choosing.of(packed, self._n_chosen, self._span_tokens)
        if not len(choosing.requests):
            return (), None
        return (Read(part_of(batch, pages, choosing.requests, self.place), self.store.upload(choosing.tokens)),), None

    def begin(self, plan: AttentionPlan) -> None:
        self.copy_shared(plan)

    def choose_rows(
        self, plan: AttentionPlan, index: int, q_THD: Tensor, k_T1D: Tensor, weights_TH: Tensor, scale: float
    ) -> ChosenRows:
        """Write the step's keys. Return the rows that each query chooses."""
        self.write(plan, index, q_THD, k_T1D, None)
        if weights_TH.shape != q_THD.shape[:2] or weights_TH.dtype != torch.float32:
            found = f"{tuple(weights_TH.shape)} of {weights_TH.dtype}"
            raise StepError(
                f"weights have the shape {found}; give {tuple(q_THD.shape[:2])} of float32: one for each head"
            )
        if not plan.reads:
            return ChosenRows(self._n_chosen, None, self._span_tokens)
        batch, tokens = plan.reads[0][:2]
        keys, _ = self._keys_values[index]
        found_C = self.kernels.choose_rows(
            q_THD[tokens], weights_TH[tokens], keys, batch, self._n_chosen // self._span_tokens, scale,
            self._span_tokens,
        )  # fmt: skip
        return ChosenRows(self._n_chosen, found_C, self._span_tokens)


class IndexedAttention(AttentionCache):
    """Keeps rows of attention layers whose queries read what an index chose: a `memory.interface.LayerMemory`.

    Args:
        specs: the attention specs, in the order in which `attend_chosen` numbers them; all have the same `n_chosen`
            and `span_tokens`.
    """

    def __init__(self, specs: list[AttentionSpec], dtype: torch.dtype, grid: PageGrid, store: Store, name: str) -> None:
        super().__init__(specs, dtype, grid, store, name=name)
        assert specs[0].n_chosen is not None
        self._n_chosen, self._span_tokens = specs[0].n_chosen, specs[0].span_tokens

    def _reads(self, packed: Packed, pages: Int64s, batch: PagedBatch) -> tuple[tuple[Read, ...], Prepared | None]:
        """Return what queries without a choice read, and what choosing queries read: a page for each of their pieces.

        A piece is one row, or a part of a span. The choice decides where the pieces are. Until then, each page has the
        place of the request's first page.
        """
        choosing = Choosing.of(packed, self._n_chosen, self._span_tokens)
        if not len(choosing.requests):
            return (Read(batch),), None
        unit, n_rows, cu_pieces, pieces = 1, choosing.n_keys, starts_of(choosing.n_keys), None
        if self._span_tokens > 1:
            unit, n_rows, cu_pieces, *spread = Spread.of(choosing, self._span_tokens, self.page_tokens)
            pieces = self.store.upload(spread[0]), self.store.upload(spread[1])
        first = np.repeat(batch.cu_pages[:-1][choosing.requests], packed.counts[choosing.requests])
        first_pages = self.place(np.repeat(first, np.diff(cu_pieces)))
        best = PagedBatch(np.arange(len(n_rows) + 1), n_rows, first_pages, cu_pieces, page_tokens=unit)
        reads = [Read(best, self.store.upload(choosing.tokens), pieces=pieces)]
        if len(choosing.others):
            rest = part_of(batch, pages, choosing.others, self.place)
            reads.insert(0, Read(rest, self.store.upload(choosing.other_tokens)))
        return tuple(reads), None

    def attend_chosen(
        self, plan: AttentionPlan, index: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor | None, scoring: Scoring,
        chosen: ChosenRows,
    ) -> Tensor:  # fmt: skip
        """Write the step's keys and values. Return attention over the chosen rows: (T, H, D or value_dim)."""
        if scoring.bias_HL is not None:
            raise StepError("a bias by distance needs every row; leave it out where an index chooses rows")
        best, own = plan.reads[-1], (self._n_chosen, self._span_tokens)
        found = chosen.n_chosen, chosen.span_tokens
        if found != own or (chosen.positions is None) != (best.tokens is None):
            raise StepError(
                f"these rows were chosen by an index of {_rows(*found)}, or in another step; this attention "
                f"reads {_rows(*own)}, chosen in its own step"
            )
        self.write(plan, index, q_THD, k_TGD, v_TGD)
        if chosen.positions is None:
            return self.read(best.batch, index, q_THD, scoring)
        at = best._replace(batch=self._at(plan, index, best, chosen.positions))
        return attend_each(
            (*plan.reads[:-1], at), q_THD, lambda read, q_QHD: self.read(read.batch, index, q_QHD, scoring)
        )

    def _at(self, plan: AttentionPlan, index: int, best: Read, chosen_C: Tensor) -> PagedBatch:
        """Return a batch with the place of each chosen piece for each head of keys. Heads are a page's rows apart."""
        n_heads, size = self.specs[index].kv_shape
        positions_P = chosen_C
        if best.pieces is not None:
            spans, offsets = best.pieces
            # Rows after the last whole span are given by their offsets alone, so 0 is added for their span.
            positions_P = offsets + F.pad(chosen_C * self._span_tokens, (0, 1))[spans]
        page_P = as_tensor(best.batch.pages) + positions_P // self.page_tokens
        rows_P = as_tensor(plan.batch.pages)[page_P] + positions_P % self.page_tokens * size
        if n_heads == 1:
            return best.batch.at(self.kernels.prepare(rows_P))
        apart = (self.page_tokens - best.batch.page_tokens) * size
        apart_G = torch.arange(n_heads, device=rows_P.device) * apart
        return best.batch.at(self.kernels.prepare(rows_P + apart_G[:, None]))


def _rows(n_chosen: int, span_tokens: int) -> str:
    return f"{n_chosen} rows" + (f" in spans of {span_tokens}" if span_tokens > 1 else "")
