"""Computes functions of float32 numbers in registers, and the numbering of chunks of segments, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from hybridmem.memory.blocks.arrays import Int64s


@triton.jit
def softplus(x):
    """Compute log(1 + exp(x)), exact to rounding even for tiny results.
    It is log1p(e) = log(u) e / (u - 1) with the rounded u = 1 + e (Higham 2002).
    """
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    rest = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def summable(log_decay):
    """Return log decays in float64, with -10000 in place of lower ones, so that differences of sums are numbers.

    exp(-10000) is 0, like exp(-inf).
    """
    x = log_decay.to(tl.float64)
    return tl.where(x < -10000.0, -10000.0, x)  # A NaN stays a NaN.


@triton.jit
def bound(offset, n):
    """Return n, or 0 for an offset of -1: the bound of indices in a mask.
    This is no mask by itself, because the interpreter cannot combine a block of bools with a single bool.
    """
    return tl.where(offset < 0, 0, n)


def count_pieces(cu_rows: Int64s, size: int, spare: int) -> int:
    """Return how many numbers `first_piece` gives to the pieces of all segments; cu_rows (S + 1,) is on the host."""
    return int(cu_rows[-1] - cu_rows[0]) // size + spare * (len(cu_rows) - 1)


@triton.jit
def first_piece(run, cu_rows, size, spare):
    """Return the number of a segment's first piece of `size` rows, if the pieces of all segments are numbered.

    A segment may have as many pieces as its rows fill, and `spare` more. A segment of n rows gets at least n // size +
    spare numbers, and all segments together get `count_pieces`. cu_rows is (S + 1,).
    """
    return ((tl.load(cu_rows + run) - tl.load(cu_rows)) // size + spare * run).to(tl.int32)


@triton.jit
def run_of(piece, cu_rows, n_runs, size, spare):
    """Return the segment to which a piece belongs, by binary search over `first_piece`.

    So the host need not upload an array that can be computed from cu_rows.
    """
    low, high = tl.zeros((), tl.int32), tl.zeros((), tl.int32) + n_runs - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_before = first_piece(middle, cu_rows, size, spare) <= piece
        low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle - 1)
    return low
