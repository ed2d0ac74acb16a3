"""Reads and writes matrix states of 8 bits on the CPU (see `memory.kernels.eight_bits`).

A decode step does not run over the tail again. With one decay for each head, a state is the decayed body plus a sum over
the tokens behind it: S_p = A_p S_0 + sum of A_pj u_j k_j^T, where A_pj is the product of the decays between j and p. So
S_p q is the body read once, in 8 bits, and a sum of written values u_j with the weights A_pj (k_j . q). The products of
keys and queries are those of a group of heads, so they are computed once for each group. A new body is made from the
old one and the tokens that fold alone.

Long segments, and states with a decay for each column, are decoded to float32 and go through `scan_matrices`.
`eight_bit_segments` decides.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import prange, types

from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.numbers import element_at, get, put, untyped_intrinsic
from hybridmem.memory.kernels.cpu.rows import copy_, fill_
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, inlined, subroutine
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
from hybridmem.memory.kernels.eight_bits import MIX_ELEMENT, MIX_FIRST, MIX_POSITION, MIX_SECOND, SCALE_BYTES

SHORT = 16
"""Segments of up to so many tokens read the body as it is."""

_AHEAD = 2048
"""How many bytes ahead of the read position cache lines of a state are prefetched from main memory."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_LARGEST_INT8 = np.float32(127.0)
_SMALL_FLOAT8, _SMALL_STEPS, _UNIT = np.float32(2.0**-6), np.float32(512.0), np.float32(2.0**-24)
_ELEMENT, _POSITION, _FIRST, _SECOND = (np.uint32(x) for x in (MIX_ELEMENT, MIX_POSITION, MIX_FIRST, MIX_SECOND))
_8, _12, _15, _16, _20, _24 = (np.uint32(x) for x in (8, 12, 15, 16, 20, 24))
_BIAS, _MOST, _SIGN, _SIZE = np.int32(120 << 3), np.int32(126), np.uint32(0x80), np.uint32(0x7FFFFFFF)
_NAN = np.float32(np.nan)


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


@inlined
def _hash(element, seed):
    # numba computes with 64 bits, so each product is cut to 32.
    x = np.uint32(element * _ELEMENT + seed)
    x = np.uint32((x ^ (x >> _16)) * _FIRST)
    x = np.uint32((x ^ (x >> _15)) * _SECOND)
    return np.uint32(x ^ (x >> _16))


@subroutine(ELEMENTWISE)
def _put_int8(row, inverse, codes, at, element, seed):
    out = codes[at : at + len(row)]
    for e in range(len(row)):
        x = row[e] * inverse
        x = x if x == x else _ZERO
        x = np.floor(x + np.float32(np.int32(_hash(np.uint32(element + e), seed) >> _8)) * _UNIT)
        put(out, e, np.int32(min(max(x, -_LARGEST_INT8), _LARGEST_INT8)))


@subroutine(ELEMENTWISE)
def _put_float8(row, inverse, codes, at, element, seed):
    """Round to float8: below 2**-6 steps are equal, above, the 20 lowest bits of a float32 are what is rounded away."""
    out = codes[at : at + len(row)]
    for e in range(len(row)):
        x = row[e] * inverse
        x = x if x == x else _ZERO
        chance, bits = _hash(np.uint32(element + e), seed), _bits(x)  # type: ignore[call-arg]
        large = np.int32(((bits & _SIZE) + (chance >> _12)) >> _20) - _BIAS
        small = np.int32(abs(x) * _SMALL_STEPS + np.float32(np.int32(chance >> _8)) * _UNIT)
        code = min(small if abs(x) < _SMALL_FLOAT8 else large, _MOST)
        put(out, e, code | np.int32((bits >> _24) & _SIGN))


@subroutine(ELEMENTWISE)
def _encode_row(row, largest, codes, at, element, position):
    """Write a row of a state from byte `at` on: codes, and the scale. Its first number is number `element` of all."""
    most, is_nan = _ZERO, False
    for e in range(len(row)):
        size = abs(row[e])
        is_nan |= size != size
        most = max(most, size)
    scale = most / largest
    inverse = _ONE / scale if scale > _ZERO else _ZERO
    seed = np.uint32(np.uint32(position) * _POSITION)
    if largest == _LARGEST_INT8:
        _put_int8(row, inverse, codes, at, np.uint32(element), seed)
    else:
        _put_float8(row, inverse, codes, at, np.uint32(element), seed)
    _put_scale(codes, at + len(row), _NAN if is_nan else scale)  # type: ignore[call-arg]


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
        _encode_row(states[r], largest, codes, at + r * (n + SCALE_BYTES), r * n, position)


@compiled(ELEMENTWISE, parallel=True)
def multiply_keys(q_TGN, k_TGN, a_TGN, cu_rows, is_short, moves, ring, old, new, ring_rows, spans, keys_TGN, products):
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
        if is_short[i]:
            rounded = np.empty(n_columns, ring.dtype)
            for t in range(start, end):
                p = counts[i] + t - start
                copy_(rounded, k_TGN[t, g])
                copy_(keys_TGN[t, g], rounded)
                if not moves[i] or p >= folds[i]:
                    at = new[i] + ((firsts[i] + p) % ring_rows * n_groups + g) * n_columns
                    copy_(ring[at : at + n_columns], rounded)
                for j in range(counts[i]):
                    at = old[i] + ((firsts[i] + j) % ring_rows * n_groups + g) * n_columns
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
    q_TGN, v_THV, log_decay_TH, a_TGN, after_decay, strength_TH, skip, cu_rows, is_short, codes, sources, targets,
    largest, keys_TGN, products, rings, old, new, ring_rows, spans, y_THV,
):  # fmt: skip
    """Compute the outputs of short segments, write what their tokens change, and make new bodies.

    Args:
        keys_TGN, products: what `multiply_keys` has computed.
        rings, old, new: the rings of keys, of written values and of decays, and the blocks to read and to write.
        spans: `firsts`, `counts` and `folds` of the tail.
    """
    n_heads = v_THV.shape[1]
    for task in prange((len(cu_rows) - 1) * n_heads):
        i, h = task // n_heads, task % n_heads
        if is_short[i]:
            span = (cu_rows[i], cu_rows[i + 1], spans[0][i], spans[1][i], spans[2][i])
            reads, writes = (old[0][i], old[1][i], old[2][i]), (new[1][i], new[2][i])
            _read_head(
                q_TGN, v_THV, log_decay_TH, a_TGN, after_decay, strength_TH, skip, h, span, codes, sources[i],
                targets[i], largest, keys_TGN, products, rings, reads, writes, ring_rows, y_THV,
            )  # fmt: skip


@subroutine(ELEMENTWISE)
def _read_head(
    q_TGN, v_THV, log_decay_TH, a_TGN, after_decay, strength_TH, skip, h, span, codes, source, target, largest,
    keys_TGN, products, rings, reads, writes, ring_rows, y_THV,
):  # fmt: skip
    start, end, first_slot, count, fold = span
    n_heads, n_rows = v_THV.shape[1:]
    g, n_tokens, erases = h // (n_heads // q_TGN.shape[1]), count + end - start, len(a_TGN) > 0
    u, w, behind = np.empty((end - start, n_rows), np.float32), np.empty(n_tokens, np.float32), np.empty(n_tokens, np.float32)
    for j in range(count):
        w[j] = get(rings[2], reads[2] + (first_slot + j) % ring_rows * n_heads + h)
    _exp_(w[:count])
    y, found, rounded = np.empty(n_rows, np.float32), np.zeros(n_rows, np.float32), np.empty(n_rows, rings[1].dtype)
    for t in range(start, end):
        p, value = count + t - start, v_THV[t, h]
        w[p] = exp_f32(log_decay_TH[t, h])
        whole = _products_of_decays(w, p, behind)
        _read_body(codes, source, h, q_TGN[t, g], whole, y)
        _add_tail(rings[1], reads[1], first_slot, ring_rows, n_heads, h, count, behind, products[t, g, 0], y)
        _add_new(u, count, p, behind, products[t, g, 0], y)
        if erases:
            _read_body(codes, source, h, a_TGN[t, g], whole, found)
            _add_tail(rings[1], reads[1], first_slot, ring_rows, n_heads, h, count, behind, products[t, g, 1], found)
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
        _fold(keys_TGN, g, u, w, h, span, codes, source, target, largest, rings, reads, ring_rows, n_heads)


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
        y[r] *= factor * _scale(codes, at + r * width + n)  # type: ignore[call-arg]


@subroutine()
def _add_tail(ring, block, first_slot, ring_rows, n_heads, h, count, behind, products, y):
    """Add to y what the tokens of the tail have written, weighted."""
    n_rows = len(y)
    n_wide, n_vectors = n_rows // (4 * LANES) * (4 * LANES), n_rows // LANES * LANES
    for r in range(0, n_wide, 4 * LANES):
        y0, y1, y2, y3 = load(y, r), load(y, r + LANES), load(y, r + 2 * LANES), load(y, r + 3 * LANES)
        for j in range(count):
            weight, at = splat(behind[j] * products[j]), block + ((first_slot + j) % ring_rows * n_heads + h) * n_rows + r
            y0, y1 = multiply_add(weight, load(ring, at), y0), multiply_add(weight, load(ring, at + LANES), y1)
            y2 = multiply_add(weight, load(ring, at + 2 * LANES), y2)
            y3 = multiply_add(weight, load(ring, at + 3 * LANES), y3)
        store(y, r, y0)
        store(y, r + LANES, y1)
        store(y, r + 2 * LANES, y2)
        store(y, r + 3 * LANES, y3)
    for r in range(n_wide, n_vectors, LANES):
        y0 = load(y, r)
        for j in range(count):
            at = block + ((first_slot + j) % ring_rows * n_heads + h) * n_rows + r
            y0 = multiply_add(splat(behind[j] * products[j]), load(ring, at), y0)
        store(y, r, y0)
    for r in range(n_vectors, n_rows):
        for j in range(count):
            at = block + ((first_slot + j) % ring_rows * n_heads + h) * n_rows + r
            y[r] += behind[j] * products[j] * get(ring, at)


@subroutine(ELEMENTWISE)
def _add_new(u, count, n, behind, products, y):
    """Add to y what the segment's own tokens before token n have written, weighted."""
    for j in range(count, n):
        weight, own = behind[j] * products[j], u[j - count]
        for r in range(len(y)):
            y[r] += weight * own[r]


@subroutine(ELEMENTWISE)
def _fold(keys_TGN, g, u, w, h, span, codes, source, target, largest, rings, reads, ring_rows, n_heads):
    """Make head h of a new body from the old one and from the tokens before the fold."""
    start, _, first_slot, count, fold = span
    n_groups, n = keys_TGN.shape[1:]
    n_rows, width = u.shape[1], n + SCALE_BYTES
    keys, written, behind = np.empty((fold, n), np.float32), np.empty((fold, n_rows), np.float32), np.empty(fold, np.float32)
    whole = _products_of_decays(w, fold, behind)
    for j in range(fold):
        if j < count:
            slot = (first_slot + j) % ring_rows
            at = reads[0] + (slot * n_groups + g) * n
            copy_(keys[j], rings[0][at : at + n])
            at = reads[1] + (slot * n_heads + h) * n_rows
            copy_(written[j], rings[1][at : at + n_rows])
        else:
            copy_(keys[j], keys_TGN[start + j - count, g])
            copy_(written[j], u[j - count])
        _scale_(written[j], behind[j])
    row = np.empty(n, np.float32)
    for r in range(n_rows):
        element = h * n_rows + r
        if source < 0:
            fill_(row, _ZERO)
        else:
            at = source + element * width
            factor = splat(whole * _scale(codes, at + n))  # type: ignore[call-arg]
            for e in range(0, n, LANES):
                store(row, e, multiply(factor, load_8_bits(codes, at + e)))
        _add_outer(row, keys, written, r)
        _encode_row(row, largest, codes, target + element * width, element * n, first_slot + fold)


@subroutine(ELEMENTWISE)
def _scale_(x, factor):
    for e in range(len(x)):
        x[e] *= factor


@subroutine()
def _add_outer(row, keys, written, r):
    n = len(row)
    n_wide = n // (4 * LANES) * (4 * LANES)
    for e in range(0, n_wide, 4 * LANES):
        s0, s1, s2, s3 = load(row, e), load(row, e + LANES), load(row, e + 2 * LANES), load(row, e + 3 * LANES)
        for j in range(len(keys)):
            weight, key = splat(written[j, r]), keys[j]
            s0, s1 = multiply_add(weight, load(key, e), s0), multiply_add(weight, load(key, e + LANES), s1)
            s2 = multiply_add(weight, load(key, e + 2 * LANES), s2)
            s3 = multiply_add(weight, load(key, e + 3 * LANES), s3)
        store(row, e, s0)
        store(row, e + LANES, s1)
        store(row, e + 2 * LANES, s2)
        store(row, e + 3 * LANES, s3)
    for e in range(n_wide, n, LANES):
        s0 = load(row, e)
        for j in range(len(keys)):
            s0 = multiply_add(splat(written[j, r]), load(keys[j], e), s0)
        store(row, e, s0)
