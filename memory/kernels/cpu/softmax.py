"""Computes an online softmax over blocks of rows (Milakov & Gimelshein 2018): the parts of attention for one query.

`heads` are the query's heads that a task computes. `scores` holds BLOCK scores for each head, and `out` the weighted
sum of values so far.
"""

from __future__ import annotations

import numpy as np

from hybridmem.memory.kernels.cpu.numbers import get
from hybridmem.memory.kernels.cpu.rows import copy_
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, REDUCING, subroutine
from hybridmem.memory.kernels.cpu.vector_math import exp_f32, prefetch
from hybridmem.memory.kernels.cpu.vectors import LANES, load, multiply_add, splat, store, store_totals, total

BLOCK = 64
"""How many rows have their scores in memory at once. For each head these scores take 256 bytes."""

_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
_0, _1, _2, _3, _4, _STRIDE, _LINE, _AHEAD, _LANES, _LAST_LANE = (
    np.uint64(i) for i in (0, 1, 2, 3, 4, BLOCK, 16, 8, LANES, LANES - 1)
)


@subroutine(ELEMENTWISE)
def start_(out, highest, total, sinks):
    """Start without any row, or with each head's sink, which is a row without a value."""
    out[:] = _ZERO
    if len(sinks) > 0:
        copy_(highest, sinks)
        for h in range(len(total)):
            total[h] = _ZERO if highest[h] == -np.inf else _ONE
    else:
        highest[:] = -np.inf
        total[:] = _ZERO


@subroutine()
def find_rows(table, begin, page_tokens, head, head_dim, rows):
    """Set rows[i] to the element offset of row begin + i of a head, by the page table."""
    page, slot = begin // page_tokens, begin % page_tokens
    row = table[page] + (head * page_tokens + slot) * head_dim
    for i in range(len(rows)):
        if slot == page_tokens:
            page, slot = page + 1, 0
            row = table[page] + head * page_tokens * head_dim
        rows[i] = row
        slot += 1
        row += head_dim


@subroutine()
def score_rows(q, keys, values, rows, n_groups, head_dim, apart, scale, scores, prefetches):
    """Compute scores[h, r] = scale q[h] . keys[rows[r]] for all query heads.

    The rows of consecutive key heads are `apart` elements apart. Four rows share what is loaded of a query, and the
    sums of a row always have the same order. `prefetches` says whether the values of these rows, and the keys of rows a
    little later, are prefetched meanwhile.
    """
    head_dim, n_groups, apart, n = np.uint64(head_dim), np.uint64(n_groups), np.uint64(apart), np.uint64(len(rows))
    n_kv_heads = np.uint64(len(q)) // (head_dim * n_groups)
    n_fours = n & ~_3
    for r in range(_0, n_fours, _4):
        for g in range(n_kv_heads):
            at = g * apart
            a, b = np.uint64(rows[r]) + at, np.uint64(rows[r + _1]) + at
            c, d = np.uint64(rows[r + _2]) + at, np.uint64(rows[r + _3]) + at
            if prefetches:
                for i in range(r, r + _4):
                    _prefetch_row(
                        keys, values, np.uint64(rows[i]) + at, np.uint64(rows[min(i + _AHEAD, n - _1)]) + at, head_dim
                    )
            for h in range(g * n_groups, (g + _1) * n_groups):
                o, place = h * head_dim, h * _STRIDE + r
                x0 = x1 = x2 = x3 = splat(_ZERO)
                for e in range(_0, head_dim & ~_LAST_LANE, _LANES):
                    query = load(q, o + e)
                    x0, x1 = multiply_add(load(keys, a + e), query, x0), multiply_add(load(keys, b + e), query, x1)
                    x2, x3 = multiply_add(load(keys, c + e), query, x2), multiply_add(load(keys, d + e), query, x3)
                store_totals(scores, place, x0, x1, x2, x3)
                for i in range(_4):
                    scores[place + i] = scale * _add_rest(
                        scores[place + i], q, o, keys, np.uint64(rows[r + i]) + at, head_dim
                    )
    for r in range(n_fours, n):
        for g in range(n_kv_heads):
            row = np.uint64(rows[r]) + g * apart
            if prefetches:
                _prefetch_row(keys, values, row, row, head_dim)
            for h in range(g * n_groups, (g + _1) * n_groups):
                o, x = h * head_dim, splat(_ZERO)
                for e in range(_0, head_dim & ~_LAST_LANE, _LANES):
                    x = multiply_add(load(keys, row + e), load(q, o + e), x)
                scores[h * _STRIDE + r] = scale * _add_rest(total(x), q, o, keys, row, head_dim)


@subroutine()
def _prefetch_row(keys, values, row, ahead, head_dim):
    for line in range(_0, head_dim, _LINE):
        prefetch(values, row + line)  # type: ignore[call-arg]
        prefetch(keys, ahead + line)


@subroutine()
def _add_rest(x, q, o, keys, row, head_dim):
    """Add to x the products of the elements that do not fill a vector."""
    for e in range(head_dim & ~_LAST_LANE, head_dim):
        x += q[o + e] * get(keys, row + e)
    return x


@subroutine()
def add_values_(out, values, rows, n_groups, head_dim, apart, weights):
    """Add values to the output: out[h] += sum of weights[h, r] values[rows[r]], in the order of rows.
    The function takes four rows at once, so that `out` is written less often.
    """
    head_dim, n_groups, apart, n = np.uint64(head_dim), np.uint64(n_groups), np.uint64(apart), np.uint64(len(rows))
    n_kv_heads, whole = np.uint64(len(out)) // (head_dim * n_groups), head_dim & ~_LAST_LANE
    n_fours = n & ~_3
    for r in range(_0, n_fours, _4):
        for g in range(n_kv_heads):
            at = g * apart
            a, b = np.uint64(rows[r]) + at, np.uint64(rows[r + _1]) + at
            c, d = np.uint64(rows[r + _2]) + at, np.uint64(rows[r + _3]) + at
            for h in range(g * n_groups, (g + _1) * n_groups):
                o, w = h * head_dim, h * _STRIDE + r
                w_a = splat(weights[w])
                w_b = splat(weights[w + _1])
                w_c = splat(weights[w + _2])
                w_d = splat(weights[w + _3])
                for e in range(_0, whole, _LANES):
                    x = multiply_add(w_b, load(values, b + e), multiply_add(w_a, load(values, a + e), load(out, o + e)))
                    store(out, o + e, multiply_add(w_d, load(values, d + e), multiply_add(w_c, load(values, c + e), x)))
                for i in range(_4):
                    _add_rest_(out, o, weights[w + i], values, np.uint64(rows[r + i]) + at, whole, head_dim)
    for r in range(n_fours, n):
        for h in range(n_kv_heads * n_groups):
            o, row, weight = h * head_dim, np.uint64(rows[r]) + h // n_groups * apart, weights[h * _STRIDE + r]
            for e in range(_0, whole, _LANES):
                store(out, o + e, multiply_add(splat(weight), load(values, row + e), load(out, o + e)))
            _add_rest_(out, o, weight, values, row, whole, head_dim)


@subroutine()
def _add_rest_(out, o, weight, values, row, begin, end):
    """Add the elements that do not fill a vector."""
    for e in range(begin, end):
        out[o + e] += weight * get(values, row + e)


@subroutine(ELEMENTWISE)
def weigh_(scores, n, out, highest, total, softcap, bias_HL, distance):
    """Replace scores[h, :n] by weights relative to the highest score so far, and rescale `out` and `total` to it.

    Row 0 is `distance` positions before the query. As long as all scores are -inf, all weights and `total` are 0.
    """
    head_dim = len(out) // len(highest)
    for h in range(len(highest)):
        row_scores = scores[h * BLOCK : h * BLOCK + n]
        if softcap > _ZERO:
            _cap_(row_scores, softcap)
        if len(bias_HL) > 0:
            _add_bias_(row_scores, bias_HL[h], distance)
        new_highest = max(highest[h], _largest(row_scores))
        if new_highest > highest[h]:
            fade = exp_f32(highest[h] - new_highest)
            scale_(out[h * head_dim : (h + 1) * head_dim], fade)
            total[h] *= fade
            highest[h] = new_highest
        if highest[h] == -np.inf:
            _hide_(row_scores)
            total[h] += _sum(row_scores)
        else:
            total[h] += _exp_and_sum_(row_scores, highest[h])


@subroutine()
def _hide_(x):
    """Replace scores by weights if no score is above -inf: -inf becomes 0, NaN stays NaN."""
    for e in range(len(x)):
        x[e] = _ZERO if x[e] == -np.inf else np.float32(np.nan)


@subroutine(ELEMENTWISE)
def _cap_(x, cap):
    """Cap scores: x = cap tanh(x / cap)."""
    for e in range(len(x)):
        x[e] = cap * (_ONE - _TWO / (_ONE + exp_f32(_TWO * x[e] / cap)))


@subroutine(ELEMENTWISE)
def _add_bias_(x, bias, distance):
    """Add the bias of each distance. x[0] is the score of a row at `distance`, and each next row is nearer by one."""
    for e in range(len(x)):
        x[e] += get(bias, min(distance - e, len(bias) - 1))


@subroutine(REDUCING)
def _largest(x):
    largest = x[0]
    for r in range(1, len(x)):
        largest = max(largest, x[r])
    return largest


@subroutine(ELEMENTWISE)
def scale_(x, factor):
    for e in range(len(x)):
        x[e] *= factor


@subroutine(ELEMENTWISE)
def _exp_and_sum_(x, shift):
    for e in range(len(x)):
        x[e] = exp_f32(x[e] - shift)
    return _sum(x)


@subroutine(REDUCING)
def _sum(x):
    total = _ZERO
    for e in range(len(x)):
        total += x[e]
    return total
