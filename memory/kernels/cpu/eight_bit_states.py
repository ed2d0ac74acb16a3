"""Reads and writes matrix states of 8 bits on the CPU (see `memory.kernels.eight_bits`).

A decode step does not run over the tail again. With one decay for each head, a state is the decayed body plus a sum
over the tokens behind it: S_p = A_p S_0 + sum of A_pj u_j k_j^T, where A_pj is the product of the decays between j and
p. So S_p q is the body read once, in 8 bits, and a sum of written values u_j with the weights A_pj (k_j . q). The
products of keys and queries are those of a group of heads, so they are computed once for each group. A new body is made
from the old one and the tokens that fold alone.

Long segments, and states with a decay for each column, are decoded to float32 and go through `scan_matrices`.
`eight_bit_segments` decides.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils

from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.numbers import element_at, get, put, untyped_intrinsic
from hybridmem.memory.kernels.cpu.rows import copy_, fill_
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, inlined, subroutine
from hybridmem.memory.kernels.cpu.vector_math import exp_f32, float_from_bits, prefetch
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
from hybridmem.memory.kernels.eight_bits import MIX_ELEMENT, MIX_FIRST, MIX_POSITION, MIX_ROW, MIX_SECOND, SCALE_BYTES

SHORT = 16
"""Segments of up to so many tokens read the body as it is."""

_HEADS_AT_ONCE = 8
"""How many heads a task has. They share its buffers, for making these takes as long as reading a head."""

_MANY = 16
"""With more segments than this a task has all heads of one, whose values in the tail are next to each other."""

_AHEAD = 2048
"""How many bytes ahead of the read position cache lines of a state are prefetched from main memory."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LARGEST_INT8 = np.float32(127.0)
_SMALL_FLOAT8, _SMALL_STEPS, _UNIT = np.float32(2.0**-6), np.float32(512.0), np.float32(2.0**-24)
_ELEMENT, _ROW, _POSITION, _FIRST, _SECOND = (
    np.uint32(x) for x in (MIX_ELEMENT, MIX_ROW, MIX_POSITION, MIX_FIRST, MIX_SECOND)
)
_8, _12, _15, _16, _20, _24 = (np.uint32(x) for x in (8, 12, 15, 16, 20, 24))
_BIAS, _MOST, _SIGN, _SIZE = np.int32(120 << 3), np.int32(126), np.uint32(0x80), np.uint32(0x7FFFFFFF)


@untyped_intrinsic
def _scale(typing_context, codes, at):
    """Return the float32 in bytes [at, at + 4) of a contiguous array."""

    def codegen(context, builder, signature, arguments):
        pointer = element_at(context, builder, codes, *arguments)
        return builder.load(builder.bitcast(pointer, ir.FloatType().as_pointer()), align=1)

    return types.float32(codes, at), codegen


@untyped_intrinsic
def _put_scale(typing_context, codes, at, x):
    def codegen(context, builder, signature, arguments):
        pointer = element_at(context, builder, codes, *arguments[:2])
        builder.store(arguments[2], builder.bitcast(pointer, ir.FloatType().as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(codes, at, types.float32), codegen


@untyped_intrinsic
def _bits(typing_context, x):
    """Return the bits of a float32."""

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


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


@inlined
def _hash(row, position):
    """Return the chance of a row's first number: 32 bits. numba computes with 64, so each product is cut."""
    x = np.uint32(np.uint32(row) * _ROW + np.uint32(position) * _POSITION)
    x = np.uint32((x ^ (x >> _16)) * _FIRST)
    x = np.uint32((x ^ (x >> _15)) * _SECOND)
    return np.uint32(x ^ (x >> _16))


@subroutine(ELEMENTWISE)
def _put_int8(row, inverse, codes, at, chance):
    out = codes[at : at + len(row)]
    for e in range(len(row)):
        x = row[e] * inverse
        x = x if x == x else _ZERO
        x = np.floor(x + np.float32(np.int32(np.uint32(chance + np.uint32(e) * _ELEMENT) >> _8)) * _UNIT)
        put(out, e, np.int32(min(max(x, -_LARGEST_INT8), _LARGEST_INT8)))


@subroutine(ELEMENTWISE)
def _put_float8(row, inverse, codes, at, first):
    """Round to float8: below 2**-6 steps are equal, above, the 20 lowest bits of a float32 are what is rounded away."""
    out = codes[at : at + len(row)]
    for e in range(len(row)):
        x = row[e] * inverse
        x = x if x == x else _ZERO
        chance, bits = np.uint32(first + np.uint32(e) * _ELEMENT), _bits(x)
        large = np.int32(((bits & _SIZE) + (chance >> _12)) >> _20) - _BIAS
        small = np.int32(abs(x) * _SMALL_STEPS + np.float32(np.int32(chance >> _8)) * _UNIT)
        code = min(small if abs(x) < _SMALL_FLOAT8 else large, _MOST)
        put(out, e, code | np.int32((bits >> _24) & _SIGN))


@subroutine(ELEMENTWISE)
def _encode_row(row, largest, codes, at, number, position):
    """Write a row of a state from byte `at` on: codes, and the scale. It is row `number` of all."""
    # Sizes are compared by their bits, because only comparisons of integers become vectors. A NaN is the largest.
    most = np.int32(0)
    for e in range(len(row)):
        size = np.int32(_bits(row[e]) & _SIZE)
        most = size if size > most else most
    scale = float_from_bits(most) / largest  # type: ignore[call-arg]
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    chance = _hash(number, position)
    if largest == _LARGEST_INT8:
        _put_int8(row, inverse, codes, at, chance)
    else:
        _put_float8(row, inverse, codes, at, chance)
    _put_scale(codes, at + len(row), scale)


@compiled(ELEMENTWISE, parallel=True)
def decode(codes, at, states):
    """Read a state (rows, N) from byte `at` on."""
    n = states.shape[1]
    for r in prange(len(states)):
        first = at + r * (n + SCALE_BYTES)
        scale, own, buffer = splat(_scale(codes, first + n)), np.zeros(LANES, codes.dtype), np.empty(LANES, np.float32)
        for e in range(0, n, LANES):
            size = min(LANES, n - e)
            copy_(own[:size], codes[first + e : first + e + size])
            store(buffer, 0, multiply(scale, load_8_bits(own, 0)))
            copy_(states[r, e : e + size], buffer[:size])


@compiled(ELEMENTWISE, parallel=True)
def encode(states, largest, position, codes, at):
    """Write a state (rows, N) from byte `at` on. It has seen `position` tokens."""
    n = states.shape[1]
    for r in prange(len(states)):
        _encode_row(states[r], largest, codes, at + r * (n + SCALE_BYTES), r, position)


@compiled(ELEMENTWISE, parallel=True)
def multiply_keys(q_TGN, k_TGN, a_TGN, cu_rows, targets, ring, old, new, ring_rows, spans, keys_TGN, products):
    """Multiply the queries of short segments, and what erases, with all keys before them. Write new keys to the ring.

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
        if cu_rows[i + 1] - cu_rows[i] <= SHORT:
            span = (cu_rows[i], cu_rows[i + 1], spans[0][i], spans[1][i], spans[2][i])
            reads, writes = (old[0][i], old[1][i], old[2][i]), (new[1][i], new[2][i])
            n_new = span[1] - span[0]
            n_tokens, n_floats = span[3] + n_new, 3 * (span[3] + n_new) + (n_new + 2) * n_rows
            floats, places = np.zeros(n_floats, np.float32), np.empty(n_tokens, np.int64)
            rounded = np.empty(n_rows, rings[1].dtype)
            inputs = (_lent(q_TGN), _lent(v_THV), _lent(log_decay_TH), _lent(a_TGN), _lent(strength_TH), _lent(skip))
            own, borrowed = _lent(floats), (_lent(rings[0]), _lent(rings[1]), _lent(rings[2]))
            w, behind, weights = own[:n_tokens], own[n_tokens : 2 * n_tokens], own[2 * n_tokens : 3 * n_tokens]
            y, found = own[3 * n_tokens : 3 * n_tokens + n_rows], own[3 * n_tokens + n_rows : 3 * n_tokens + 2 * n_rows]
            u = own[3 * n_tokens + 2 * n_rows :].reshape(n_new, n_rows)
            buffers = (u, w, behind, _lent(places), weights, y, found, _lent(rounded))
            for h in range(first, min(first + at_once, n_heads)):
                _read_head(
                    inputs, after_decay, h, span, _lent(codes), sources[i], targets[i], largest, _lent(keys_TGN),
                    _lent(products), borrowed, reads, writes, ring_rows, _lent(y_THV), buffers,
                )  # fmt: skip
            _keep(floats, places, rounded)


@untyped_intrinsic
def _keep(typing_context, x, y, z):
    """Do nothing. An array is freed after the last line that names it, so that lent arrays must be named again."""

    def codegen(context, builder, signature, arguments):
        return context.get_dummy_value()

    return types.void(x, y, z), codegen


@subroutine(ELEMENTWISE)
def _read_head(
    inputs, after_decay, h, span, codes, source, target, largest, keys_TGN, products, rings, reads, writes, ring_rows,
    y_THV, buffers,
):  # fmt: skip
    q_TGN, v_THV, log_decay_TH, a_TGN, strength_TH, skip = inputs
    u, w, behind, places, weights, y, found, rounded = buffers
    start, end, first_slot, count, fold = span
    n_heads, n_rows = v_THV.shape[1:]
    g, erases = h // (n_heads // q_TGN.shape[1]), len(a_TGN) > 0
    # The slots of the tail's tokens, counted in heads. Dividing for each of them would take longer than to read them.
    slot = first_slot % ring_rows
    for j in range(count):
        places[j] = slot * n_heads + h
        slot = slot + 1 if slot + 1 < ring_rows else 0
        w[j] = get(rings[2], reads[2] + places[j])
    _exp_(w[:count])
    for t in range(start, end):
        p, value = count + t - start, v_THV[t, h]
        w[p] = exp_f32(log_decay_TH[t, h])
        whole = _products_of_decays(w, p, behind)
        _read_body(codes, source, h, q_TGN[t, g], whole, y)
        _multiply(behind, products[t, g, 0], weights)
        _add_tail(rings[1], reads[1], places, weights, count, y)
        _add_new(u, count, p, behind, products[t, g, 0], y)
        if erases:
            _read_body(codes, source, h, a_TGN[t, g], whole, found)
            _multiply(behind, products[t, g, 1], weights)
            _add_tail(rings[1], reads[1], places, weights, count, found)
            _add_new(u, count, p, behind, products[t, g, 1], found)
        kept, strength = w[p] if after_decay else _ONE, strength_TH[t, h] if len(strength_TH) > 0 else _ONE
        for r in range(n_rows):
            put(rounded, r, (value[r] - kept * found[r]) * strength)
        copy_(u[t - start], rounded)
        if target < 0 or p >= fold:
            slot = (first_slot + p) % ring_rows * n_heads + h
            copy_(rings[1][writes[0] + slot * n_rows : writes[0] + (slot + 1) * n_rows], rounded)
            put(rings[2], writes[1] + slot, log_decay_TH[t, h])
        factor = get(skip, h) if len(skip) > 0 else _ZERO
        _finish(y, w[p], u[t - start], products[t, g, 0, p], value, factor, y_THV[t, h])
    if target >= 0:
        _fold(keys_TGN, g, u, w, h, span, codes, source, target, largest, rings, reads, ring_rows, places)


@subroutine(ELEMENTWISE)
def _exp_(x):
    for e in range(len(x)):
        x[e] = exp_f32(x[e])


@subroutine()
def _products_of_decays(w, n, behind):
    """Set behind[j] to the product of the decays of tokens (j, n), and return the product of all before n."""
    product = _ONE
    for j in range(n - 1, -1, -1):
        behind[j] = product
        product *= w[j]
    return product


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
        y[r] *= factor * _scale(codes, at + r * width + n)


@subroutine(ELEMENTWISE)
def _multiply(x, y, out):
    for e in range(len(out)):
        out[e] = x[e] * y[e]


@subroutine()
def _add_tail(ring, block, places, weights, count, y):
    """Add to y what the tokens of the tail have written, weighted."""
    n_rows = len(y)
    n_wide, n_vectors = n_rows // (4 * LANES) * (4 * LANES), n_rows // LANES * LANES
    for r in range(0, n_wide, 4 * LANES):
        y0, y1, y2, y3 = load(y, r), load(y, r + LANES), load(y, r + 2 * LANES), load(y, r + 3 * LANES)
        for j in range(count):
            weight, at = splat(weights[j]), block + places[j] * n_rows + r
            y0, y1 = multiply_add(weight, load(ring, at), y0), multiply_add(weight, load(ring, at + LANES), y1)
            y2 = multiply_add(weight, load(ring, at + 2 * LANES), y2)
            y3 = multiply_add(weight, load(ring, at + 3 * LANES), y3)
            # The next head's values are next to these, and no processor fetches them by itself.
            prefetch(ring, at + n_rows)  # type: ignore[call-arg]
            prefetch(ring, at + n_rows + 2 * LANES)
        store(y, r, y0)
        store(y, r + LANES, y1)
        store(y, r + 2 * LANES, y2)
        store(y, r + 3 * LANES, y3)
    for r in range(n_wide, n_vectors, LANES):
        y0 = load(y, r)
        for j in range(count):
            y0 = multiply_add(splat(weights[j]), load(ring, block + places[j] * n_rows + r), y0)
        store(y, r, y0)
    for r in range(n_vectors, n_rows):
        for j in range(count):
            y[r] += weights[j] * get(ring, block + places[j] * n_rows + r)


@subroutine(ELEMENTWISE)
def _add_new(u, count, n, behind, products, y):
    """Add to y what the segment's own tokens before token n have written, weighted."""
    for j in range(count, n):
        weight, own = behind[j] * products[j], u[j - count]
        for r in range(len(y)):
            y[r] += weight * own[r]


@subroutine(ELEMENTWISE)
def _fold(keys_TGN, g, u, w, h, span, codes, source, target, largest, rings, reads, ring_rows, places):
    """Make head h of a new body from the old one and from the tokens before the fold."""
    start, _, first_slot, count, fold = span
    n_groups, n = keys_TGN.shape[1:]
    n_rows, width = u.shape[1], n + SCALE_BYTES
    floats = np.empty(fold * (n + n_rows + 1) + n, np.float32)
    own = _lent(floats)
    keys, written = own[: fold * n], own[fold * n : fold * (n + n_rows)]
    behind, row = own[fold * (n + n_rows) : fold * (n + n_rows + 1)], own[fold * (n + n_rows + 1) :]
    whole = _products_of_decays(w, fold, behind)
    for j in range(fold):
        if j < count:
            at = reads[0] + ((first_slot + j) % ring_rows * n_groups + g) * n
            copy_(keys[j * n : (j + 1) * n], rings[0][at : at + n])
            at = reads[1] + places[j] * n_rows
            copy_(written[j * n_rows : (j + 1) * n_rows], rings[1][at : at + n_rows])
        else:
            copy_(keys[j * n : (j + 1) * n], keys_TGN[start + j - count, g])
            copy_(written[j * n_rows : (j + 1) * n_rows], u[j - count])
        _scale_(written[j * n_rows : (j + 1) * n_rows], behind[j])
    for r in range(n_rows):
        number = h * n_rows + r
        if source < 0:
            fill_(row, _ZERO)
        else:
            at = source + number * width
            factor = splat(whole * _scale(codes, at + n))
            for e in range(0, n, LANES):
                store(row, e, multiply(factor, load_8_bits(codes, at + e)))
        _add_outer(row, keys, written, r, n_rows, fold)
        _encode_row(row, largest, codes, target + number * width, number, first_slot + fold)
    _keep(floats, floats, floats)


@subroutine(ELEMENTWISE)
def _scale_(x, factor):
    for e in range(len(x)):
        x[e] *= factor


@subroutine()
def _add_outer(row, keys, written, r, n_rows, n_tokens):
    """Add to row r of a state what the tokens that fold have written."""
    n = len(row)
    n_wide = n // (4 * LANES) * (4 * LANES)
    for e in range(0, n_wide, 4 * LANES):
        s0, s1, s2, s3 = load(row, e), load(row, e + LANES), load(row, e + 2 * LANES), load(row, e + 3 * LANES)
        for j in range(n_tokens):
            weight, at = splat(written[j * n_rows + r]), j * n + e
            s0, s1 = multiply_add(weight, load(keys, at), s0), multiply_add(weight, load(keys, at + LANES), s1)
            s2 = multiply_add(weight, load(keys, at + 2 * LANES), s2)
            s3 = multiply_add(weight, load(keys, at + 3 * LANES), s3)
        store(row, e, s0)
        store(row, e + LANES, s1)
        store(row, e + 2 * LANES, s2)
        store(row, e + 3 * LANES, s3)
    for e in range(n_wide, n, LANES):
        s0 = load(row, e)
        for j in range(n_tokens):
            s0 = multiply_add(splat(written[j * n_rows + r]), load(keys, j * n + e), s0)
        store(row, e, s0)
