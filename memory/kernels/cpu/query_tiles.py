"""Scores and sums rows for several queries at once, with the bits that each query gets alone.

A unit is one query of one head. All units of a tile read the same rows, so what is loaded of a row serves four units.
Each sum is formed in the order of `softmax`: the elements of a product lane by lane, and the rows from the oldest on.
"""

from __future__ import annotations

import numpy as np

from hybridmem.memory.kernels.cpu.numbers import get
from hybridmem.memory.kernels.cpu.rules import subroutine
from hybridmem.memory.kernels.cpu.softmax import BLOCK
from hybridmem.memory.kernels.cpu.vector_math import prefetch
from hybridmem.memory.kernels.cpu.vectors import LANES, load, multiply_add, splat, store, store_totals, total

_ZERO = np.float32(0.0)
_0, _1, _2, _3, _4, _LANES, _LAST_LANE, _STRIDE = (np.uint64(i) for i in (0, 1, 2, 3, 4, LANES, LANES - 1, BLOCK))
_LINE, _AHEAD = (np.uint64(i) for i in (16, 8))
MANY_UNITS = 32
"""So many units take longer to compute than their rows take to load."""


@subroutine()
def widen_(source, rows, head_dim, target):
    """Copy rows of keys or values as float32, one after the other, which is how `score_tiles` reads them."""
    head_dim, o = np.uint64(head_dim), _0
    whole = head_dim & ~_LAST_LANE
    for r in range(len(rows)):
        row = np.uint64(rows[r])
        for e in range(_0, whole, _LANES):
            store(target, o + e, load(source, row + e))
        for e in range(whole, head_dim):
            target[o + e] = get(source, row + e)
        o += head_dim


@subroutine()
def score_tiles(q, keys, values, rows, n_units, head_dim, scale, scores):
    """Compute scores[u, r] = scale q[u] . keys[rows[r]] for all units, which read the same head of keys.

    For few units, the values of these rows, and the keys of rows a little later, are prefetched meanwhile.
    """
    n, n_units, head_dim = np.uint64(len(rows)), np.uint64(n_units), np.uint64(head_dim)
    n_fours, whole, tiled = n & ~_3, head_dim & ~_LAST_LANE, n_units & ~_3
    for r in range(_0, n_fours, _4):
        a, b = np.uint64(rows[r]), np.uint64(rows[r + _1])
        c, d = np.uint64(rows[r + _2]), np.uint64(rows[r + _3])
        if n_units < np.uint64(MANY_UNITS):
            for i in range(r, r + _4):
                ahead = np.uint64(rows[min(i + _AHEAD, n - _1)])
                for line in range(_0, head_dim, _LINE):
                    prefetch(values, np.uint64(rows[i]) + line)  # type: ignore[call-arg]
                    prefetch(keys, ahead + line)
        for u in range(_0, tiled, _4):
            o0, place = u * head_dim, u * _STRIDE + r
            o1, o2, o3 = o0 + head_dim, o0 + _2 * head_dim, o0 + _3 * head_dim
            x00 = x01 = x02 = x03 = x10 = x11 = x12 = x13 = splat(_ZERO)
            x20 = x21 = x22 = x23 = x30 = x31 = x32 = x33 = splat(_ZERO)
            for e in range(_0, whole, _LANES):
                ka, kb, kc, kd = load(keys, a + e), load(keys, b + e), load(keys, c + e), load(keys, d + e)
                query = load(q, o0 + e)
                x00, x01 = multiply_add(ka, query, x00), multiply_add(kb, query, x01)
                x02, x03 = multiply_add(kc, query, x02), multiply_add(kd, query, x03)
                query = load(q, o1 + e)
                x10, x11 = multiply_add(ka, query, x10), multiply_add(kb, query, x11)
                x12, x13 = multiply_add(kc, query, x12), multiply_add(kd, query, x13)
                query = load(q, o2 + e)
                x20, x21 = multiply_add(ka, query, x20), multiply_add(kb, query, x21)
                x22, x23 = multiply_add(kc, query, x22), multiply_add(kd, query, x23)
                query = load(q, o3 + e)
                x30, x31 = multiply_add(ka, query, x30), multiply_add(kb, query, x31)
                x32, x33 = multiply_add(kc, query, x32), multiply_add(kd, query, x33)
            store_totals(scores, place, x00, x01, x02, x03)
            store_totals(scores, place + _STRIDE, x10, x11, x12, x13)
            store_totals(scores, place + _2 * _STRIDE, x20, x21, x22, x23)
            store_totals(scores, place + _3 * _STRIDE, x30, x31, x32, x33)
        for u in range(tiled, n_units):
            o = u * head_dim
            x0 = x1 = x2 = x3 = splat(_ZERO)
            for e in range(_0, whole, _LANES):
                query = load(q, o + e)
                x0, x1 = multiply_add(load(keys, a + e), query, x0), multiply_add(load(keys, b + e), query, x1)
                x2, x3 = multiply_add(load(keys, c + e), query, x2), multiply_add(load(keys, d + e), query, x3)
            store_totals(scores, u * _STRIDE + r, x0, x1, x2, x3)
    for r in range(n_fours, n):
        row = np.uint64(rows[r])
        for u in range(n_units):
            o, x = u * head_dim, splat(_ZERO)
            for e in range(_0, whole, _LANES):
                x = multiply_add(load(keys, row + e), load(q, o + e), x)
            scores[u * _STRIDE + r] = total(x)
    for u in range(n_units):
        for r in range(n):
            place, row = u * _STRIDE + r, np.uint64(rows[r])
            x = scores[place]
            for e in range(whole, head_dim):  # These elements do not fill a vector.
                x += q[u * head_dim + e] * get(keys, row + e)
            scores[place] = scale * x


@subroutine()
def add_tiles_(out, values, rows, counts, n_units, n_heads, head_dim, weights):
    """Add values to the output: out[u] += sum of weights[u, r] values[rows[r]], in the order of rows.

    Unit u belongs to query u // n_heads, which sees the first counts[query] of these rows. Counts do not fall.
    """
    n_units, n_heads, head_dim = np.uint64(n_units), np.uint64(n_heads), np.uint64(head_dim)
    tiled = n_units & ~_3
    for u in range(_0, tiled, _4):
        n_all = np.uint64(max(0, counts[u // n_heads]))
        _add_tile_(out, values, rows, n_all, u, head_dim, weights)
        for i in range(u, u + _4):
            _add_unit_(out, values, rows, n_all, counts[i // n_heads], i, head_dim, weights)
    for u in range(tiled, n_units):
        _add_unit_(out, values, rows, _0, counts[u // n_heads], u, head_dim, weights)


@subroutine()
def _add_tile_(out, values, rows, n, u, head_dim, weights):
    """Add the first n rows to four units. Two vectors of each stay in registers from row to row."""
    o0, w0 = u * head_dim, u * _STRIDE
    o1, o2, o3 = o0 + head_dim, o0 + _2 * head_dim, o0 + _3 * head_dim
    w1, w2, w3 = w0 + _STRIDE, w0 + _2 * _STRIDE, w0 + _3 * _STRIDE
    whole = head_dim & ~_LAST_LANE
    paired = whole & ~_LANES
    for e in range(_0, paired, _2 * _LANES):
        f = e + _LANES
        x0, y0, x1, y1 = load(out, o0 + e), load(out, o0 + f), load(out, o1 + e), load(out, o1 + f)
        x2, y2, x3, y3 = load(out, o2 + e), load(out, o2 + f), load(out, o3 + e), load(out, o3 + f)
        for r in range(n):
            row = np.uint64(rows[r])
            v, z = load(values, row + e), load(values, row + f)
            weight = splat(weights[w0 + r])
            x0, y0 = multiply_add(weight, v, x0), multiply_add(weight, z, y0)
            weight = splat(weights[w1 + r])
            x1, y1 = multiply_add(weight, v, x1), multiply_add(weight, z, y1)
            weight = splat(weights[w2 + r])
            x2, y2 = multiply_add(weight, v, x2), multiply_add(weight, z, y2)
            weight = splat(weights[w3 + r])
            x3, y3 = multiply_add(weight, v, x3), multiply_add(weight, z, y3)
        store(out, o0 + e, x0)
        store(out, o0 + f, y0)
        store(out, o1 + e, x1)
        store(out, o1 + f, y1)
        store(out, o2 + e, x2)
        store(out, o2 + f, y2)
        store(out, o3 + e, x3)
        store(out, o3 + f, y3)
    for i in range(_4):
        _add_elements_(out, values, rows, _0, n, u + i, head_dim, paired, weights)


@subroutine()
def _add_unit_(out, values, rows, first, count, u, head_dim, weights):
    """Add rows [first, count) to one unit. Four vectors stay in registers from row to row."""
    if count <= np.int64(first):
        return
    n, o, w = np.uint64(count), u * head_dim, u * _STRIDE
    fourfold = head_dim & ~(_4 * _LANES - _1)
    for e in range(_0, fourfold, _4 * _LANES):
        f, g, h = e + _LANES, e + _2 * _LANES, e + _3 * _LANES
        x, y, z, v = load(out, o + e), load(out, o + f), load(out, o + g), load(out, o + h)
        for r in range(first, n):
            row, weight = np.uint64(rows[r]), splat(weights[w + r])
            x, y = multiply_add(weight, load(values, row + e), x), multiply_add(weight, load(values, row + f), y)
            z, v = multiply_add(weight, load(values, row + g), z), multiply_add(weight, load(values, row + h), v)
        store(out, o + e, x)
        store(out, o + f, y)
        store(out, o + g, z)
        store(out, o + h, v)
    _add_elements_(out, values, rows, first, n, u, head_dim, fourfold, weights)


@subroutine()
def _add_elements_(out, values, rows, first, n, u, head_dim, begin, weights):
    """Add elements [begin, head_dim) of rows [first, n) to one unit."""
    o, w, whole = u * head_dim, u * _STRIDE, head_dim & ~_LAST_LANE
    for e in range(begin, whole, _LANES):
        x = load(out, o + e)
        for r in range(first, n):
            x = multiply_add(splat(weights[w + r]), load(values, np.uint64(rows[r]) + e), x)
        store(out, o + e, x)
    for e in range(whole, head_dim):
        x = out[o + e]
        for r in range(first, n):
            x += weights[w + r] * get(values, np.uint64(rows[r]) + e)
        out[o + e] = x
