"""Attention over rows that a storage keeps and, after them, rows in pages: for few queries.

Codes of up to BLOCK rows of one head are turned into floats in the cache, and from there on are rows like others.
"""

from __future__ import annotations

import numpy as np
from numba import njit, prange
from torch import Tensor

from memory.interface import Int64s
from memory.kernels.cpu.rows import as_array
from memory.kernels.cpu.softmax import BLOCK, add_values_, scale_, score_rows, start_, weigh_
from memory.kernels.cpu.threads import ELEMENTWISE, use_threads
from memory.kernels.cpu.vector_math import float_from_bits
from memory.kernels.signature import FoldedRows, PagedBatch, Prepared, Scoring

_ONE = np.float32(1.0)
# Moving the bits of a short float to where those of a float32 stand leaves its exponent too small by the difference of their biases.
_HALF_BIAS, _FLOAT8_BIAS = np.float32(2.0**112), np.float32(2.0**120)
_NONE = np.zeros(0, np.uint16)


def attend_few_folded(
    q_THD: Tensor, keys: Prepared, values: Prepared, batch: PagedBatch, n_requests: int, n_kv_heads: int, scoring: Scoring,
    sinks: Prepared, bias_HL: Prepared, folded: FoldedRows, out_THD: Tensor,
) -> None:  # fmt: skip
    """Write the outputs of the first `n_requests` requests."""
    counts, lengths = np.diff(batch.cu_seqlens), batch.kv_lengths + folded.lengths
    use_threads(2 * q_THD[0].numel() * int((counts * lengths)[:n_requests].sum()))
    flats = [as_array(flat) for flat in folded.flats]
    parts = [flat if flat.dtype == np.uint8 else flat.view(np.uint16) for flat in flats]
    key_codes, key_scales, key_lows, value_codes, value_scales, value_lows = (
        parts if len(parts) == 6 else (parts[0], _NONE, _NONE, parts[1], _NONE, _NONE)
    )
    _attend_few(
        q_THD.contiguous().numpy(), as_array(keys), as_array(values), batch.cu_seqlens[: n_requests + 1], batch.kv_lengths,
        as_array(batch.pages), batch.cu_pages, batch.page_tokens, n_kv_heads, np.float32(scoring.scale),
        np.float32(scoring.softcap or 0.0), sinks, bias_HL, folded.storage.code_bits, key_codes, key_scales, key_lows, value_codes,
        value_scales, value_lows, *_scale_shapes(folded), folded.blocks, folded.cu_blocks, folded.block_rows, folded.lengths,
        out_THD.numpy(),
    )  # fmt: skip


def _scale_shapes(folded: FoldedRows) -> tuple[Int64s, Int64s]:
    """Of the scales of a head's keys and of its values: (rows, scales a row)."""
    n_parts = len(folded.shapes) // 2
    return tuple(np.array(half[1][1:] if n_parts > 1 else (0, 0)) for half in (folded.shapes[:n_parts], folded.shapes[n_parts:]))  # type: ignore[return-value]


@njit(parallel=True, fastmath=ELEMENTWISE, error_model="numpy", cache=True)
def _attend_few(  # type: ignore[no-untyped-def]
    q_THD, keys, values, cu_seqlens, kv_lengths, pages, cu_pages, page_tokens, n_kv_heads, scale, softcap, sinks, bias_HL,
    bits, key_codes, key_scales, key_lows, value_codes, value_scales, value_lows, key_scale_shape, value_scale_shape,
    blocks, cu_blocks, block_rows, folded_lengths, out_THD,
):  # fmt: skip
    """A task is a request and one of its key/value heads."""
    head_dim = q_THD.shape[2]
    n_heads = q_THD.shape[1] // n_kv_heads
    q_TR, out_TR = q_THD.reshape(len(q_THD), -1), out_THD.reshape(len(out_THD), -1)
    for task in prange((len(cu_seqlens) - 1) * n_kv_heads):
        i, g = task // n_kv_heads, task % n_kv_heads
        n_folded, own = folded_lengths[i], blocks[cu_blocks[i] : cu_blocks[i + 1]]
        table = pages[cu_pages[i] : cu_pages[i + 1]]
        some_keys, some_values = np.empty(BLOCK * head_dim, np.float32), np.empty(BLOCK * head_dim, np.float32)
        scales, lows = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
        places, rows = np.arange(BLOCK) * head_dim, np.empty(BLOCK, np.int64)
        scores = np.empty(n_heads * BLOCK, np.float32)
        highest, total = np.empty(n_heads, np.float32), np.empty(n_heads, np.float32)
        biases = bias_HL[g * n_heads : (g + 1) * n_heads]
        for t in range(cu_seqlens[i], cu_seqlens[i + 1]):
            n_rows = kv_lengths[i] - (cu_seqlens[i + 1] - 1 - t)
            q = q_TR[t, g * n_heads * head_dim : (g + 1) * n_heads * head_dim]
            out = out_TR[t, g * n_heads * head_dim : (g + 1) * n_heads * head_dim]
            start_(out, highest, total, sinks[g * n_heads : (g + 1) * n_heads])
            begin = 0
            while begin < n_folded:
                block, first = begin // block_rows, begin % block_rows
                n = min(BLOCK, n_folded - begin, block_rows - first)
                place = (own[block], g, block_rows, first, n, bits)
                _decode(key_codes, key_scales, key_lows, key_scale_shape, place, scales, lows, some_keys)
                _decode(value_codes, value_scales, value_lows, value_scale_shape, place, scales, lows, some_values)
                score_rows(q, some_keys, some_values, places[:n], n_heads, head_dim, scale, scores)
                weigh_(scores, n, out, highest, total, softcap, biases, n_folded + n_rows - 1 - begin)
                add_values_(out, some_values, places[:n], n_heads, head_dim, scores)
                begin += n
            for begin in range(0, n_rows, BLOCK):
                n = min(BLOCK, n_rows - begin)
                for r in range(n):
                    page, slot = (begin + r) // page_tokens, (begin + r) % page_tokens
                    rows[r] = table[page] + (slot * n_kv_heads + g) * head_dim
                score_rows(q, keys, values, rows[:n], n_heads, head_dim, scale, scores)
                weigh_(scores, n, out, highest, total, softcap, biases, n_rows - 1 - begin)
                add_values_(out, values, rows[:n], n_heads, head_dim, scores)
            for h in range(n_heads):
                scale_(out[h * head_dim : (h + 1) * head_dim], _ONE / total[h])


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def _decode(codes, halves, low_halves, scale_shape, place, scales, lows, out):  # type: ignore[no-untyped-def]
    """Rows [first, first + n) of head g in the block at byte `at`, as floats."""
    at, g, block_rows, first, n, bits = place
    head_dim = len(scales)
    code_bytes = head_dim if bits == 0 else head_dim * bits // 8
    scale_rows, scales_a_row = scale_shape[0], scale_shape[1]
    for r in range(n):
        code = at + (g * block_rows + first + r) * code_bytes
        row = out[r * head_dim : (r + 1) * head_dim]
        if bits == 0:
            _float8_(codes[code : code + code_bytes], row)
            continue
        if r == 0 or scale_rows > 1:
            of_row = at // 2 + (g * scale_rows + (first + r if scale_rows > 1 else 0)) * scales_a_row
            _spread_(halves[of_row : of_row + scales_a_row], scales)
            _spread_(low_halves[of_row : of_row + scales_a_row], lows)
        own = codes[code : code + code_bytes]
        for i in range(8 // bits):
            start, end = i * code_bytes, (i + 1) * code_bytes
            _numbers_(own, np.int32(i * bits), np.int32((1 << bits) - 1), scales[start:end], lows[start:end], row[start:end])


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def _numbers_(codes, shift, mask, scales, lows, out):  # type: ignore[no-untyped-def]
    for e in range(len(codes)):
        out[e] = np.float32((np.int32(codes[e]) >> shift) & mask) * scales[e] + lows[e]


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def _float8_(codes, out):  # type: ignore[no-untyped-def]
    """e4m3: a sign, four bits of exponent, three of mantissa."""
    for e in range(len(codes)):
        code = np.int32(codes[e])
        bits = ((code & np.int32(0x80)) << np.int32(24)) | ((code & np.int32(0x7F)) << np.int32(20))
        out[e] = float_from_bits(bits) * _FLOAT8_BIAS  # type: ignore[call-arg]


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def _spread_(halves, out):  # type: ignore[no-untyped-def]
    """float16 numbers, each for as many channels as share it."""
    n_channels = len(out) // len(halves)
    for i in range(len(halves)):
        half = np.int32(halves[i])
        bits = ((half & np.int32(0x8000)) << np.int32(16)) | ((half & np.int32(0x7FFF)) << np.int32(13))
        number = float_from_bits(bits) * _HALF_BIAS  # type: ignore[call-arg]
        for e in range(i * n_channels, (i + 1) * n_channels):
            out[e] = number
