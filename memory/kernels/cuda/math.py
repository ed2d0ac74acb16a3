"""Functions of numbers in registers. All are float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)), to rounding also where it is tiny: log1p(e) = log(u) e / (u - 1) with u = 1 + e as it was rounded (Higham 2002)."""
    e = tl.exp(-tl.abs(x))
    u = 1.0 + e
    rest = tl.where(u == 1.0, e, tl.log(u) * e / tl.where(u == 1.0, 1.0, u - 1.0))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def silu(x):  # type: ignore[no-untyped-def]
    return x / (1.0 + tl.exp(-x))


@triton.jit
def bound(offset, n):  # type: ignore[no-untyped-def]
    """n, or 0 where an offset says that there is nothing: what indices are compared with. (The interpreter cannot join a block of bools
    and a single one.)"""
    return tl.where(offset < 0, 0, n)
