"""Reads matrix states of 8 bits on the CPU, and makes new ones (see `memory.kernels.eight_bits`).

A decode step does not run over the tail again. With one decay for each head, a state is the decayed body plus a sum
over the tokens after it: S_p = A_p S_0 + sum of A_pj u_j k_j^T, where A_pj is the product of the decays between j and
p. So S_p q is the body read once, in 8 bits, and a sum of written values u_j with the weights A_pj (k_j . q). The
products of keys and queries are those of a group of heads, so they are computed once for each group. A new body is made
from the old one and the tokens that fold alone.

A token's written values of all heads are next to each other in the tail. So a task reads the bodies of its heads first,
and then one token after the other, for all of these heads: then memory is read in order.

Long segments, and states with a decay for each column, are decoded to float32 and go through `scan_matrices`.
`eight_bit_segments` decides.
"""

from __future__ import annotations

import numpy as np
from numba import prange, types
from numba.core import cgutils

from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.eight_bit_rows import encode_row, scale_at
from hybridmem.memory.kernels.cpu.numbers import get, put, untyped_intrinsic
from hybridmem.memory.kernels.cpu.rows import copy_, fill_
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, subroutine
from hybridmem.memory.kernels.cpu.vector_math import exp_f32, prefetch
from hybridmem.memory.kernels.cpu.vectors import (
    LANES,
    load,
    load_8_bits,
    multiply,
    multiply_add,
    splat,
    store,
    store_totals,
    total,
)
from hybridmem.memory.kernels.eight_bits import SCALE_BYTES

SHORT = 16
"""Segments of up to so many tokens read the body as it is."""

_HEADS_AT_ONCE = 8
"""How many heads a task has. They share its buffers, for making these takes as long as reading a head."""

_MANY = 16
"""With more segments than this a task has all heads of one, whose values in the tail are next to each other."""

_AHEAD = 4096
"""How many bytes ahead of the read position cache lines of a state are prefetched from main memory."""

_LEAST_LOG = np.float32(-69.0)
"""Decays below 2**-99 count as 0. Times a value they would be numbers below 2**-126, for which processors take a
hundred times as long, and beside a row's rounding they are nothing.
"""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@untyped_intrinsic
def _lent(typing_context, array):
    """Return the same array without its count of references, which the caller keeps alive.

    Each slice, and each call with an array, counts references by atomic instructions. For one head they would take as
    long as its numbers.
    """

    def codegen(context, builder, signature, arguments):
        own = context.make_array(array)(context, builder, arguments[0])
        own.meminfo = cgutils.get_null_value(own.meminfo.type)
        own.parent = cgutils.get_null_value(own.parent.type)
        return own._getvalue()

    return array(array), codegen


@untyped_intrinsic
def _keep(typing_context, x, y):
    """Do nothing. An array is freed after the last line that names it, so call this after its last use."""

    def codegen(context, builder, signature, arguments):
        return context.get_dummy_value()

    return types.void(x, y), codegen


@compiled(ELEMENTWISE, parallel=True)
def multiply_keys(q_TGN, k_TGN, a_TGN, cu_rows, targets, ring, old, new, ring_rows, spans, keys_TGN, products):
    """Multiply queries and erasing vectors of short segments with all keys before them. Write new keys to the ring.

    Args:
        keys_TGN: is set to the new keys, rounded to the ring's dtype.
        products: (T, G, 2, P), is set to q . k and a . k for the key of each position from the source state on, up to
            the token's own.
    """
    n_groups, n_columns = k_TGN.shape[1:]
    firsts, counts, folds = spans
    for task in prange((len(cu_rows) - 1) * n_groups):
        i, g = task // n_groups, task % n_groups
        start, end = cu_rows[i], cu_rows[i + 1]
        if end - start <= SHORT:
            rounded = np.empty(n_columns, ring.dtype)
            for t in range(start, end):
                p = counts[i] + t - start
                copy_(rounded, k_TGN[t, g])
                copy_(keys_TGN[t, g], rounded)
                if targets[i] < 0 or p >= folds[i]:
                    at = new[i] + ((firsts[i] + p) % ring_rows * n_groups + g) * n_columns
                    copy_(ring[at : at + n_columns], rounded)
                slot = firsts[i] % ring_rows
                for j in range(counts[i]):
                    at = old[i] + (slot * n_groups + g) * n_columns
                    slot = slot + 1 if slot + 1 < ring_rows else 0
                    products[t, g, 0, j] = _dot(ring, at, q_TGN[t, g])
                    if len(a_TGN) > 0:
                        products[t, g, 1, j] = _dot(ring, at, a_TGN[t, g])
                for j in range(counts[i], p + 1):
                    key = keys_TGN[start + j - counts[i], g]
                    products[t, g, 0, j] = _dot(key, 0, q_TGN[t, g])
                    if len(a_TGN) > 0:
                        products[t, g, 1, j] = _dot(key, 0, a_TGN[t, g])


@subroutine()
def _dot(x, at, y):
    """Return x[at : at + N] . y. N is a multiple of 16."""
    s = splat(_ZERO)
    for e in range(0, len(y), LANES):
        s = multiply_add(load(x, at + e), load(y, e), s)
    return total(s)


@compiled(ELEMENTWISE, parallel=True)
def read_states(
    q_TGN, v_THV, log_decay_TH, a_TGN, after_decay, strength_TH, skip, cu_rows, codes, sources, targets,
    largest, keys_TGN, products, rings, old, new, ring_rows, spans, y_THV,
):  # fmt: skip
    """Compute the outputs of short segments, write what their tokens change, and make new bodies.

    Args:
        keys_TGN, products: what `multiply_keys` has computed.
        rings, old, new: the rings of keys, of written values and of decays, and the blocks to read and to write.
        spans: `firsts`, `counts` and `folds` of the tail.
    """
    n_heads, n_rows = v_THV.shape[1:]
    at_once = n_heads if len(cu_rows) > _MANY else min(n_heads, _HEADS_AT_ONCE)
    n_chunks = -(-n_heads // at_once)
    for task in prange((len(cu_rows) - 1) * n_chunks):
        i, first = task // n_chunks, task % n_chunks * at_once
        n_new = cu_rows[i + 1] - cu_rows[i]
        if n_new <= SHORT:
            n_own = min(at_once, n_heads - first)
            n_tokens, n_values = spans[1][i] + n_new, n_own * n_rows
            span = (cu_rows[i], cu_rows[i + 1], spans[0][i], spans[1][i], spans[2][i], first, n_own)
            reads, writes = (old[0][i], old[1][i], old[2][i]), (new[1][i], new[2][i])
            floats = np.zeros(3 * n_tokens * n_own + (n_new + 2) * n_values + n_own, np.float32)
            rounded = np.empty(n_values, rings[1].dtype)
            own, n_weights, end = _lent(floats), n_tokens * n_own, 3 * n_tokens * n_own
            logs = own[:n_weights].reshape(n_tokens, n_own)
            behind = own[n_weights : 2 * n_weights].reshape(n_tokens, n_own)
            u = own[end : end + n_new * n_values].reshape(n_new, n_values)
            rest = own[end + n_new * n_values :]
            buffers = (
                logs, behind, own[2 * n_weights : end], u, rest[:n_values], rest[n_values : 2 * n_values],
                rest[2 * n_values :], _lent(rounded),
            )  # fmt: skip
            inputs = (_lent(q_TGN), _lent(v_THV), _lent(log_decay_TH), _lent(a_TGN), _lent(strength_TH), _lent(skip))
            borrowed, keys, dots = (_lent(rings[0]), _lent(rings[1]), _lent(rings[2])), _lent(keys_TGN), _lent(products)
            _read_heads(
                inputs, after_decay, span, _lent(codes), sources[i], targets[i], dots, borrowed, reads, writes,
                ring_rows, _lent(y_THV), buffers,
            )  # fmt: skip
            if targets[i] >= 0:
                _fold(
                    keys, u, logs, behind, buffers[6], span, _lent(codes), sources[i], targets[i], largest, borrowed,
                    reads, ring_rows, n_heads, n_rows,
                )  # fmt: skip
            _keep(floats, rounded)


@subroutine(ELEMENTWISE)
def _read_heads(
    inputs, after_decay, span, codes, source, target, products, rings, reads, writes, ring_rows, y_THV, buffers
):  # fmt: skip
    q_TGN, v_THV, log_decay_TH, a_TGN, strength_TH, skip = inputs
    logs, behind, weights, u, y, found, whole, rounded = buffers
    start, end, first_slot, count, fold, first, n_own = span
    n_heads, n_rows = v_THV.shape[1:]
    n_shared, erases, n_values = n_heads // q_TGN.shape[1], len(a_TGN) > 0, n_own * n_rows
    for j in range(count):
        at = reads[2] + (first_slot + j) % ring_rows * n_heads + first
        copy_(logs[j], rings[2][at : at + n_own])
    for t in range(start, end):
        p, own = count + t - start, u[t - start]
        copy_(logs[p], log_decay_TH[t, first : first + n_own])
        _decays_behind(logs, p, behind, whole)
        for h in range(n_own):
            g, part = (first + h) // n_shared, slice(h * n_rows, (h + 1) * n_rows)
            _read_body(codes, source, first + h, q_TGN[t, g], whole[h], y[part])
            if erases:
                _read_body(codes, source, first + h, a_TGN[t, g], whole[h], found[part])
        if erases:
            _weigh(behind, products, t, 1, p, first, n_shared, weights)
            _add_tail(rings[1], reads[1], first_slot, ring_rows, n_heads, first, weights, count, n_rows, n_own, found)
            _add_new(u, count, p, weights, n_rows, n_own, found)
        _weigh(behind, products, t, 0, p, first, n_shared, weights)
        _add_tail(rings[1], reads[1], first_slot, ring_rows, n_heads, first, weights, count, n_rows, n_own, y)
        _add_new(u, count, p, weights, n_rows, n_own, y)
        _exp(logs[p], whole)
        for h in range(n_own):
            kept = whole[h] if after_decay else _ONE
            strength = strength_TH[t, first + h] if len(strength_TH) > 0 else _ONE
            part = slice(h * n_rows, (h + 1) * n_rows)
            _write(v_THV[t, first + h], kept if erases else _ZERO, found[part], strength, rounded[part])
        copy_(own, rounded)
        if target < 0 or p >= fold:
            slot = (first_slot + p) % ring_rows * n_heads + first
            at = writes[0] + slot * n_rows
            copy_(rings[1][at : at + n_values], rounded)
            copy_(rings[2][writes[1] + slot : writes[1] + slot + n_own], logs[p])
        for h in range(n_own):
            g, part = (first + h) // n_shared, slice(h * n_rows, (h + 1) * n_rows)
            factor = get(skip, first + h) if len(skip) > 0 else _ZERO
            value, out = v_THV[t, first + h], y_THV[t, first + h]
            _finish(y[part], whole[h], own[part], products[t, g, 0, p], value, factor, out)


@subroutine(ELEMENTWISE)
def _exp(x, out):
    """Compute e**x, or 0 for a decay that no row of a state would show. NaN stays NaN."""
    for e in range(len(out)):
        decay = exp_f32(x[e])
        out[e] = _ZERO if x[e] < _LEAST_LOG else decay


@subroutine()
def _decays_behind(logs, n, behind, whole):
    """Set behind[j, h] to the product of the decays of tokens (j, n), and whole[h] to that of all before n."""
    fill_(whole, _ZERO)
    for j in range(n - 1, -1, -1):
        _exp(whole, behind[j])
        _add(logs[j], whole)
    _exp(whole, whole)


@subroutine(ELEMENTWISE)
def _add(x, y):
    for e in range(len(y)):
        y[e] += x[e]


@subroutine(ELEMENTWISE)
def _weigh(behind, products, t, which, n, first, n_shared, weights):
    """Set weights[j, h] to the decays since token j, times its key's product, for all tokens before n."""
    n_own = behind.shape[1]
    for j in range(n):
        own = weights[j * n_own : (j + 1) * n_own]
        for h in range(n_own):
            own[h] = behind[j, h] * products[t, (first + h) // n_shared, which, j]


@subroutine(ELEMENTWISE)
def _write(value, kept, found, strength, rounded):
    for r in range(len(value)):
        put(rounded, r, (value[r] - kept * found[r]) * strength)


@subroutine(ELEMENTWISE)
def _finish(y, decay, u, product, value, skip, out):
    for r in range(len(y)):
        out[r] = decay * y[r] + product * u[r] + skip * value[r]


@subroutine()
def _read_body(codes, source, h, q, factor, y):
    """Set y to factor S q, for head h of a body."""
    n, n_rows = len(q), len(y)
    width = n + SCALE_BYTES
    at, n_fours = source + h * n_rows * width, n_rows // 4 * 4
    if source < 0:
        fill_(y, _ZERO)
        return
    for r in range(0, n_fours, 4):
        y0 = y1 = y2 = y3 = splat(_ZERO)
        for e in range(0, n, LANES):
            query, place = load(q, e), at + r * width + e
            y0 = multiply_add(load_8_bits(codes, place), query, y0)
            y1 = multiply_add(load_8_bits(codes, place + width), query, y1)
            y2 = multiply_add(load_8_bits(codes, place + 2 * width), query, y2)
            y3 = multiply_add(load_8_bits(codes, place + 3 * width), query, y3)
        for e in range(0, 4 * width, 64):
            prefetch(codes, at + r * width + e + _AHEAD)  # type: ignore[call-arg]
        store_totals(y, r, y0, y1, y2, y3)
    for r in range(n_fours, n_rows):
        y0 = splat(_ZERO)
        for e in range(0, n, LANES):
            y0 = multiply_add(load_8_bits(codes, at + r * width + e), load(q, e), y0)
        y[r] = total(y0)
    for r in range(n_rows):
        y[r] *= factor * scale_at(codes, at + r * width + n)


@subroutine()
def _add_tail(ring, block, first_slot, ring_rows, n_heads, first, weights, count, n_rows, n_own, y):
    """Add to y the weighted values that the tail's tokens have written. Parts of y are loaded once for four tokens."""
    n_fours, row, block_of_heads = count // 4 * 4, n_heads * n_rows, block + first * n_rows
    for j in range(0, n_fours, 4):
        at0 = block_of_heads + (first_slot + j) % ring_rows * row
        at1 = block_of_heads + (first_slot + j + 1) % ring_rows * row
        at2 = block_of_heads + (first_slot + j + 2) % ring_rows * row
        at3 = block_of_heads + (first_slot + j + 3) % ring_rows * row
        for h in range(n_own):
            w0, w1 = weights[j * n_own + h], weights[(j + 1) * n_own + h]
            w2, w3 = weights[(j + 2) * n_own + h], weights[(j + 3) * n_own + h]
            s0, s1, s2, s3 = splat(w0), splat(w1), splat(w2), splat(w3)
            begin, end = h * n_rows, (h + 1) * n_rows
            for r in range(begin, end - LANES + 1, LANES):
                prefetch(ring, at0 + 4 * row + r)  # type: ignore[call-arg]
                prefetch(ring, at1 + 4 * row + r)
                prefetch(ring, at2 + 4 * row + r)
                prefetch(ring, at3 + 4 * row + r)
                y0 = multiply_add(s0, load(ring, at0 + r), load(y, r))
                y0 = multiply_add(s1, load(ring, at1 + r), y0)
                y0 = multiply_add(s2, load(ring, at2 + r), y0)
                store(y, r, multiply_add(s3, load(ring, at3 + r), y0))
            for r in range(begin + n_rows // LANES * LANES, end):
                y[r] = (y[r] + w0 * get(ring, at0 + r)) + w1 * get(ring, at1 + r)
                y[r] = (y[r] + w2 * get(ring, at2 + r)) + w3 * get(ring, at3 + r)
    for j in range(n_fours, count):
        _add_token(ring, block_of_heads + (first_slot + j) % ring_rows * row, weights, j * n_own, n_rows, n_own, y)


@subroutine()
def _add_new(u, count, n, weights, n_rows, n_own, y):
    """Add to y the weighted values that the segment's own tokens before token n have written."""
    for j in range(count, n):
        _add_token(u[j - count], 0, weights, j * n_own, n_rows, n_own, y)


@subroutine()
def _add_token(values, at, weights, first, n_rows, n_own, y):
    for h in range(n_own):
        weight, begin, end = weights[first + h], h * n_rows, (h + 1) * n_rows
        s = splat(weight)
        for r in range(begin, end - LANES + 1, LANES):
            store(y, r, multiply_add(s, load(values, at + r), load(y, r)))
        for r in range(begin + n_rows // LANES * LANES, end):
            y[r] += weight * get(values, at + r)


@subroutine(ELEMENTWISE)
def _fold(
    keys_TGN, u, logs, behind, whole, span, codes, source, target, largest, rings, reads, ring_rows, n_heads, n_rows
):  # fmt: skip
    """Make a task's heads of a new body from the old one and from the tokens before the fold."""
    start, _, first_slot, count, fold, first, n_own = span
    n_groups, n = keys_TGN.shape[1:]
    n_shared, width, n_values = n_heads // n_groups, n + SCALE_BYTES, n_own * n_rows
    floats = np.empty(fold * (n + n_values) + 2 * n, np.float32)
    own = _lent(floats)
    keys, written, rows = own[: fold * n], own[fold * n : fold * (n + n_values)], own[fold * (n + n_values) :]
    _decays_behind(logs, fold, behind, whole)
    for j in range(fold):
        if j < count:
            at = reads[1] + ((first_slot + j) % ring_rows * n_heads + first) * n_rows
            copy_(written[j * n_values : (j + 1) * n_values], rings[1][at : at + n_values])
        else:
            copy_(written[j * n_values : (j + 1) * n_values], u[j - count])
        for h in range(n_own):
            _scale_(written[j * n_values + h * n_rows : j * n_values + (h + 1) * n_rows], behind[j, h])
    for h in range(n_own):
        g = (first + h) // n_shared
        if h == 0 or (first + h) % n_shared == 0:  # The heads of a group share its keys.
            for j in range(fold):
                if j < count:
                    at = reads[0] + ((first_slot + j) % ring_rows * n_groups + g) * n
                    copy_(keys[j * n : (j + 1) * n], rings[0][at : at + n])
                else:
                    copy_(keys[j * n : (j + 1) * n], keys_TGN[start + j - count, g])
        for r in range(0, n_rows, 2):
            number = (first + h) * n_rows + r
            at, other = (source + number * width if source >= 0 else -1), min(r + 1, n_rows - 1) - r
            _advance_two_rows(codes, at, width, other, whole[h], keys, written, h * n_rows + r, n_values, fold, rows)
            for e in range(0, 2 * width, 64):
                prefetch(codes, target + number * width + e + _AHEAD)  # type: ignore[call-arg]
            for i in range(other + 1):
                place = target + (number + i) * width
                encode_row(rows[i * n : (i + 1) * n], largest, codes, place, number + i, first_slot + fold)
    _keep(floats, floats)


@subroutine(ELEMENTWISE)
def _scale_(x, factor):
    for e in range(len(x)):
        x[e] *= factor


@subroutine()
def _advance_two_rows(codes, at, width, other, factor, keys, written, first, n_values, n_tokens, rows):
    """Set two rows of a state to the old ones, times a factor, plus what the tokens that fold have written.

    Each key is loaded once for both. `other` is 1, or 0 if there is no second row. A row of a state full of zeros is at
    -1, and nothing is read.
    """
    n, s0, s1 = len(rows) // 2, splat(_ZERO), splat(_ZERO)
    if at >= 0:
        s0, s1 = splat(factor * scale_at(codes, at + n)), splat(factor * scale_at(codes, at + other * width + n))
    n_wide = n // (4 * LANES) * (4 * LANES)
    for e in range(0, n_wide, 4 * LANES):
        x0 = x1 = x2 = x3 = y0 = y1 = y2 = y3 = splat(_ZERO)
        if at >= 0:
            x, y = at + e, at + other * width + e
            x0, x1 = multiply(s0, load_8_bits(codes, x)), multiply(s0, load_8_bits(codes, x + LANES))
            x2 = multiply(s0, load_8_bits(codes, x + 2 * LANES))
            x3 = multiply(s0, load_8_bits(codes, x + 3 * LANES))
            y0, y1 = multiply(s1, load_8_bits(codes, y)), multiply(s1, load_8_bits(codes, y + LANES))
            y2 = multiply(s1, load_8_bits(codes, y + 2 * LANES))
            y3 = multiply(s1, load_8_bits(codes, y + 3 * LANES))
        for j in range(n_tokens):
            value, key = j * n_values + first, j * n + e
            u0, u1 = splat(written[value]), splat(written[value + other])
            k0, k1 = load(keys, key), load(keys, key + LANES)
            k2, k3 = load(keys, key + 2 * LANES), load(keys, key + 3 * LANES)
            x0, x1, x2, x3 = (
                multiply_add(u0, k0, x0), multiply_add(u0, k1, x1), multiply_add(u0, k2, x2), multiply_add(u0, k3, x3)
            )  # fmt: skip
            y0, y1, y2, y3 = (
                multiply_add(u1, k0, y0), multiply_add(u1, k1, y1), multiply_add(u1, k2, y2), multiply_add(u1, k3, y3)
            )  # fmt: skip
        store(rows, e, x0)
        store(rows, e + LANES, x1)
        store(rows, e + 2 * LANES, x2)
        store(rows, e + 3 * LANES, x3)
        store(rows, n + e, y0)
        store(rows, n + e + LANES, y1)
        store(rows, n + e + 2 * LANES, y2)
        store(rows, n + e + 3 * LANES, y3)
    for e in range(n_wide, n, LANES):
        x0 = y0 = splat(_ZERO)
        if at >= 0:
            x0 = multiply(s0, load_8_bits(codes, at + e))
            y0 = multiply(s1, load_8_bits(codes, at + other * width + e))
        for j in range(n_tokens):
            value, k0 = j * n_values + first, load(keys, j * n + e)
            x0 = multiply_add(splat(written[value]), k0, x0)
            y0 = multiply_add(splat(written[value + other]), k0, y0)
        store(rows, e, x0)
        store(rows, n + e, y0)
