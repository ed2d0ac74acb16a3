"""Reads and writes the rings of tails in Triton kernels, and prepares the kernels' arguments for rings."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from hybridmem.memory.kernels.signature import Tail


def rings_of(tail: Tail, *, n_absent: int = 0) -> tuple[Any, ...]:
    """Return a tail's arguments: each ring with the blocks to read and to write, then what all rings share.
    There are `n_absent` more rings, which are never read, after the last one.
    """
    rings = [x for ring in zip(tail.flats, tail.sources, tail.targets, strict=True) for x in ring]
    return (*rings, *rings[:3] * n_absent, tail.ring_rows, tail.firsts, tail.counts, tail.folds)


def no_rings(instead: Tensor, n_rings: int) -> tuple[Any, ...]:
    """Return the arguments of `rings_of` if there is no tail: pointers that are never read."""
    return (*[instead] * (3 * n_rings), 1, instead, instead, instead)


@triton.jit
def keep_row(ring, targets, run, row, x, columns, n_columns, is_kept):
    """Round x to the ring's dtype, write it into the ring if it `is_kept`, and return it as float32."""
    rounded = x.to(ring.dtype.element_ty)
    tl.store(
        ring + tl.load(targets + run) + row * n_columns + columns,
        rounded,
        mask=columns < tl.where(is_kept, n_columns, 0),
    )
    return rounded.to(tl.float32)
