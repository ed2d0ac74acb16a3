"""Computes the parts of an online softmax over tiles of keys (Milakov & Gimelshein 2018), in Triton.
A tile has M queries and N rows. Heads are in two parts, of D0 and D1 channels.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

from hybridmem.memory.kernels.cuda.launch import dot

LOG2_E = tl.constexpr(math.log2(math.e))
"""Scores are in units of log2, because the hardware has exp2."""


@triton.jit
def load_rows(flat, at, inside, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    """Load rows of D channels from offsets `at` (N,) on: (N, D0) and (N, D1). If D1 is 0, both are the first part.

    Rows that are not `inside` are zeros.
    """
    d = tl.arange(0, D0)
    mask = inside[:, None] & (d < D)[None, :] if D0 > D else inside[:, None]
    x0 = tl.load(flat + at[:, None] + d[None, :], mask=mask, other=0.0)
    x1 = x0
    if D1 > 0:
        e = D0 + tl.arange(0, D1)
        x1 = tl.load(flat + at[:, None] + e[None, :], mask=inside[:, None] & (e < D)[None, :], other=0.0)
    return x0, x1


@triton.jit
def store_rows(flat, at, x0, x1, inside, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr):
    d = tl.arange(0, D0)
    tl.store(flat + at[:, None] + d[None, :], x0.to(flat.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])
    if D1 > 0:
        e = D0 + tl.arange(0, D1)
        tl.store(flat + at[:, None] + e[None, :], x1.to(flat.dtype.element_ty), mask=inside[:, None] & (e < D)[None, :])


@triton.jit
def score(q0, q1, k0, k1, scale, softcap, D1: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Compute scores (M, N) float32: scale q . k, with the softcap."""
    s = dot(q0, tl.trans(k0), tl.zeros([q0.shape[0], k0.shape[0]], tl.float32))
    if D1 > 0:
        s = dot(q1, tl.trans(k1), s)
    s *= scale
    if HAS_SOFTCAP:
        e = tl.exp2(tl.abs(s) * (-2.0 * LOG2_E / softcap))
        capped = softcap * (1.0 - e) / (1.0 + e)  # This is softcap tanh(|s| / softcap).
        s = tl.where(s < 0.0, -capped, capped)
    return s


@triton.jit
def load_bias(bias, at, newest, r, is_own, n_distances):
    """Load the bias (M, N) of rows `r` (N,), by their distance from the last row that each query sees (M,).

    The biases of a query and head begin at element `at` (M,).
    """
    distance = tl.minimum(tl.maximum(newest[:, None] - r[None, :], 0), n_distances - 1)
    return tl.load(bias + at[:, None] + distance, mask=is_own[:, None], other=0.0) * LOG2_E


@triton.jit
def hide(s, newest, r, end, window, HAS_WINDOW: tl.constexpr):
    """Set the scores of rows that a query does not see to -inf."""
    seen = (r[None, :] <= newest[:, None]) & (r < end)[None, :]
    if HAS_WINDOW:
        seen &= r[None, :] > newest[:, None] - window
    return tl.where(seen, s, float("-inf"))


@triton.jit
def add(s, v0, v1, acc0, acc1, highest, total, D1: tl.constexpr):
    """Add N more rows to the results of queries. `acc` is relative to `highest`, and not yet divided by `total`."""
    higher = tl.maximum(highest, tl.max(s, 1))
    # The highest score is -inf for a query that has seen no row yet.
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(highest - shift)
    weights = tl.exp2(s - shift[:, None])
    total = total * fade + tl.sum(weights, 1)
    weights = weights.to(v0.dtype)
    acc0 = dot(weights, v0, acc0 * fade[:, None])
    if D1 > 0:
        acc1 = dot(weights, v1, acc1 * fade[:, None])
    return acc0, acc1, higher, total
