"""Functions of numbers in registers, float32, and of indices."""

from __future__ import annotations

import triton
import triton.language as tl

from memory.blocks.arrays import Int64s


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)), to rounding also where it is tiny: log1p(e) = log(u) e / (u - 1) with u = 1 + e as it was
    rounded (Higham 2002).
    """
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    rest = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]
    return x / (1.0 + tl.exp(-x))


@triton.jit
def summable(log_decay):  # type: ignore[no-untyped-def]
    """float64, and finite where all is forgotten (-inf): what is left of anything after exp(-10000) is 0, and sums have
    differences.
    """
    x = log_decay.to(tl.float64)
    return tl.where(x < -10000.0, -10000.0, x)  # NaN stays


@triton.jit
def bound(offset, n):  # type: ignore[no-untyped-def]
    """n, or 0 where an offset says that there is nothing: what indices are compared with. (The interpreter cannot join
    a block of bools and a single one.)"""
    return tl.where(offset < 0, 0, n)


def count_pieces(cu_rows: Int64s, size: int, spare: int) -> int:
    """Numbers that `first_piece` gives to all runs; (S + 1,) cu_rows on the host."""
    return int(cu_rows[-1] - cu_rows[0]) // size + spare * (len(cu_rows) - 1)


@triton.jit
def first_piece(run, cu_rows, size, spare):  # type: ignore[no-untyped-def]
    """Where pieces of `size` rows of a run are numbered from, if each run may have as many as fill it and `spare` more.
    (S + 1,) cu_rows.

    A run of n rows gets n // size + spare numbers at least, and all runs `count_pieces`.
    """
    return ((tl.load(cu_rows + run) - tl.load(cu_rows)) // size + spare * run).to(tl.int32)


@triton.jit
def run_of(piece, cu_rows, n_runs, size, spare):  # type: ignore[no-untyped-def]
    """The run that a number of `first_piece` belongs to, by halving: so the host need not say, nor upload, what cu_rows
    says already.
    """
    low, high = tl.zeros((), tl.int32), tl.zeros((), tl.int32) + n_runs - 1
    while low < high:
        middle = (low + high + 1) // 2
        is_before = first_piece(middle, cu_rows, size, spare) <= piece
        low, high = tl.where(is_before, middle, low), tl.where(is_before, high, middle - 1)
    return low
