"""Defines the integer arrays of plans and tables, and the few operations on them that many files use."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Int64s: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

EMPTY: Int64s = np.zeros(0, np.int64)
"""An array of no integers, shared by all that have none."""


_NumberT = TypeVar("_NumberT", int, Int64s)


def ceil_div(n: _NumberT, divisor: int) -> _NumberT:
    """Divide and round up: one integer, or each of an array."""
    return -(-n // divisor)


def starts_of(counts: Int64s) -> Int64s:
    """Return (n + 1,) cumulative sums from 0: where each of n parts starts, and where the last ends."""
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    return starts


def ranges(starts: Int64s, ends: Int64s) -> Int64s:
    """Return the integers of all intervals [starts[i], ends[i]), one interval after the other."""
    counts = ends - starts
    if not np.count_nonzero(counts != 1):
        return np.array(starts)
    total = int(counts.sum())
    before = counts.cumsum() - counts
    shifts: Int64s = np.repeat(starts - before, counts)
    return shifts + np.arange(total)
