"""Defines the integer arrays of plans and tables, and the few operations on them that many files use."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Int64s: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

EMPTY: Int64s = np.zeros(0, np.int64)
"""An empty array of integers, which is shared wherever one is needed."""


NumberT = TypeVar("NumberT", int, Int64s)
"""An integer, or an array of them."""


def ceil_div(n: NumberT, divisor: int) -> NumberT:
    """Divide and round up. `n` is an integer or an array of them."""
    return -(-n // divisor)


def starts_of(counts: Int64s) -> Int64s:
    """Return (n + 1,) cumulative sums from 0: where each of n parts starts, and where the last ends."""
    starts = np.zeros(len(counts) + 1, np.int64)
    counts.cumsum(out=starts[1:])
    return starts


def ranges(starts: Int64s, ends: Int64s) -> Int64s:
    """Return the integers of the intervals [starts[i], ends[i]), one interval after the other."""
    if len(starts) == 1:
        one: Int64s = np.arange(starts[0], ends[0], dtype=np.int64)
        return one
    counts = ends - starts
    if not np.count_nonzero(counts != 1):
        return np.array(starts)
    behind = counts.cumsum()
    shifts: Int64s = (starts - behind + counts).repeat(counts)
    return shifts + np.arange(len(shifts))
