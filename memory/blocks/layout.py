"""Defines block layouts: how the blocks of a pool are divided into tensors, and where tokens' rows are in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridmem.memory.blocks.arrays import ceil_div

ALIGNMENT_BYTES = 64
"""Every block, and every field of a block, starts at a multiple of this number, the size of a cache line.

It is a multiple of the size of any element.
"""


def aligned_bytes(n_bytes: int) -> int:
    """Round up to a multiple of ALIGNMENT_BYTES."""
    return ceil_div(n_bytes, ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class Field:
    """Describes one tensor, which has the same place in every block of a pool.

    Attributes:
        row_axis: the axis of `shape` that counts rows. None: the tensor describes all rows of a block at once.
    """

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    row_axis: int | None = None

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def end_bytes(self) -> int:
        """Return the offset of the first byte after the field."""
        return self.offset_bytes + self.n_elements * self.dtype.itemsize


@dataclass(frozen=True)
class BlockLayout:
    """Says how a block is divided into fields. `padding_bytes` is how many bytes alignment adds to the fields' sizes.

    Attributes:
        shares: how many bytes of a block belong to each of the model's layers that share this layer memory, in their
            order. Their sum is the whole block.
    """

    fields: tuple[Field, ...]
    block_bytes: int
    shares: tuple[int, ...] = ()

    @staticmethod
    def of(tensors: Seq[tuple[tuple[int, ...], torch.dtype]], row_axes: Seq[int | None] | None = None) -> BlockLayout:
        """Lay out tensors, given as (shape, dtype), one after the other.

        `row_axes` gives the `Field.row_axis` of each tensor.
        """
        fields, offset = list[Field](), 0
        for (shape, dtype), row_axis in zip(tensors, row_axes or [None] * len(tensors), strict=True):
            fields.append(Field(offset, shape, dtype, row_axis))
            offset = aligned_bytes(fields[-1].end_bytes)
        return BlockLayout(tuple(fields), offset)

    def shared_by(self, n_fields: Seq[int]) -> BlockLayout:
        """Return the same layout, divided: the first layer has n_fields[0] fields, the next n_fields[1], and so on."""
        bounds = [*(f.offset_bytes for f in self.fields), self.block_bytes]
        shares = [
            bounds[end] - bounds[end - n] for n, end in zip(n_fields, itertools.accumulate(n_fields), strict=True)
        ]
        return replace(self, shares=tuple(shares))

    @property
    def padding_bytes(self) -> int:
        return self.block_bytes - sum(f.end_bytes - f.offset_bytes for f in self.fields)

    def blank_(self, blocks: Tensor, is_live: NDArray[np.bool_]) -> None:
        """Zero every byte of blocks (n, block_bytes) that holds no live row. `is_live` is (n, rows per block).

        A field that describes all rows of a block at once is zeroed unless all rows are live. Cost: O(blocks with a row
        to clear).
        """
        next_offsets = [*(field.offset_bytes for field in self.fields[1:]), self.block_bytes]
        for field, next_bytes in zip(self.fields, next_offsets, strict=True):
            blocks[:, field.end_bytes : next_bytes] = 0
        for i in np.flatnonzero(~is_live.all(1)).tolist():
            # Stretches of dead rows begin and end at these bounds, alternately.
            bounds = np.flatnonzero(np.diff(is_live[i], prepend=True, append=True))
            stretches = list(zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True))
            for field in self.fields:
                own = blocks[i, field.offset_bytes : field.end_bytes]
                if field.row_axis is None:
                    own.zero_()
                    continue
                rows = own.view(math.prod(field.shape[: field.row_axis]), is_live.shape[1], -1)
                for begin, end in stretches:
                    rows[:, begin:end] = 0
