"""Computes any recurrence with matrix states token by token, on the GPU.
A program computes one segment over some rows of one head's state, which are in registers.

So every state element is read once and written once, however many tokens a segment has. With a tail, the tail's tokens
are first added to the registers, from rings of their updates (see `matrix_tails`), by products of matrices. Then only
the updates of new tokens are written and, if rows fold, a new body,

    S = S diag(w) + u k^T + f b^T       u = strength v, or strength (v - S a)       f = S a, where b is given
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.kernels.cuda.choices import powers_of_2, tunable
from hybridmem.memory.kernels.cuda.launch import absent, dot, launch, load_rows, next_power_of_2
from hybridmem.memory.kernels.cuda.math import bound
from hybridmem.memory.kernels.cuda.matrix_inputs import Inputs, rows_a_program
from hybridmem.memory.kernels.cuda.rings import keep_row, no_rings, rings_of
from hybridmem.memory.kernels.signature import StateSlots

_BLOCK = tl.constexpr(16)
"""How many tokens of a tail are added at once: the fewest that tensor cores take."""
_LEAST_SIDE = 16
"""The fewest rows and columns of a matrix that tensor cores multiply."""


class ScanTokens(NamedTuple):
    """Holds a choice: rows of a head's state in a program, and warps."""

    rows: int
    num_warps: int


@tunable("scan_tokens", ScanTokens, rows=powers_of_2(1, 128), num_warps=powers_of_2(1, 16))
def _choose(n_rows: int, n_columns: int, itemsize: int, erases: bool) -> ScanTokens:
    return ScanTokens(rows_a_program(n_rows, n_columns), 4)


def scan_tokens(inputs: Inputs, state: StateSlots, cu_rows: Tensor, y_THV: Tensor) -> None:
    """Compute `Kernels.matrix_scan`, one token after the other."""
    n_heads, n_rows, n_columns = inputs.sizes
    n_runs, b = len(state.cu_rows.host) - 1, absent(inputs.b, inputs.q)
    rings = no_rings(cu_rows, 5) if state.tail is None else rings_of(state.tail, n_absent=2 if inputs.b is None else 0)
    rows, num_warps = _choose(y_THV.device, n_rows, n_columns, inputs.v.element_size(), inputs.a is not None)
    least = 1 if state.tail is None else _LEAST_SIDE
    launch(
        _scan_tokens, (ceil_div(n_rows, rows), n_heads, n_runs), *inputs.pointers, b, b.stride(0), y_THV, cu_rows,
        state.flat, state.sources, state.targets, float(state.initial), *rings, n_heads, n_rows, n_columns,
        **inputs.flags, BY_COLUMN=inputs.log_decay.dim() == 3, HAS_B=inputs.b is not None,
        AFTER_DECAY=inputs.after_decay, HAS_TAIL=state.tail is not None, ROWS=max(least, rows),
        COLUMNS=max(least, next_power_of_2(n_columns)), num_warps=num_warps,
    )  # fmt: skip


@triton.jit
def _scan_tokens(
    q, q_stride, q_heads, k, k_stride, k_heads, a, a_stride, a_heads, v, v_stride, log_decay, decay_stride, strength,
    strength_stride, skip, b, b_stride, y, cu_rows, flat, sources, targets, initial, keys, key_sources, key_targets,
    writes, write_sources, write_targets, decays, decay_sources, decay_targets, others, other_sources, other_targets,
    finds, find_sources, find_targets, ring_rows, firsts, counts, folds, n_heads, n_rows, n_columns,
    ERASES: tl.constexpr, HAS_STRENGTH: tl.constexpr, HAS_SKIP: tl.constexpr, BY_COLUMN: tl.constexpr,
    HAS_B: tl.constexpr, AFTER_DECAY: tl.constexpr, HAS_TAIL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    h, run = tl.program_id(1), tl.program_id(2)
    r, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row, is_column, at = r < n_rows, n < n_columns, (h * n_rows + r)[:, None] * n_columns + n[None, :]
    source, target, start = tl.load(sources + run), tl.load(targets + run), tl.load(cu_rows + run)
    end, limit = tl.load(cu_rows + run + 1), bound(target, n_rows)
    d, n_decays = _decays(n, n_columns, BY_COLUMN)
    s = _load(flat + source + at, r, bound(source, n_rows), n, n_columns, initial)
    if HAS_TAIL:
        first, count = tl.load(firsts + run).to(tl.int32), tl.load(counts + run).to(tl.int32)
        fold = tl.where(target < 0, -1, tl.load(folds + run).to(tl.int32))
        s = add_tail(
            s, flat + target + at, limit, fold, count, first, run, h, r, n, keys, key_sources, k_heads, writes,
            write_sources, decays, decay_sources, others, other_sources, finds, find_sources, ring_rows, n_heads,
            n_rows, n_columns, BY_COLUMN, HAS_B,
        )  # fmt: skip
    for t in range(start, end):
        key = tl.load(k + t * k_stride + h // k_heads * n_columns + n, mask=is_column, other=0.0).to(tl.float32)
        query = tl.load(q + t * q_stride + h // q_heads * n_columns + n, mask=is_column, other=0.0).to(tl.float32)
        value = tl.load(v + t * v_stride + h * n_rows + r, mask=is_row, other=0.0).to(tl.float32)
        fade = tl.load(log_decay + t * decay_stride + h * n_decays + d, mask=d < n_decays, other=0.0).to(tl.float32)
        decayed, u = s * tl.exp(fade)[None, :], value
        if ERASES:
            reading = tl.load(a + t * a_stride + h // a_heads * n_columns + n, mask=is_column, other=0.0).to(tl.float32)
            found = tl.sum((decayed if AFTER_DECAY else s) * reading[None, :], axis=1)
            if HAS_B:
                other = tl.load(b + t * b_stride + h * n_columns + n, mask=is_column, other=0.0).to(tl.float32)
            else:
                u -= found
        if HAS_STRENGTH:
            u *= tl.load(strength + t * strength_stride + h).to(tl.float32)
        if HAS_TAIL:
            p = (t - start).to(tl.int32) + count
            _store(flat + target + at, s, r, tl.where(p == fold, limit, 0), n, n_columns)
            # Rows are rounded as rings store them, so that a replay adds the same. Rings have no room for folded rows.
            slot, is_kept, is_first = (first + p) % ring_rows, p >= fold, (tl.program_id(0) == 0) & (p >= fold)
            u = keep_row(writes, write_targets, run, slot * n_heads + h, u, r, n_rows, is_kept)
            group, is_key = slot * (n_heads // k_heads) + h // k_heads, is_first & (h % k_heads == 0)
            key = keep_row(keys, key_targets, run, group, key, n, n_columns, is_key)
            keep_row(decays, decay_targets, run, slot * n_heads + h, fade, d, n_decays, is_first)
            if HAS_B:
                found = keep_row(finds, find_targets, run, slot * n_heads + h, found, r, n_rows, is_kept)
                other = keep_row(others, other_targets, run, slot * n_heads + h, other, n, n_columns, is_first)
        s = decayed + u[:, None] * key[None, :]
        if HAS_B:
            s += found[:, None] * other[None, :]
        out = tl.sum(s * query[None, :], axis=1)
        if HAS_SKIP:
            out += tl.load(skip + h).to(tl.float32) * value
        tl.store(y + (t * n_heads + h) * n_rows + r, out, mask=is_row)
    tl.debug_barrier()  # All threads have read the state, so it can be written in place.
    if HAS_TAIL:
        limit = tl.where(count + end - start == fold, limit, 0)
    _store(flat + target + at, s, r, limit, n, n_columns)


@triton.jit
def _load(place, r, limit, n, n_columns, initial):
    """Return the rows of a state before `limit` in float32, and `initial` in place of other rows."""
    is_held = (r < limit)[:, None] & (n < n_columns)[None, :]
    return tl.load(place, mask=is_held, other=initial).to(tl.float32)


@triton.jit
def _store(place, s, r, limit, n, n_columns):
    """Store the rows of a state before `limit`."""
    tl.store(place, s.to(place.dtype.element_ty), mask=(r < limit)[:, None] & (n < n_columns)[None, :])


@triton.jit
def _decays(n, n_columns, BY_COLUMN: tl.constexpr):
    """Return the indices of a head's decays, and their number."""
    if BY_COLUMN:
        d, n_decays = n, n_columns
    else:
        d, n_decays = tl.zeros((1,), tl.int32), 1
    return d, n_decays


@triton.jit
def add_tail(
    s, body, limit, fold, count, first, run, h, r, n, keys, key_sources, k_heads, writes, write_sources, decays,
    decay_sources, others, other_sources, finds, find_sources, ring_rows, n_heads, n_rows, n_columns,
    BY_COLUMN: tl.constexpr, HAS_B: tl.constexpr,
):  # fmt: skip
    """Advance a state (ROWS, COLUMNS) by the `count` tokens of its tail, and store the state before token `fold`."""
    n_groups, middle = n_heads // k_heads, tl.maximum(tl.minimum(fold, count), 0)
    key_ring = _ring(keys, key_sources, run, h // k_heads, n_columns)
    write_ring = _ring(writes, write_sources, run, h, n_rows)
    other_ring, find_ring = _ring(others, other_sources, run, h, n_columns), _ring(finds, find_sources, run, h, n_rows)
    _, n_decays = _decays(n, n_columns, BY_COLUMN)
    decay_ring = _ring(decays, decay_sources, run, h, n_decays)
    s = _add_tokens(
        s, 0, middle, first, r, n, key_ring, n_groups, write_ring, decay_ring, other_ring, find_ring, ring_rows,
        n_heads, n_rows, n_columns, BY_COLUMN, HAS_B,
    )  # fmt: skip
    if middle == fold and fold < count:
        tl.debug_barrier()  # All threads have read the state, so it can be written in place.
        _store(body, s, r, limit, n, n_columns)
    return _add_tokens(
        s, middle, count, first, r, n, key_ring, n_groups, write_ring, decay_ring, other_ring, find_ring, ring_rows,
        n_heads, n_rows, n_columns, BY_COLUMN, HAS_B,
    )  # fmt: skip


@triton.jit
def _ring(ring, sources, run, h, n):
    """Return a pointer into the first row of a segment's ring, to the n elements of head h."""
    return ring + tl.load(sources + run) + h * n


@triton.jit
def _add_tokens(
    s, begin, end, first, r, n, keys, n_groups, writes, decays, others, finds, ring_rows, n_heads, n_rows, n_columns,
    BY_COLUMN: tl.constexpr, HAS_B: tl.constexpr,
):  # fmt: skip
    """Advance a state by tokens `begin` to `end` of its tail, `_BLOCK` at once.

    The term of each token decays over the tokens after it: S exp(G_C) + u^T (exp(G_C - G) k) + f^T (exp(G_C - G) b).
    """
    for start in range(begin, end, _BLOCK):
        p, stop = start + tl.arange(0, _BLOCK), tl.minimum(start + _BLOCK, end)
        slots, is_token = (first + p) % ring_rows, p < stop
        key = load_rows(keys, n_groups * n_columns, slots, is_token, n, n_columns)
        u = load_rows(writes, n_heads * n_rows, slots, is_token, r, n_rows)
        # Load the decays of the tokens after each token. They start in the next slot.
        after, is_after = (first + p + 1) % ring_rows, p + 1 < stop
        if BY_COLUMN:
            later = load_rows(decays, n_heads * n_columns, after, is_after, n, n_columns).to(tl.float32)
            own = tl.load(decays + (first + start) % ring_rows * n_heads * n_columns + n, mask=n < n_columns, other=0.0)
            total = (own.to(tl.float32) + tl.sum(later, axis=0))[None, :]
            left = tl.exp(tl.cumsum(later, axis=0, reverse=True))
        else:  # This case is separate because Triton 3.6 cannot compile a scan of a single column.
            later = tl.load(decays + after * n_heads, mask=is_after, other=0.0).to(tl.float32)
            own = tl.load(decays + (first + start) % ring_rows * n_heads).to(tl.float32)
            total = own + tl.sum(later, axis=0)
            left = tl.exp(tl.cumsum(later, axis=0, reverse=True))[:, None]
        s = dot(tl.trans(u), key.to(tl.float32) * left, s * tl.exp(total))
        if HAS_B:
            other = load_rows(others, n_heads * n_columns, slots, is_token, n, n_columns)
            found = load_rows(finds, n_heads * n_rows, slots, is_token, r, n_rows)
            s = dot(tl.trans(found), other.to(tl.float32) * left, s)
    return s
