"""Computes attention of few queries over quantized rows and, after them, rows in pages, on the CPU.

Codes of up to BLOCK rows of one head are decoded to floats, which stay in the cache and are used like other rows. If a
channel or a row has a single scale, the query, the scores or the weights are multiplied by it, not every number.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import prange
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.kernels.cpu.addresses import address_of, call_at
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.query_attention import NO_SINKS, biases_of
from hybridmem.memory.kernels.cpu.query_tiles import add_tiles_, score_tiles
from hybridmem.memory.kernels.cpu.rows import as_array, copy_
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, REDUCING, inlined, subroutine
from hybridmem.memory.kernels.cpu.softmax import BLOCK, find_rows, scale_, start_, weigh_unit_
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.cpu.vector_math import float_from_bits
from hybridmem.memory.kernels.cpu.vectors import LANES, load_codes, load_float8, store
from hybridmem.memory.kernels.signature import FoldedRows, PagedBatch, Prepared, Scoring

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_BY_NUMBER, _BY_CHANNEL, _BY_ROW = 0, 1, 2
_0, _1, _2, _3, _LANES, _LAST_LANE = (np.uint64(i) for i in (0, 1, 2, 3, LANES, LANES - 1))
# If the bits of a short float are moved to the places of a float32's bits, the exponent is too small by the difference
# of the two biases. These factors correct it.
_HALF_BIAS, _FLOAT8_BIAS = np.float32(2.0**112), np.float32(2.0**120)
_NONE = np.zeros(0, np.uint16)


def attend_few_folded(
    q_THD: Tensor, keys: Prepared, values: Prepared, batch: PagedBatch, n_kv_heads: int, scoring: Scoring,
    folded: FoldedRows, out_THD: Tensor,
) -> None:  # fmt: skip
    """Attend from the requests of the batch, to which the first queries belong, and write into `out_THD`."""
    sinks = NO_SINKS if scoring.sinks_H is None else as_array(scoring.sinks_H.contiguous())
    bias_QHL = biases_of(scoring)
    counts, lengths = np.diff(batch.cu_seqlens), batch.kv_lengths + folded.lengths[: len(batch.kv_lengths)]
    use_threads(2 * q_THD[0].numel() * int((counts * lengths).sum()))
    flats = [as_array(flat) for flat in folded.flats]
    parts = [flat if flat.dtype == np.uint8 else flat.view(np.uint16) for flat in flats]
    key_codes, key_scales, key_lows, value_codes, value_scales, value_lows = (
        parts if len(parts) == 6 else (parts[0], _NONE, _NONE, parts[1], _NONE, _NONE)
    )
    q, k = as_array(q_THD.contiguous()), as_array(keys)
    types = (part.dtype for part in (key_codes, key_scales, key_lows, value_codes, value_scales, value_lows))
    _attend_few(
        _attend_address(q.dtype, k.dtype, sinks.dtype, bias_QHL.dtype, *types), q, k, as_array(values),
        batch.cu_seqlens, batch.kv_lengths, as_array(batch.pages), batch.cu_pages, batch.page_tokens,
        n_kv_heads, np.float32(scoring.scale), np.float32(scoring.softcap or 0.0), sinks, bias_QHL,
        folded.storage.code_bits,
        key_codes, key_scales, key_lows, value_codes, value_scales, value_lows, *_scale_shapes(folded),
        np.atleast_2d(as_array(folded.blocks)), folded.cu_blocks, folded.block_rows, folded.lengths, as_array(out_THD),
    )  # fmt: skip


def _scale_shapes(folded: FoldedRows) -> tuple[Int64s, Int64s]:
    """Return the shapes of the scales of a head's keys and of its values: (rows, scales per row)."""
    n_parts = len(folded.shapes) // 2
    return tuple(
        np.array(half[1][1:] if n_parts > 1 else (0, 0)) for half in (folded.shapes[:n_parts], folded.shapes[n_parts:])
    )  # type: ignore[return-value]


@cache
def _attend_address(queries: np.dtype, keys: np.dtype, sinks: np.dtype, biases: np.dtype, *parts: np.dtype) -> int:
    """Return the address of `_attend_task`'s machine code for arrays of these types."""
    i, x, ids, rows = 0, _ONE, np.empty(0, np.int64), np.empty(0, keys)
    q_TR, codes = np.empty((0, 0), queries), tuple(np.empty(0, dtype) for dtype in parts)
    return address_of(
        _attend_task, i, q_TR, rows, rows, ids, ids, ids, ids, i, i, i, x, x, np.empty(0, sinks),
        np.empty((0, 0, 0), biases), i, *codes, ids, ids, ids.reshape(0, 0), ids, i, ids, q_TR,
    )  # fmt: skip


@compiled(parallel=True)
def _attend_few(
    attend_at, q_THD, keys, values, cu_seqlens, kv_lengths, pages, cu_pages, page_tokens, n_kv_heads, scale, softcap,
    sinks, bias_QHL, bits, key_codes, key_scales, key_lows, value_codes, value_scales, value_lows, key_scale_shape,
    value_scale_shape, blocks_GB, cu_blocks, block_rows, folded_lengths, out_THD,
):  # fmt: skip
    """Attend from all requests in several threads. A task is a request and one of its key/value heads.

    Tasks are called by their address, as in `memory.kernels.cpu.query_attention`.
    """
    q_TR, out_TR = q_THD.reshape(len(q_THD), -1), out_THD.reshape(len(out_THD), -1)
    n_heads = q_THD.shape[1] // n_kv_heads
    for task in prange((len(cu_seqlens) - 1) * n_kv_heads):
        call_at(attend_at, (
            task, q_TR, keys, values, cu_seqlens, kv_lengths, pages, cu_pages, page_tokens, n_kv_heads, n_heads, scale,
            softcap, sinks, bias_QHL, bits, key_codes, key_scales, key_lows, value_codes, value_scales, value_lows,
            key_scale_shape, value_scale_shape, blocks_GB, cu_blocks, block_rows, folded_lengths, out_TR,
        ))  # fmt: skip


@compiled(ELEMENTWISE)
def _attend_task(
    task, q_TR, keys, values, cu_seqlens, kv_lengths, pages, cu_pages, page_tokens, n_kv_heads, n_heads, scale,
    softcap, sinks, bias_QHL, bits, key_codes, key_scales, key_lows, value_codes, value_scales, value_lows,
    key_scale_shape, value_scale_shape, blocks_GB, cu_blocks, block_rows, folded_lengths, out_TR,
):  # fmt: skip
    """Attend from one request with the queries of one key/value head, over folded rows and then over pages."""
    head_dim = q_TR.shape[1] // (n_heads * n_kv_heads)
    keys_fold = _BY_CHANNEL if _may_be_by_channel(bits, key_scale_shape, head_dim) else _fold_of(bits, key_scale_shape)
    values_fold = _fold_of(bits, value_scale_shape)
    i, g = task // n_kv_heads, task % n_kv_heads
    n_folded, own = folded_lengths[i], blocks_GB[g if len(blocks_GB) > 1 else 0][cu_blocks[i] : cu_blocks[i + 1]]
    table = pages[cu_pages[i] : cu_pages[i + 1]]
    floats = np.empty(BLOCK * head_dim, np.float32)
    scales, lows = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    row_scales, row_lows = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    q_scaled, offsets = np.empty(n_heads * head_dim, np.float32), np.empty(n_heads, np.float32)
    places, rows, counts = np.arange(BLOCK) * head_dim, np.empty(BLOCK, np.int64), np.empty(1, np.int64)
    scores = np.empty(n_heads * BLOCK, np.float32)
    highest, total = np.empty(n_heads, np.float32), np.empty(n_heads, np.float32)
    q, out = np.empty(n_heads * head_dim, np.float32), np.empty(n_heads * head_dim, np.float32)
    for t in range(cu_seqlens[i], cu_seqlens[i + 1]):
        n_rows = kv_lengths[i] - (cu_seqlens[i + 1] - 1 - t)
        copy_(q, q_TR[t, g * n_heads * head_dim : (g + 1) * n_heads * head_dim])
        start_(out, highest, total, sinks[g * n_heads : (g + 1) * n_heads])
        biases = bias_QHL[min(t, len(bias_QHL) - 1)][g * n_heads : (g + 1) * n_heads]
        begin = 0
        while begin < n_folded:
            block, first = begin // block_rows, begin % block_rows
            n = min(BLOCK, n_folded - begin, block_rows - first)
            place = (own[block], g, block_rows, first, n, bits)
            _decode(key_codes, key_scales, key_lows, key_scale_shape, place, keys_fold, head_dim, floats)
            if keys_fold == _BY_CHANNEL:
                _read_scales(key_scales, key_lows, key_scale_shape, place, scales, lows)
                _scale_query_(q, scales, lows, q_scaled, offsets)
                score_tiles(q_scaled, floats, floats, places[:n], n_heads, head_dim, scale, scores)
                _add_offsets_(scores, n, offsets, scale)
            else:
                score_tiles(q, floats, floats, places[:n], n_heads, head_dim, scale, scores)
                if keys_fold == _BY_ROW:
                    _read_scales(key_scales, key_lows, key_scale_shape, place, row_scales, row_lows)
                    _scale_scores_(scores, n, q, row_scales, row_lows, scale)
            _weigh_(scores, n, out, highest, total, softcap, biases, n_folded + n_rows - 1 - begin)
            _decode(value_codes, value_scales, value_lows, value_scale_shape, place, values_fold, head_dim, floats)
            if values_fold == _BY_ROW:
                _read_scales(value_scales, value_lows, value_scale_shape, place, row_scales, row_lows)
                _scale_weights_(scores, n, out, row_scales, row_lows)
            counts[0] = n
            add_tiles_(out, floats, places[:n], counts, n_heads, n_heads, head_dim, scores)
            begin += n
        for begin in range(0, n_rows, BLOCK):
            n = min(BLOCK, n_rows - begin)
            find_rows(table, begin, page_tokens, g, head_dim, rows[:n])
            score_tiles(q, keys, values, rows[:n], n_heads, head_dim, scale, scores)
            _weigh_(scores, n, out, highest, total, softcap, biases, n_rows - 1 - begin)
            counts[0] = n
            add_tiles_(out, values, rows[:n], counts, n_heads, n_heads, head_dim, scores)
        for h in range(n_heads):
            scale_(out[h * head_dim : (h + 1) * head_dim], _ONE / total[h])
        copy_(out_TR[t, g * n_heads * head_dim : (g + 1) * n_heads * head_dim], out)


@subroutine()
def _weigh_(scores, n, out, highest, total, softcap, bias_HL, distance):
    """Replace the scores of all heads by weights."""
    head_dim = len(out) // len(highest)
    for h in range(len(highest)):
        weigh_unit_(
            scores[h * BLOCK : h * BLOCK + n], out[h * head_dim : (h + 1) * head_dim], highest, total, h, softcap,
            bias_HL[h : h + 1].reshape(-1), distance,
        )  # fmt: skip


@subroutine()
def _may_be_by_channel(bits, scale_shape, head_dim):
    """Return whether scales of keys can be applied by channel. Those of values never are.

    A block of one row whose groups have one channel has such scales as well, and can be read either way.
    """
    return bits > 0 and scale_shape[0] == 1 and scale_shape[1] == head_dim


@subroutine()
def _fold_of(bits, scale_shape):
    """Return how scales of groups are applied: to each number, or to products with codes, by row."""
    return _BY_ROW if bits > 0 and scale_shape[1] == 1 else _BY_NUMBER


@subroutine()
def _decode(codes, halves, low_halves, scale_shape, place, fold, head_dim, out):
    """Decode rows [first, first + n) of head g in the block at byte `at`, as floats.

    Scales and lows are left out if a product is multiplied by them instead. The code has no slices, because making a
    slice takes as long as decoding 16 codes.
    """
    at, g, block_rows, first, n, bits = place
    scale_rows, scales_a_row = scale_shape[0], scale_shape[1]
    code_bytes = head_dim if bits == 0 else head_dim * bits // 8
    code, n_bytes = np.uint64(at + (g * block_rows + first) * code_bytes), np.uint64(n * code_bytes)
    if bits == 0:
        _float8_(codes, code, out, _0, n_bytes)
    elif bits == 8:
        _codes_(codes, code, np.int32(0), np.int32(255), out, _0, n_bytes)
    else:
        for r in range(n):
            _row_(codes, code + np.uint64(r * code_bytes), bits, out, np.uint64(r * head_dim), np.uint64(code_bytes))
    if bits > 0 and fold == _BY_NUMBER:
        n_channels = np.uint64(head_dim // scales_a_row)
        for r in range(n):
            of_row, row = np.uint64(at // 2 + (g * scale_rows + first + r) * scales_a_row), np.uint64(r * head_dim)
            for i in range(np.uint64(scales_a_row)):
                scale, low = _half(halves[of_row + i]), _half(low_halves[of_row + i])
                for e in range(row + i * n_channels, row + (i + _1) * n_channels):
                    out[e] = out[e] * scale + low


@inlined
def _row_(codes, code, bits, out, row, n_bytes):
    """Decode a row of 4-bit or 2-bit codes: the first code of all bytes, then the second of all, and so on."""
    if bits == 4 and n_bytes & _LAST_LANE == _0:
        for e in range(_0, n_bytes, _LANES):
            store(out, row + e, load_codes(codes, code + e, np.int32(0), np.int32(15)))
            store(out, row + n_bytes + e, load_codes(codes, code + e, np.int32(4), np.int32(15)))
    elif bits == 2 and n_bytes & _LAST_LANE == _0:
        for e in range(_0, n_bytes, _LANES):
            at = row + e
            store(out, at, load_codes(codes, code + e, np.int32(0), np.int32(3)))
            store(out, at + n_bytes, load_codes(codes, code + e, np.int32(2), np.int32(3)))
            store(out, at + _2 * n_bytes, load_codes(codes, code + e, np.int32(4), np.int32(3)))
            store(out, at + _3 * n_bytes, load_codes(codes, code + e, np.int32(6), np.int32(3)))
    else:
        for i in range(8 // bits):
            _codes_(
                codes, code, np.int32(i * bits), np.int32((1 << bits) - 1), out, row + np.uint64(i) * n_bytes, n_bytes
            )


@inlined
def _codes_(codes, code, shift, mask, out, at, n):
    e = _0
    while e + _LANES <= n:
        store(out, at + e, load_codes(codes, code + e, shift, mask))
        e += _LANES
    while e < n:
        out[at + e] = np.float32((np.int32(codes[code + e]) >> shift) & mask)
        e += _1


@inlined
def _float8_(codes, code, out, row, n):
    e = _0
    while e + _LANES <= n:
        store(out, row + e, load_float8(codes, code + e))
        e += _LANES
    while e < n:
        x = np.int32(codes[code + e])
        bits = ((x & np.int32(0x80)) << np.int32(24)) | ((x & np.int32(0x7F)) << np.int32(20))
        out[row + e] = float_from_bits(bits) * _FLOAT8_BIAS  # type: ignore[call-arg]
        e += _1


@inlined
def _half(bits):
    x = np.int32(bits)
    moved = ((x & np.int32(0x8000)) << np.int32(16)) | ((x & np.int32(0x7FFF)) << np.int32(13))
    return float_from_bits(moved) * _HALF_BIAS  # type: ignore[call-arg]


@subroutine()
def _read_scales(halves, low_halves, scale_shape, place, scales, lows):
    """Read scales and lows as float32: one for each channel, or one for each of n rows."""
    at, g, _, first, n, _ = place
    start, count = (
        (at // 2 + g * scale_shape[1], scale_shape[1])
        if scale_shape[0] == 1
        else (at // 2 + g * scale_shape[0] + first, n)
    )
    for i in range(count):
        scales[i], lows[i] = _half(halves[start + i]), _half(low_halves[start + i])


@subroutine(REDUCING)
def _scale_query_(q, scales, lows, q_scaled, offsets):
    """Scale a query by channel: q . (code scale + low) = (q scale) . code + q . low"""
    head_dim = len(scales)
    for h in range(len(offsets)):
        own, scaled, offset = q[h * head_dim : (h + 1) * head_dim], q_scaled[h * head_dim : (h + 1) * head_dim], _ZERO
        for d in range(head_dim):
            scaled[d] = own[d] * scales[d]
            offset += own[d] * lows[d]
        offsets[h] = offset


@subroutine(ELEMENTWISE)
def _add_offsets_(scores, n, offsets, scale):
    for h in range(len(offsets)):
        own, offset = scores[h * BLOCK : h * BLOCK + n], offsets[h] * scale
        for r in range(n):
            own[r] += offset


@subroutine(REDUCING)
def _scale_scores_(scores, n, q, row_scales, row_lows, scale):
    """Scale scores by row: q . (code scale + low) = (q . code) scale + sum(q) low"""
    head_dim = len(q) // (len(scores) // BLOCK)
    for h in range(len(scores) // BLOCK):
        own, offset = scores[h * BLOCK : h * BLOCK + n], _ZERO
        for d in range(h * head_dim, (h + 1) * head_dim):
            offset += q[d]
        offset *= scale
        for r in range(n):
            own[r] = own[r] * row_scales[r] + offset * row_lows[r]


@subroutine(REDUCING)
def _scale_weights_(weights, n, out, row_scales, row_lows):
    """Scale weights by row: sum of w (code scale + low) = sum of (w scale) code + sum of w low.
    The last sum is added to `out`.
    """
    head_dim = len(out) // (len(weights) // BLOCK)
    for h in range(len(weights) // BLOCK):
        own, below, offset = weights[h * BLOCK : h * BLOCK + n], out[h * head_dim : (h + 1) * head_dim], _ZERO
        for r in range(n):
            offset += own[r] * row_lows[r]
            own[r] *= row_scales[r]
        for d in range(head_dim):
            below[d] += offset
