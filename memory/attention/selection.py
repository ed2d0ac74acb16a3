"""Selects the blocks that queries read, while every row is kept (Tang et al. 2024, "Quest").

A block is a page, or a group of rows that were quantized together. In addition to its rows it holds the least and the
greatest of its keys, element by element. These bounds are computed from exact keys when the block becomes full, and
read only while it is full. So they depend only on the block's rows, and a rollback has nothing to undo: a page that is
no longer full is read whole until it is full again, and then gets new bounds. A fork shares bounds as it shares rows.

Which blocks a query reads depends on its position and on the rows up to it. If groups are quantized, every query also
reads all exact rows, in addition to the policy's budget, as with policies that evict.

    position 0 ............................................................ query
     blocks of sinks | old blocks, the best for each head of keys | recent blocks
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s, ceil_div, ranges, starts_of
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.eviction import Quest
from hybridmem.memory.interface import Packed
from hybridmem.memory.kernels import PageChoice, PagedBatch, Prepared
from hybridmem.memory.sequences.reads import Body, Read

Place = Callable[[Int64s], Prepared]
"""A function that uploads an array of a step's plan for the kernels."""


class Selection:
    """Plans which blocks the queries of a step read: a `memory.sequences.reads.Selects`.

    Args:
        policy: the policy of all layers of the cache.
        block_tokens: how many rows a block has.
        remedy: for the error message, what the user may also change if the policy's budget is too small.
    Raises SpecError if the policy's budget is smaller than the blocks that are always read.
    """

    def __init__(self, policy: Quest, block_tokens: int, store: Store, *remedy: str) -> None:
        self.policy = policy
        self.label = policy.label
        self._block_tokens = block_tokens
        self._n_read = policy.budget_pages(block_tokens, *remedy)
        self._store = store

    def bound_shapes(self, n_kv_heads: int, head_dim: int) -> list[tuple[int, ...]]:
        return [(n_kv_heads, head_dim)] * 2

    def bounds(self, k_BGRD: Tensor) -> list[Tensor]:
        return [k_BGRD.amin(2), k_BGRD.amax(2)]

    def pages_read(self, packed: Packed, batch: PagedBatch, pages: Int64s, place: Place) -> tuple[Read, ...]:
        chosen, others, tokens = self._divide(packed, ceil_div(packed.ends, self._block_tokens))
        if not len(tokens):
            return (Read(batch),)
        n_rows = packed.positions[tokens] + 1
        begins = np.repeat(batch.cu_pages[:-1][chosen], packed.counts[chosen])
        n_pages = ceil_div(n_rows, self._block_tokens)
        choice = self._choice(place(pages[ranges(begins, begins + n_pages)]), n_pages, n_rows)
        lengths = n_rows - (n_pages - np.diff(choice.cu_chosen)) * self._block_tokens
        best = PagedBatch(np.arange(len(tokens) + 1), lengths, choice.pages, choice.cu_chosen, self._block_tokens)
        rest = [Read(part_of(batch, pages, others, place), self._tokens_of(packed, others))] if len(others) else []
        return (*rest, Read(best, self._store.upload(tokens), choice))

    def groups_read(
        self, packed: Packed, batch: PagedBatch, pages: Int64s, place: Place, body: Body, itemsize: int
    ) -> tuple[Read, ...]:
        """Return what the queries of a step read of quantised groups, and of the exact pages after them."""
        n_groups = np.diff(body.cu_blocks)
        chosen, others, tokens = self._divide(packed, n_groups)
        if not len(tokens):
            return (Read(batch, body=body),)
        request = np.repeat(chosen, packed.counts[chosen])
        begins, n = body.cu_blocks[:-1][request], n_groups[request]
        blocks = body.blocks.host[ranges(begins, begins + n)] // itemsize
        choice = self._choice(self._store.upload(blocks), n, packed.positions[tokens] + 1)
        # The kernel chooses the blocks when it runs. The plan needs only their number.
        best = Body(body.blocks, choice.cu_chosen, np.full(len(tokens), self._n_read * self._block_tokens))
        exact = self._exact_up_to(batch, pages, request, tokens, place)
        reads = [Read(exact, self._store.upload(tokens), choice, best)]
        rest_blocks = body.blocks.host[ranges(body.cu_blocks[:-1][others], body.cu_blocks[1:][others])]
        if len(others):
            rest = Body(self._store.place(rest_blocks), starts_of(n_groups[others]), body.lengths[others])
            reads.insert(0, Read(part_of(batch, pages, others, place), self._tokens_of(packed, others), body=rest))
        return tuple(reads)

    def _divide(self, packed: Packed, n_blocks: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Return requests whose queries choose among `n_blocks`, the others, and the packed tokens of the former."""
        selects = (packed.counts <= self.policy.select_up_to) & (n_blocks > self._n_read)
        chosen = selects.nonzero()[0]
        return chosen, (~selects).nonzero()[0], ranges(packed.cu_seqlens[:-1][chosen], packed.cu_seqlens[1:][chosen])

    def _tokens_of(self, packed: Packed, requests: Int64s) -> Tensor:
        return self._store.upload(ranges(packed.cu_seqlens[:-1][requests], packed.cu_seqlens[1:][requests]))

    def _choice(self, blocks: Prepared, n_blocks: Int64s, n_rows: Int64s) -> PageChoice:
        """Return the candidate blocks of queries that see `n_rows` rows. Each query chooses among `n_blocks` blocks."""
        n_last = np.maximum(0, n_blocks - np.maximum(0, n_rows - self.policy.recent) // self._block_tokens)
        cu_chosen = starts_of(np.minimum(n_blocks, self._n_read))
        return PageChoice(
            blocks, starts_of(n_blocks), ceil_div(self.policy.sinks, self._block_tokens), n_last, cu_chosen
        )

    def _exact_up_to(
        self, batch: PagedBatch, pages: Int64s, request: Int64s, tokens: Int64s, place: Place
    ) -> PagedBatch:
        """Return a batch of the exact rows that each of these tokens sees. `request` has the request of each token."""
        lengths = batch.kv_lengths[request] - (batch.cu_seqlens[1:][request] - 1 - tokens)
        begins, n_pages = batch.cu_pages[:-1][request], ceil_div(lengths, batch.page_tokens)
        placed = place(pages[ranges(begins, begins + n_pages)])
        return PagedBatch(np.arange(len(tokens) + 1), lengths, placed, starts_of(n_pages), batch.page_tokens)


def part_of(batch: PagedBatch, pages: Int64s, requests: Int64s, place: Place) -> PagedBatch:
    """Return the part of a step's batch that belongs to these requests."""
    placed = place(pages[ranges(batch.cu_pages[:-1][requests], batch.cu_pages[1:][requests])])
    cu_seqlens, cu_pages = (starts_of(np.diff(x)[requests]) for x in (batch.cu_seqlens, batch.cu_pages))
    return PagedBatch(cu_seqlens, batch.kv_lengths[requests], placed, cu_pages, batch.page_tokens)
