"""Computes matrix states with one decay per head over many tokens on the GPU: in chunks, as products of matrices.
A program computes one segment over some rows of one head's state. A chunk has 16 or 32 tokens by default.

Within a chunk, let G be the sum of log decays up to and including each token, S the state before the chunk, and U the
rows that are written. Then

    Y = exp(G) Q S^T + (Q K^T * exp(G_i - G_j), j <= i) U          S = exp(G_C) S + (exp(G_C - G) U)^T K

where U = strength V. For the delta rule, U is what remains of that after each token has erased what its key finds (Yang
et al. 2024, "Parallelizing Linear Transformers with the Delta Rule", eq. 10; with decays "Gated Delta Networks",
section 3.3):

    (I + A) U = strength (V - exp(G) K S^T)          A_ij = strength_i (k_i . k_j) exp(G_i - G_j), j < i

The inverse of I + A does not depend on S, so the inverses of all chunks are computed before, in parallel, by forward
substitution. If rows fold within a segment, a chunk ends at the fold, where the new body is stored.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.kernels.cuda.choices import powers_of_2, tunable
from hybridmem.memory.kernels.cuda.launch import dot, launch, load_rows, next_power_of_2
from hybridmem.memory.kernels.cuda.math import bound, count_pieces, first_piece, run_of, summable
from hybridmem.memory.kernels.cuda.matrix_inputs import Inputs
from hybridmem.memory.kernels.cuda.matrix_tails import fold_tail
from hybridmem.memory.kernels.cuda.rings import no_rings, rings_of
from hybridmem.memory.kernels.signature import StateSlots

SPARE = tl.constexpr(2)
"""How many chunks a segment may have in addition to its full ones: the last one, and the one that ends at a body."""


class ScanChunks(NamedTuple):
    """Holds a choice: tokens of a chunk, rows of a head's state in a program, warps, and chunks in flight."""

    chunk: int
    rows: int
    num_warps: int
    num_stages: int


@tunable(
    "scan_chunks",
    ScanChunks,
    chunk=powers_of_2(16, 128),
    rows=powers_of_2(16, 128),
    num_warps=powers_of_2(1, 16),
    num_stages=range(1, 5),
)
def _choose(n_rows: int, n_columns: int, itemsize: int, erases: bool) -> ScanChunks:
    """Choose chunks of 32 tokens, or of 16 if numbers are wider than 16 bits.

    Products of float32 need more registers. If they do not fit, an H100 takes ten times as long.
    """
    return ScanChunks(32 if itemsize == 2 else 16, min(32, max(16, next_power_of_2(n_rows))), 4, 2)


def scan_chunks(inputs: Inputs, state: StateSlots, cu_rows: Tensor, y_THV: Tensor) -> None:
    """Compute `Kernels.matrix_scan` for segments of many tokens, with or without a tail."""
    n_heads, n_rows, n_columns = inputs.sizes
    n_runs, columns, device = len(state.cu_rows.host) - 1, max(16, next_power_of_2(n_columns)), y_THV.device
    chunk, rows, num_warps, num_stages = _choose(
        device, n_rows, n_columns, inputs.v.element_size(), inputs.a is not None
    )
    rings = no_rings(cu_rows, 3) if state.tail is None else rings_of(state.tail)
    common: dict[str, Any] = {
        "COLUMNS": columns,
        "CHUNK": chunk,
        "HAS_TAIL": state.tail is not None,
    }
    inverses = y_THV
    if inputs.a is not None:
        n_chunks = count_pieces(state.cu_rows.host, chunk, SPARE.value)
        inverses = torch.empty(n_chunks, n_heads, chunk, chunk, dtype=torch.float32, device=device)
        launch(
            _invert, (n_chunks, n_heads), *inputs.pointers[3:9], *inputs.pointers[11:15], cu_rows, n_runs,
            state.targets, rings[-2], rings[-1], inverses, n_heads, n_columns, HAS_STRENGTH=inputs.strength is not None,
            **common,
        )  # fmt: skip
    launch(
        _scan_chunks, (ceil_div(n_rows, rows), n_heads, n_runs),
        *inputs.pointers, y_THV, inverses, cu_rows, state.flat, state.sources, state.targets, float(state.initial),
        *rings, n_heads, n_rows, n_columns, **inputs.flags, ROWS=rows, num_warps=num_warps,
        num_stages=num_stages, **common,
    )  # fmt: skip


@triton.jit
def split_at(run, cu_rows, targets, counts, folds, HAS_TAIL: tl.constexpr):
    """Return a segment's first row, its number of rows, and how many of them come before the new body.

    All rows come before it if the body is at the segment's end or there is no tail, and none if no body is written in
    the segment.
    """
    start = tl.load(cu_rows + run)
    n_new = (tl.load(cu_rows + run + 1) - start).to(tl.int32)
    split = n_new
    if HAS_TAIL:
        split = tl.where(
            tl.load(targets + run) < 0, 0, tl.maximum(tl.load(folds + run) - tl.load(counts + run), 0).to(tl.int32)
        )
    return start, n_new, split


@triton.jit
def place_of(chunk, start, n_new, split, CHUNK: tl.constexpr):
    """Return the first row of a segment's chunk, and where the chunk's rows end. A chunk also ends at a new body."""
    n_before = tl.cdiv(split, CHUNK)
    first = tl.where(chunk < n_before, chunk * CHUNK, split + (chunk - n_before) * CHUNK)
    return start + first, start + tl.where(chunk < n_before, split, n_new)


@triton.jit
def _fades(log_decay, decay_stride, h, rows, end):
    """Return sums of log decays up to each row, in float64, so that differences of sums are as exact as the decays."""
    fade = tl.load(log_decay + rows * decay_stride + h, mask=rows < end, other=0.0)
    return tl.cumsum(summable(fade), axis=0)


@triton.jit
def _invert(
    k, k_stride, k_heads, a, a_stride, a_heads, log_decay, decay_stride, strength, strength_stride, cu_rows, n_runs,
    targets, counts, folds, inverses, n_heads, n_columns, HAS_STRENGTH: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, HAS_TAIL: tl.constexpr,
):  # fmt: skip
    """Compute (I + A)^-1 for one chunk of one head: row i is e_i minus the sum of A_ij times row j."""
    h, run = tl.program_id(1), run_of(tl.program_id(0), cu_rows, n_runs, CHUNK, SPARE)
    start, n_new, split = split_at(run, cu_rows, targets, counts, folds, HAS_TAIL)
    first, end = place_of(tl.program_id(0) - first_piece(run, cu_rows, CHUNK, SPARE), start, n_new, split, CHUNK)
    i, n = tl.arange(0, CHUNK), tl.arange(0, COLUMNS)
    rows = first + i
    key = load_rows(k + h // k_heads * n_columns, k_stride, rows, rows < end, n, n_columns)
    reading = load_rows(a + h // a_heads * n_columns, a_stride, rows, rows < end, n, n_columns)
    fade = _fades(log_decay, decay_stride, h, rows, end)
    left = tl.exp(tl.where(i[:, None] < i[None, :], fade[None, :] - fade[:, None], 0.0).to(tl.float32))
    # The matrix is transposed, so that the elements of A that one row needs are along the axis of the sum.
    transposed = dot(key, tl.trans(reading), tl.zeros((CHUNK, CHUNK), tl.float32)) * left
    if HAS_STRENGTH:
        transposed *= tl.load(strength + rows * strength_stride + h, mask=rows < end, other=0.0).to(tl.float32)[None, :]
    transposed = tl.where(i[:, None] < i[None, :], transposed, 0.0)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    for row in range(1, CHUNK):
        weights = tl.sum(tl.where(i[None, :] == row, transposed, 0.0), axis=1)
        inverse -= tl.where(i[:, None] == row, tl.sum(weights[:, None] * inverse, axis=0)[None, :], 0.0)
    at = (tl.program_id(0) * n_heads + h).to(tl.int64) * CHUNK * CHUNK
    tl.store(inverses + at + i[:, None] * CHUNK + i[None, :], inverse)


@triton.jit
def _advance(
    s, q, q_stride, q_heads, k, k_stride, k_heads, a, a_stride, a_heads, v, v_stride, log_decay, decay_stride, strength,
    strength_stride, skip, y, inverse, rows, end, h, r, n, writes, n_heads, n_rows, n_columns, ERASES: tl.constexpr,
    HAS_STRENGTH: tl.constexpr, HAS_SKIP: tl.constexpr, CHUNK: tl.constexpr, HAS_TAIL: tl.constexpr,
):  # fmt: skip
    """Advance a state by a chunk, whose `rows` are before `end`. Return the state, U (CHUNK, ROWS) and the keys."""
    i = tl.arange(0, CHUNK)
    query = load_rows(q + h // q_heads * n_columns, q_stride, rows, rows < end, n, n_columns)
    key = load_rows(k + h // k_heads * n_columns, k_stride, rows, rows < end, n, n_columns)
    value = load_rows(v + h * n_rows, v_stride, rows, rows < end, r, n_rows).to(tl.float32)
    fade = _fades(log_decay, decay_stride, h, rows, end)
    so_far = tl.exp(fade.to(tl.float32))[:, None]
    u = value
    if ERASES:
        reading = load_rows(a + h // a_heads * n_columns, a_stride, rows, rows < end, n, n_columns)
        u -= so_far * dot(reading, tl.trans(s), tl.zeros_like(value))
    if HAS_STRENGTH:
        u *= tl.load(strength + rows * strength_stride + h, mask=rows < end, other=0.0).to(tl.float32)[:, None]
    if ERASES:
        u = dot(tl.load(inverse + i[:, None] * CHUNK + i[None, :]), u, tl.zeros_like(value))
    if HAS_TAIL:  # The ring stores these numbers in its own dtype, so they are rounded to it before they are added.
        u = u.to(writes.dtype.element_ty)
    seen = i[:, None] >= i[None, :]
    left = tl.exp(tl.where(seen, fade[:, None] - fade[None, :], 0.0).to(tl.float32))
    weights = tl.where(seen, dot(query, tl.trans(key), tl.zeros((CHUNK, CHUNK), tl.float32)) * left, 0.0)
    out = dot(weights, u, so_far * dot(query, tl.trans(s), tl.zeros_like(value)))
    if HAS_SKIP:
        out += tl.load(skip + h).to(tl.float32) * value
    tl.store(
        y + (rows * n_heads + h)[:, None] * n_rows + r[None, :], out, mask=(rows < end)[:, None] & (r < n_rows)[None, :]
    )
    total = tl.sum(tl.where(i == CHUNK - 1, fade, 0.0), axis=0)
    faded = u * tl.exp((total - fade).to(tl.float32))[:, None]
    s = dot(tl.trans(faded), key, tl.exp(total.to(tl.float32)) * s)
    return s, u, key


@triton.jit
def _scan_chunks(
    q, q_stride, q_heads, k, k_stride, k_heads, a, a_stride, a_heads, v, v_stride, log_decay, decay_stride, strength,
    strength_stride, skip, y, inverses, cu_rows, flat, sources, targets, initial, keys, key_sources, key_targets,
    writes, write_sources, write_targets, decays, decay_sources, decay_targets, ring_rows, firsts, counts, folds,
    n_heads, n_rows, n_columns, ERASES: tl.constexpr, HAS_STRENGTH: tl.constexpr, HAS_SKIP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, HAS_TAIL: tl.constexpr,
):  # fmt: skip
    h, run = tl.program_id(1), tl.program_id(2)
    r, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_column, i = (n < n_columns)[None, :], tl.arange(0, CHUNK)
    at = (h * n_rows + r)[:, None] * n_columns + n[None, :]
    source, target = tl.load(sources + run), tl.load(targets + run)
    start, n_new, split = split_at(run, cu_rows, targets, counts, folds, HAS_TAIL)
    inverse = inverses + (first_piece(run, cu_rows, CHUNK, SPARE) * n_heads + h).to(tl.int64) * CHUNK * CHUNK
    s = tl.load(flat + source + at, mask=(r < bound(source, n_rows))[:, None] & is_column, other=initial).to(tl.float32)
    if HAS_TAIL:
        count = tl.load(counts + run).to(tl.int32)
        first = tl.load(firsts + run).to(tl.int32)
        n_keys = n_heads // k_heads * n_columns
        fold = tl.where(target < 0, 0, tl.load(folds + run).to(tl.int32))
        old_key = tl.load(key_sources + run) + h // k_heads * n_columns
        old_write = tl.load(write_sources + run) + h * n_rows
        old_decay = tl.load(decay_sources + run) + h
        s = fold_tail(
            s, 0, tl.minimum(fold, count), r, n, count, keys, old_key, k, k_stride, n_keys, writes, old_write,
            old_write, decays, old_decay, log_decay, decay_stride, first, ring_rows, n_heads, n_rows, n_columns, CHUNK,
        )  # fmt: skip
        _store(flat, target, at, s, tl.where(fold > count, -1, target), r, n_rows, is_column)
        s = fold_tail(
            s, tl.minimum(fold, count), count, r, n, count, keys, old_key, k, k_stride, n_keys, writes, old_write,
            old_write, decays, old_decay, log_decay, decay_stride, first, ring_rows, n_heads, n_rows, n_columns, CHUNK,
        )  # fmt: skip
        target = tl.where(fold > count, target, -1)
    for chunk in range(tl.cdiv(split, CHUNK)):
        s, u, key = _advance(
            s, q, q_stride, q_heads, k, k_stride, k_heads, a, a_stride, a_heads, v, v_stride, log_decay, decay_stride,
            strength, strength_stride, skip, y, inverse, start + chunk * CHUNK + i, start + split, h, r, n, writes,
            n_heads, n_rows, n_columns, ERASES, HAS_STRENGTH, HAS_SKIP, CHUNK, HAS_TAIL,
        )  # fmt: skip
        inverse += n_heads * CHUNK * CHUNK
    tl.debug_barrier()  # All threads have read the state, so it can be written in place.
    _store(flat, target, at, s, target, r, n_rows, is_column)
    if HAS_TAIL:
        key_place = tl.load(key_targets + run) + h // k_heads * n_columns
        write_place = tl.load(write_targets + run) + h * n_rows
        for begin in range(split, n_new, CHUNK):
            s, u, key = _advance(
                s, q, q_stride, q_heads, k, k_stride, k_heads, a, a_stride, a_heads, v, v_stride, log_decay,
                decay_stride, strength, strength_stride, skip, y, inverse, start + begin + i, start + n_new, h, r, n,
                writes, n_heads, n_rows, n_columns, ERASES, HAS_STRENGTH, HAS_SKIP, CHUNK, HAS_TAIL,
            )  # fmt: skip
            inverse += n_heads * CHUNK * CHUNK
            slots, is_new = (first + count + begin + i) % ring_rows, (begin + i) < n_new
            store_matrix(writes + write_place, slots * n_heads * n_rows, u, r, n_rows, is_new)
            if tl.program_id(0) == 0:
                fade = tl.load(log_decay + (start + begin + i) * decay_stride + h, mask=is_new, other=0.0).to(
                    tl.float32
                )
                tl.store(decays + tl.load(decay_targets + run) + h + slots * n_heads, fade, mask=is_new)
                if h % k_heads == 0:
                    store_matrix(keys + key_place, slots * n_keys, key, n, n_columns, is_new)


@triton.jit
def _store(flat, target, at, s, limit, r, n_rows, is_column):
    tl.store(flat + target + at, s.to(flat.dtype.element_ty), mask=(r < bound(limit, n_rows))[:, None] & is_column)


@triton.jit
def store_matrix(ring, offsets, x, columns, n_columns, mask):
    at = ring + offsets[:, None] + columns[None, :]
    tl.store(at, x.to(ring.dtype.element_ty), mask=mask[:, None] & (columns < n_columns)[None, :])
