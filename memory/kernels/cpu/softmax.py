"""Computes an online softmax over blocks of rows (Milakov & Gimelshein 2018): the parts that are not products.

A unit is one query of one head. It has BLOCK scores, and an output: the weighted sum of values so far.
"""

from __future__ import annotations

import numpy as np

from hybridmem.memory.kernels.cpu.numbers import get
from hybridmem.memory.kernels.cpu.rows import copy_
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, subroutine
from hybridmem.memory.kernels.cpu.vector_math import exp_f32
from hybridmem.memory.kernels.cpu.vectors import LANES, higher, highest_of, load, multiply_add, splat, total

BLOCK = 64
"""How many rows have their scores in memory at once. For each unit these scores take 256 bytes."""

_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
_0, _LANES, _LAST_LANE = (np.uint64(i) for i in (0, LANES, LANES - 1))


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


@subroutine(ELEMENTWISE)
def weigh_unit_(scores, out, highest, total_of_all, u, softcap, bias, distance):
    """Replace one unit's scores by weights relative to its highest score, and rescale its output and total to that.

    Row 0 is `distance` positions before the query. As long as all scores are -inf, all weights and the total are 0. The
    order of sums does not depend on how the function is compiled.
    """
    n = len(scores)
    if softcap > _ZERO:
        for e in range(n):
            scores[e] = softcap * (_ONE - _TWO / (_ONE + exp_f32(_TWO * scores[e] / softcap)))
    if len(bias) > 0:
        for e in range(n):
            scores[e] += get(bias, min(distance - e, len(bias) - 1))
    new_highest = _highest(scores, highest[u])
    if new_highest > highest[u]:
        fade = exp_f32(highest[u] - new_highest)
        for e in range(len(out)):
            out[e] *= fade
        total_of_all[u] *= fade
        highest[u] = new_highest
    if highest[u] == -np.inf:
        for e in range(n):
            scores[e] = _ZERO if scores[e] == -np.inf else np.float32(np.nan)
    else:
        _exponentiate_(scores, highest[u])
    total_of_all[u] += _sum(scores)


@subroutine(ELEMENTWISE)
def scale_(x, factor):
    for e in range(len(x)):
        x[e] *= factor


@subroutine(ELEMENTWISE)
def _exponentiate_(scores, shift):
    for e in range(len(scores)):
        scores[e] = exp_f32(scores[e] - shift)


@subroutine()
def _highest(x, least):
    """Return the highest number, or `least` if that is higher. NaN does not count."""
    n = np.uint64(len(x))
    whole, lanes, found = n & ~_LAST_LANE, splat(least), least
    for e in range(_0, whole, _LANES):
        lanes = higher(lanes, load(x, e))
    if whole > _0:
        found = highest_of(lanes)
    for e in range(whole, n):
        found = max(found, x[e])
    return found


@subroutine()
def _sum(x):
    n = np.uint64(len(x))
    whole, lanes, ones = n & ~_LAST_LANE, splat(_ZERO), splat(_ONE)
    for e in range(_0, whole, _LANES):
        lanes = multiply_add(load(x, e), ones, lanes)
    found = total(lanes)
    for e in range(whole, n):
        found += x[e]
    return found
