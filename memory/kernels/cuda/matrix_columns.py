"""Computes matrix states with a decay per column, or with b, over many tokens on the GPU, as products of matrices.

Within a chunk, let G be the sums of log decays up to and including each token, H the sums that readings see (G, or the
sums before the reading's token), S the state before the chunk, u = strength v, and f = S_t a what each reading finds.
Then (as Peng et al. 2025, "RWKV-7 Goose", and Kimi Team 2025, "Kimi Linear", section 3, train in parallel)

    (I - AB) f = (exp(H) a) S^T + AK u          y = (exp(G) q) S^T + QK u + QB f
    S = S exp(G_C) + u^T (exp(G_C - G) k) + f^T (exp(G_C - G) b)

with AB_ij = sum over columns of exp(H_i - G_j) a_i b_j for j < i. AK, QK and QB are alike, with j <= i for q. Without
b, which is the delta rule, b = -strength k, so that u = strength (v - f) and only AK and QK are needed.

Differences of G are at most 0, while exp(-G) alone may be out of range. So the sums in AB, AK, QK and QB are computed
key by key instead of by tensor cores. They do not depend on S, so those of all chunks are computed before, in parallel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.kernels.cuda.choices import powers_of_2, tunable
from hybridmem.memory.kernels.cuda.launch import absent, dot, launch, load_rows, next_power_of_2
from hybridmem.memory.kernels.cuda.math import bound, count_pieces, first_piece, run_of, summable
from hybridmem.memory.kernels.cuda.matrix_chunks import SPARE, place_of, split_at, store_matrix
from hybridmem.memory.kernels.cuda.matrix_inputs import Inputs
from hybridmem.memory.kernels.cuda.matrix_tokens import add_tail
from hybridmem.memory.kernels.cuda.rings import no_rings, rings_of
from hybridmem.memory.kernels.signature import StateSlots


class ScanColumns(NamedTuple):
    """Holds a choice: tokens of a chunk, rows of a head's state in a program, and warps."""

    chunk: int
    rows: int
    num_warps: int


@tunable(
    "scan_columns", ScanColumns, chunk=powers_of_2(16, 64), rows=powers_of_2(16, 128), num_warps=powers_of_2(1, 16)
)
def _choose(n_rows: int, n_columns: int, itemsize: int, erases: bool) -> ScanColumns:
    """Choose 32 rows. With 128 columns that is more registers than an H100 has, but 16 rows take 1.3 times as long."""
    return ScanColumns(16, min(32, max(16, next_power_of_2(n_rows))), 4)


def scan_columns(inputs: Inputs, state: StateSlots, cu_rows: Tensor, y_THV: Tensor) -> None:
    """Compute `Kernels.matrix_scan` for segments of many tokens, with or without a tail."""
    n_heads, n_rows, n_columns = inputs.sizes
    n_runs, b, erases = len(state.cu_rows.host) - 1, absent(inputs.b, inputs.q), inputs.a is not None
    chunk, rows, num_warps = _choose(y_THV.device, n_rows, n_columns, inputs.v.element_size(), erases)
    rings = no_rings(cu_rows, 5) if state.tail is None else rings_of(state.tail, n_absent=2 if inputs.b is None else 0)
    common: dict[str, Any] = {
        "ERASES": erases, "HAS_STRENGTH": inputs.strength is not None, "BY_COLUMN": inputs.log_decay.dim() == 3,
        "HAS_B": inputs.b is not None, "AFTER_DECAY": inputs.after_decay, "HAS_TAIL": state.tail is not None,
        "COLUMNS": max(16, next_power_of_2(n_columns)), "CHUNK": chunk,
        "MATRICES": 4 if inputs.b is not None else 3 if erases else 1,
    }  # fmt: skip
    n_chunks = count_pieces(state.cu_rows.host, chunk, SPARE.value)
    weights = torch.empty(n_chunks, n_heads, common["MATRICES"], chunk, chunk, dtype=torch.float32, device=y_THV.device)
    launch(
        _weigh, (n_chunks, n_heads), *inputs.pointers[:9], *inputs.pointers[11:15], b, b.stride(0), cu_rows, n_runs,
        state.targets, rings[-2], rings[-1], weights, n_heads, n_columns, **common,
    )  # fmt: skip
    launch(
        _scan_columns, (ceil_div(n_rows, rows), n_heads, n_runs), *inputs.pointers, b, b.stride(0), y_THV, weights,
        cu_rows, state.flat, state.sources, state.targets, float(state.initial), *rings, n_heads, n_rows, n_columns,
        HAS_SKIP=inputs.skip is not None, ROWS=rows, num_warps=num_warps, **common,
    )  # fmt: skip


@triton.jit
def _load(x, stride, h, rows, end, n, n_columns):
    """Load those of a head's `rows` that are before `end` from a matrix x, as float32: (rows, columns)."""
    return load_rows(x + h * n_columns, stride, rows, rows < end, n, n_columns).to(tl.float32)


@triton.jit
def _sums(log_decay, decay_stride, h, rows, end, n, n_columns, BY_COLUMN: tl.constexpr, AFTER_DECAY: tl.constexpr):
    """Return log decays, their sums up to each row, and the sums that the row's reading sees (H), both in float64.

    Each is (CHUNK, COLUMNS) or (CHUNK, 1).
    """
    if BY_COLUMN:
        mask = (rows < end)[:, None] & (n < n_columns)[None, :]
        fade = tl.load(log_decay + (rows * decay_stride)[:, None] + h * n_columns + n[None, :], mask=mask, other=0.0)
        sums = tl.cumsum(summable(fade), axis=0)
    else:
        of_row = tl.load(log_decay + rows * decay_stride + h, mask=rows < end, other=0.0)
        # This case is separate because Triton 3.6 cannot compile a scan of a single column.
        fade, sums = of_row[:, None], tl.cumsum(summable(of_row), axis=0)[:, None]
    return fade, sums, sums if AFTER_DECAY else sums - summable(fade)


@triton.jit
def _weigh(
    q, q_stride, q_heads, k, k_stride, k_heads, a, a_stride, a_heads, log_decay, decay_stride, strength,
    strength_stride, b, b_stride, cu_rows, n_runs, targets, counts, folds, weights, n_heads, n_columns,
    ERASES: tl.constexpr, HAS_STRENGTH: tl.constexpr, BY_COLUMN: tl.constexpr, HAS_B: tl.constexpr,
    AFTER_DECAY: tl.constexpr, HAS_TAIL: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
    MATRICES: tl.constexpr,
):  # fmt: skip
    """Compute QK, (I - AB)^-1, AK and QB for one chunk of one head."""
    h, run = tl.program_id(1), run_of(tl.program_id(0), cu_rows, n_runs, CHUNK, SPARE)
    start, n_new, split = split_at(run, cu_rows, targets, counts, folds, HAS_TAIL)
    first, end = place_of(tl.program_id(0) - first_piece(run, cu_rows, CHUNK, SPARE), start, n_new, split, CHUNK)
    i, n = tl.arange(0, CHUNK), tl.arange(0, COLUMNS)
    rows = first + i
    _, sums, behind = _sums(log_decay, decay_stride, h, rows, end, n, n_columns, BY_COLUMN, AFTER_DECAY)
    query = _load(q, q_stride, h // q_heads, rows, end, n, n_columns)
    qk, ak = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    qb, ab = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    if ERASES:
        reading = _load(a, a_stride, h // a_heads, rows, end, n, n_columns)
    for j in range(CHUNK):
        mask = n < tl.where(first + j < end, n_columns, 0)
        key = tl.load(k + (first + j) * k_stride + h // k_heads * n_columns + n, mask=mask, other=0.0).to(tl.float32)
        sum_j = tl.sum(tl.where(i[:, None] == j, sums, 0.0), axis=0)[None, :]
        seen, is_column = i[:, None] >= j, i[None, :] == j
        asking = query * tl.exp(tl.where(seen, sums - sum_j, 0.0).to(tl.float32))
        qk = tl.where(is_column & seen, tl.sum(asking * key[None, :], axis=1)[:, None], qk)
        if ERASES:
            erasing = -key
            if HAS_B:
                erasing = tl.load(b + (first + j) * b_stride + h * n_columns + n, mask=mask, other=0.0).to(tl.float32)
            elif HAS_STRENGTH:
                erasing *= tl.load(strength + (first + j) * strength_stride + h, mask=first + j < end, other=0.0).to(
                    tl.float32
                )
            later = i[:, None] > j
            looking = reading * tl.exp(tl.where(later, behind - sum_j, 0.0).to(tl.float32))
            ak = tl.where(is_column & later, tl.sum(looking * key[None, :], axis=1)[:, None], ak)
            # The matrix is transposed, so that the elements of AB that one row needs are along the axis of the sum.
            is_row = (i[:, None] == j) & (i[None, :] > j)
            ab = tl.where(is_row, tl.sum(looking * erasing[None, :], axis=1)[None, :], ab)
            if HAS_B:
                qb = tl.where(is_column & seen, tl.sum(asking * erasing[None, :], axis=1)[:, None], qb)
    at = (
        weights
        + (tl.program_id(0) * n_heads + h).to(tl.int64) * MATRICES * CHUNK * CHUNK
        + i[:, None] * CHUNK
        + i[None, :]
    )
    tl.store(at, qk)
    if ERASES:
        inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
        for row in range(1, CHUNK):
            found = tl.sum(tl.where(i[None, :] == row, ab, 0.0), axis=1)
            inverse += tl.where(i[:, None] == row, tl.sum(found[:, None] * inverse, axis=0)[None, :], 0.0)
        tl.store(at + CHUNK * CHUNK, inverse)
        tl.store(at + 2 * CHUNK * CHUNK, ak)
        if HAS_B:
            tl.store(at + 3 * CHUNK * CHUNK, qb)


@triton.jit
def _advance(
    s, q, q_stride, q_heads, k, k_stride, k_heads, a, a_stride, a_heads, v, v_stride, log_decay, decay_stride, strength,
    strength_stride, skip, b, b_stride, y, weights, rows, end, h, r, n, writes, others, finds, n_heads, n_rows,
    n_columns, ERASES: tl.constexpr, HAS_STRENGTH: tl.constexpr, HAS_SKIP: tl.constexpr, BY_COLUMN: tl.constexpr,
    HAS_B: tl.constexpr, AFTER_DECAY: tl.constexpr, CHUNK: tl.constexpr, HAS_TAIL: tl.constexpr,
):  # fmt: skip
    """Advance a state by a chunk, whose `rows` are before `end`.

    Return it and each token's key, u, log decays, b and f.
    """
    i = tl.arange(0, CHUNK)
    at = weights + i[:, None] * CHUNK + i[None, :]
    query = _load(q, q_stride, h // q_heads, rows, end, n, n_columns)
    key = _load(k, k_stride, h // k_heads, rows, end, n, n_columns)
    value = _load(v, v_stride, h, rows, end, r, n_rows)
    fade, sums, behind = _sums(log_decay, decay_stride, h, rows, end, n, n_columns, BY_COLUMN, AFTER_DECAY)
    u, beta = value, 1.0
    if HAS_STRENGTH:
        beta = tl.load(strength + rows * strength_stride + h, mask=rows < end, other=0.0).to(tl.float32)[:, None]
        u = value * beta
    found, other = u, key
    if ERASES:
        reading = _load(a, a_stride, h // a_heads, rows, end, n, n_columns) * tl.exp(behind.to(tl.float32))
        found = dot(reading, tl.trans(s), tl.zeros_like(value))
        found = dot(tl.load(at + 2 * CHUNK * CHUNK), u, found)
        found = dot(tl.load(at + CHUNK * CHUNK), found, tl.zeros_like(value))
        if HAS_B:
            other = _load(b, b_stride, h, rows, end, n, n_columns)
        else:
            u -= beta * found
    if HAS_TAIL:  # Rings store these numbers in their own dtypes, so they are rounded to these before they are added.
        u = u.to(writes.dtype.element_ty).to(tl.float32)
        if HAS_B:
            found = found.to(finds.dtype.element_ty).to(tl.float32)
            other = other.to(others.dtype.element_ty).to(tl.float32)
    out = dot(query * tl.exp(sums.to(tl.float32)), tl.trans(s), tl.zeros_like(value))
    out = dot(tl.load(at), u, out)
    total = tl.sum(tl.where(i[:, None] == CHUNK - 1, sums, 0.0), axis=0)[None, :]
    left = tl.exp((total - sums).to(tl.float32))
    s = dot(tl.trans(u), key * left, s * tl.exp(total.to(tl.float32)))
    if HAS_B:
        out = dot(tl.load(at + 3 * CHUNK * CHUNK), found, out)
        s = dot(tl.trans(found), other * left, s)
    if HAS_SKIP:
        out += tl.load(skip + h).to(tl.float32) * value
    tl.store(
        y + (rows * n_heads + h)[:, None] * n_rows + r[None, :], out, mask=(rows < end)[:, None] & (r < n_rows)[None, :]
    )
    return s, key, u, fade, other, found


@triton.jit
def _scan_columns(
    q, q_stride, q_heads, k, k_stride, k_heads, a, a_stride, a_heads, v, v_stride, log_decay, decay_stride, strength,
    strength_stride, skip, b, b_stride, y, weights, cu_rows, flat, sources, targets, initial, keys, key_sources,
    key_targets, writes, write_sources, write_targets, decays, decay_sources, decay_targets, others, other_sources,
    other_targets, finds, find_sources, find_targets, ring_rows, firsts, counts, folds, n_heads, n_rows, n_columns,
    ERASES: tl.constexpr, HAS_STRENGTH: tl.constexpr, HAS_SKIP: tl.constexpr, BY_COLUMN: tl.constexpr,
    HAS_B: tl.constexpr, AFTER_DECAY: tl.constexpr, HAS_TAIL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, MATRICES: tl.constexpr,
):  # fmt: skip
    h, run = tl.program_id(1), tl.program_id(2)
    r, n, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, CHUNK)
    at, is_column = (h * n_rows + r)[:, None] * n_columns + n[None, :], (n < n_columns)[None, :]
    source, target = tl.load(sources + run), tl.load(targets + run)
    limit = bound(target, n_rows)
    start, n_new, split = split_at(run, cu_rows, targets, counts, folds, HAS_TAIL)
    weights += (first_piece(run, cu_rows, CHUNK, SPARE) * n_heads + h).to(tl.int64) * MATRICES * CHUNK * CHUNK
    s = tl.load(flat + source + at, mask=(r < bound(source, n_rows))[:, None] & is_column, other=initial).to(tl.float32)
    if HAS_TAIL:
        count, first = tl.load(counts + run).to(tl.int32), tl.load(firsts + run).to(tl.int32)
        s = add_tail(
            s, flat + target + at, limit, tl.load(folds + run).to(tl.int32), count, first, run, h, r, n, keys,
            key_sources, k_heads, writes, write_sources, decays, decay_sources, others, other_sources, finds,
            find_sources, ring_rows, n_heads, n_rows, n_columns, BY_COLUMN, HAS_B,
        )  # fmt: skip
        limit = tl.where(tl.load(folds + run) < count, 0, limit)
    for begin in range(0, split, CHUNK):
        s, _, _, _, _, _ = _advance(
            s, q, q_stride, q_heads, k, k_stride, k_heads, a, a_stride, a_heads, v, v_stride, log_decay, decay_stride,
            strength, strength_stride, skip, b, b_stride, y, weights, start + begin + i, start + split, h, r, n,
            writes, others, finds, n_heads, n_rows, n_columns, ERASES, HAS_STRENGTH, HAS_SKIP, BY_COLUMN, HAS_B,
            AFTER_DECAY, CHUNK, HAS_TAIL,
        )  # fmt: skip
        weights += n_heads * MATRICES * CHUNK * CHUNK
    tl.debug_barrier()  # All threads have read the state, so it can be written in place.
    tl.store(flat + target + at, s.to(flat.dtype.element_ty), mask=(r < limit)[:, None] & is_column)
    if HAS_TAIL:
        for begin in range(split, n_new, CHUNK):
            s, key, u, fade, other, found = _advance(
                s, q, q_stride, q_heads, k, k_stride, k_heads, a, a_stride, a_heads, v, v_stride, log_decay,
                decay_stride, strength, strength_stride, skip, b, b_stride, y, weights, start + begin + i,
                start + n_new, h, r, n, writes, others, finds, n_heads, n_rows, n_columns, ERASES, HAS_STRENGTH,
                HAS_SKIP, BY_COLUMN, HAS_B, AFTER_DECAY, CHUNK, HAS_TAIL,
            )  # fmt: skip
            weights += n_heads * MATRICES * CHUNK * CHUNK
            slots, is_new = (first + count + begin + i) % ring_rows, begin + i < n_new
            is_first = (begin + i) < tl.where(tl.program_id(0) == 0, n_new, 0)
            is_key = (begin + i) < tl.where((tl.program_id(0) == 0) & (h % k_heads == 0), n_new, 0)
            of_head, of_group = slots * n_heads + h, slots * (n_heads // k_heads) + h // k_heads
            store_matrix(writes + tl.load(write_targets + run), of_head * n_rows, u, r, n_rows, is_new)
            store_matrix(keys + tl.load(key_targets + run), of_group * n_columns, key, n, n_columns, is_key)
            decay = decays + tl.load(decay_targets + run)
            if BY_COLUMN:
                store_matrix(decay, of_head * n_columns, fade, n, n_columns, is_first)
            else:
                store_matrix(decay, of_head, fade, tl.zeros((1,), tl.int32), 1, is_first)
            if HAS_B:
                store_matrix(finds + tl.load(find_targets + run), of_head * n_rows, found, r, n_rows, is_new)
                store_matrix(others + tl.load(other_targets + run), of_head * n_columns, other, n, n_columns, is_first)
