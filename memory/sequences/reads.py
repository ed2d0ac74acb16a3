"""Describes which pages and quantized blocks the queries of a step read: all, or those that a selection chose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.staging import Placed
from hybridmem.memory.interface import Packed
from hybridmem.memory.kernels import PageChoice, PagedBatch, Prepared


class Body(NamedTuple):
    """Names the quantized blocks before the pages of a step, in the fields of `FoldedRows`."""

    blocks: Placed
    cu_blocks: Int64s
    lengths: Int64s


class Read(NamedTuple):
    """Says what some queries of a step read.

    Attributes:
        tokens: the packed indices of the queries (Q,). None: all queries of the step.
        choice: the blocks of the body, or else the pages, from which each query chooses. None: the queries read all.
        pieces: `spans` and `offsets` of a `memory.sequences.choosing.Spread`, if an index chooses spans of rows.
    """

    batch: PagedBatch
    tokens: Tensor | None = None
    choice: PageChoice | None = None
    body: Body | None = None
    pieces: tuple[Tensor, Tensor] | None = None


class Selects(Protocol):
    """Declares how the pages that queries read are chosen by bounds of keys: see `memory.attention.selection`."""

    label: str

    def bound_shapes(self, n_kv_heads: int, head_dim: int) -> list[tuple[int, ...]]:
        """Return the shapes of the bounds that a block stores in addition to its rows."""
        ...

    def bounds(self, k_BGRD: Tensor) -> list[Tensor]:
        """Compute the bounds of the keys of full blocks."""
        ...

    def pages_read(
        self, packed: Packed, batch: PagedBatch, pages: Int64s, place: Callable[[Int64s], Prepared]
    ) -> tuple[Read, ...]:
        """Return what the queries of a step read of its pages, whose element offsets are `pages`."""
        ...


@dataclass(eq=False)
class AttentionPlan:
    """Holds the pages that are allocated for a step, and says where its rows are read and written.

    Attributes:
        tables: request -> the page table that its slot gets if all tokens are kept. Requests whose table does not
            change are left out.
        copies: (request, old page, new page) for each last page that is shared and will be appended to.
        fresh: the new pages that were allocated for this plan, copies included.
        pages: the element offset of each page that the step reads, request after request.
        batch: the pages, lengths and queries, for the attention kernels.
        rows: for each attention, (T * G,) the element offset of each new token's row for each key/value head.
        reads: what the queries read.
        full: the element offsets (F,) of the pages that the step fills, if a selection wants their bounds.
    """

    packed: Packed
    tables: dict[int, Int64s]
    copies: list[tuple[int, int, int]]
    fresh: Int64s
    pages: Int64s
    batch: PagedBatch
    rows: tuple[Prepared, ...]
    reads: tuple[Read, ...]
    full: Prepared | None = None

    @property
    def can_capture(self) -> bool:
        # Where queries choose pages or rows, the host counts how many.
        return self.full is None and all(read.tokens is None for read in self.reads)


def attend_each(reads: tuple[Read, ...], q_THD: Tensor, attend: Callable[[Read, Tensor], Tensor]) -> Tensor:
    """Let the queries of each read attend to its pages and blocks, and return (T, H, D or value_dim)."""
    if reads[0].tokens is None:
        return attend(reads[0], q_THD)
    found = [attend(read, q_THD[read.tokens]) for read in reads]
    out_THD = q_THD.new_empty(*q_THD.shape[:2], found[0].shape[-1])
    for read, out_QHD in zip(reads, found, strict=True):
        out_THD[read.tokens] = out_QHD
    return out_THD
