"""Computes a few tokens of matrix states on the GPU from a state and a tail, without writing the state.

A state after L tokens is S_L = (w_1 ... w_L) S_0 + sum of (w_{j+1} ... w_L) u_j k_j^T, where u_j is what token j wrote:
strength v, or strength (v - S a) where it erases. So y = S_L q takes one pass over S_0, which is only read, and over
the rings of u, k and log w, which are small (ReplaySSM, Dao AI Lab 2026). Every few steps there is a target: then S_0,
still in registers, is advanced by the oldest tokens and written there as the new body.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from memory.blocks.arrays import ceil_div
from memory.kernels.cuda.choices import powers_of_2, tunable
from memory.kernels.cuda.launch import aligned_elements, launch, next_power_of_2
from memory.kernels.cuda.math import bound
from memory.kernels.cuda.matrix_inputs import Inputs, rows_a_program
from memory.kernels.cuda.rings import rings_of
from memory.kernels.signature import StateSlots


class ReadStates(NamedTuple):
    """Holds a choice: rows of a head's state of a program, tokens of a tail that are read at once, and warps."""

    rows: int
    block: int
    num_warps: int


@tunable("read_states", ReadStates, rows=powers_of_2(1, 128), block=powers_of_2(1, 64), num_warps=powers_of_2(1, 16))
def _choose(n_rows: int, n_columns: int, itemsize: int, erases: bool) -> ReadStates:
    return ReadStates(rows_a_program(n_rows, n_columns), 16, 4)


def read_states(inputs: Inputs, state: StateSlots, cu_rows: Tensor, y_THV: Tensor) -> None:
    """Compute `Kernels.matrix_scan` of segments of a few tokens with a tail."""
    assert state.tail is not None, "`matrix_scan` chooses this kernel only with a tail"
    n_heads, n_rows, n_columns = inputs.sizes
    n_runs, erases = len(state.cu_rows.host) - 1, inputs.a is not None
    rows, block, num_warps = _choose(y_THV.device, n_rows, n_columns, inputs.v.element_size(), erases)
    launch(
        _read_states, (ceil_div(n_rows, rows), n_heads, n_runs), *inputs.pointers, y_THV, cu_rows, state.flat,
        state.sources, state.targets, float(state.initial), *rings_of(state.tail), n_heads, n_rows, n_columns,
        **inputs.flags, ROWS=rows, COLUMNS=next_power_of_2(n_columns), BLOCK=block,
        ALIGN=aligned_elements(n_rows * n_columns, state.flat.element_size()),
        ALIGN_KEY=aligned_elements(n_columns, state.tail.flats[0].element_size()),
        ALIGN_WRITE=aligned_elements(n_rows, state.tail.flats[1].element_size()), num_warps=num_warps,
    )  # fmt: skip


@triton.jit
def _read_states(  # type: ignore[no-untyped-def]
    q, q_stride, q_heads, k, k_stride, k_heads, a, a_stride, a_heads, v, v_stride, log_decay, decay_stride, strength,
    strength_stride, skip, y, cu_rows, flat, sources, targets, initial, keys, key_sources, key_targets, writes,
    write_sources, write_targets, decays, decay_sources, decay_targets, ring_rows, firsts, counts, folds, n_heads,
    n_rows, n_columns, ERASES: tl.constexpr, HAS_STRENGTH: tl.constexpr, HAS_SKIP: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ALIGN: tl.constexpr, ALIGN_KEY: tl.constexpr, ALIGN_WRITE: tl.constexpr,
):  # fmt: skip
    h, run = tl.program_id(1), tl.program_id(2)
    r, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    is_row, is_column = r < n_rows, n < n_columns
    group, n_keys = h // k_heads, n_heads // k_heads * n_columns
    at = (h * n_rows + r)[:, None] * n_columns + n[None, :]
    source = tl.multiple_of(tl.load(sources + run), ALIGN)
    start, count = tl.load(cu_rows + run), tl.load(counts + run).to(tl.int32)
    first, n_new = tl.load(firsts + run).to(tl.int32), (tl.load(cu_rows + run + 1) - start).to(tl.int32)
    is_held = (r < bound(source, n_rows))[:, None] & is_column[None, :]
    s = tl.load(flat + source + at, mask=is_held, other=initial).to(tl.float32)
    # Offsets of this head's part of slot 0, in the blocks that are read and in those that are written.
    old_key, new_key = _aligned(key_sources, key_targets, run, group * n_columns, ALIGN_KEY)
    old_write, new_write = _aligned(write_sources, write_targets, run, h * n_rows, ALIGN_WRITE)
    old_decay, new_decay = _aligned(decay_sources, decay_targets, run, h, 1)
    key_rows, decay_rows = k + start * k_stride + group * n_columns, log_decay + start * decay_stride + h
    for t in range(n_new):
        row, end, slot = start + t, count + t, (first + count + t) % ring_rows
        query = tl.load(q + row * q_stride + h // q_heads * n_columns + n, mask=is_column, other=0.0).to(tl.float32)
        value = tl.load(v + row * v_stride + h * n_rows + r, mask=is_row, other=0.0).to(tl.float32)
        reading = query
        if ERASES:
            of_token = a + row * a_stride + h // a_heads * n_columns
            reading = tl.load(of_token + n, mask=is_column, other=0.0).to(tl.float32)
        out, found, total = _meet_tail(
            query, reading, end, r, n, count, keys, old_key, key_rows, k_stride, n_keys, writes, old_write, new_write,
            decays, old_decay, decay_rows, decay_stride, first, ring_rows, n_heads, n_rows, n_columns, ERASES, ROWS,
            BLOCK,
        )  # fmt: skip
        out += tl.exp(total) * tl.sum(s * query[None, :], axis=1)
        u = value
        if ERASES:
            u = value - found - tl.exp(total) * tl.sum(s * reading[None, :], axis=1)
        if HAS_STRENGTH:
            u *= tl.load(strength + row * strength_stride + h).to(tl.float32)
        u = u.to(writes.dtype.element_ty)
        key = tl.load(key_rows + t * k_stride + n, mask=is_column, other=0.0).to(keys.dtype.element_ty)
        out += u.to(tl.float32) * tl.sum(key.to(tl.float32) * query, axis=0)
        if HAS_SKIP:
            out += tl.load(skip + h).to(tl.float32) * value
        tl.store(y + (row * n_heads + h) * n_rows + r, out, mask=is_row)
        tl.store(writes + new_write + slot * n_heads * n_rows + r, u, mask=is_row)
        if tl.program_id(0) == 0:
            tl.store(decays + new_decay + slot * n_heads, tl.load(decay_rows + t * decay_stride).to(tl.float32))
            if h % k_heads == 0:
                tl.store(keys + new_key + slot * n_keys + n, key, mask=is_column)
        tl.debug_barrier()  # the next token reads what this one has written
    target, fold = tl.load(targets + run), tl.load(folds + run).to(tl.int32)
    s = fold_tail(
        s, 0, tl.where(target < 0, 0, fold), r, n, count, keys, old_key, key_rows, k_stride, n_keys, writes, old_write,
        new_write, decays, old_decay, decay_rows, decay_stride, first, ring_rows, n_heads, n_rows, n_columns,
    )  # fmt: skip
    is_held = (r < bound(target, n_rows))[:, None] & is_column[None, :]
    tl.store(flat + tl.multiple_of(target, ALIGN) + at, s.to(flat.dtype.element_ty), mask=is_held)


@triton.jit
def _aligned(sources, targets, run, part, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offsets of a part of the blocks that are read and written. Several elements are loaded at once where
    the compiler knows that offsets are multiples.
    """
    old, new = tl.load(sources + run), tl.load(targets + run)
    return tl.multiple_of(old, ALIGN) + part, tl.multiple_of(new, ALIGN) + part


@triton.jit
def _meet_tail(  # type: ignore[no-untyped-def]
    query, reading, end, r, n, count, keys, old_key, key_rows, k_stride, n_keys, writes, old_write, new_write,
    decays, old_decay, decay_rows, decay_stride, first, ring_rows, n_heads, n_rows, n_columns,
    ERASES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the tail's part of y for a query at position `end`, and of S a for its token's reading, (ROWS,) each.
    Also the sum of log decays since the state.
    """
    out, found, total = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32), 0.0
    # From the newest token to the oldest, because the decay of each is the sum over all newer ones.
    for block in range(tl.cdiv(end, BLOCK)):
        p = end - (block + 1) * BLOCK + tl.arange(0, BLOCK)
        fade = _decays(p + 1, count, end + 1, decays, old_decay, decay_rows, decay_stride, first, ring_rows, n_heads)
        fade = tl.where(p >= 0, fade, 0.0)
        left = tl.exp(total + tl.cumsum(fade, axis=0, reverse=True))
        total += tl.sum(fade, axis=0)
        key = _keys(p, n, count, end, keys, old_key, key_rows, k_stride, first, ring_rows, n_keys, n_columns)
        u = _writes(p, r, count, end, writes, old_write, new_write, first, ring_rows, n_heads * n_rows, n_rows)
        out += tl.sum((tl.sum(key * query[None, :], axis=1) * left)[:, None] * u, axis=0)
        if ERASES:
            found += tl.sum((tl.sum(key * reading[None, :], axis=1) * left)[:, None] * u, axis=0)
    total += _decay(0, count, decays, old_decay, decay_rows, decay_stride, first, ring_rows, n_heads)
    return out, found, total


@triton.jit
def fold_tail(  # type: ignore[no-untyped-def]
    s, begin, end, r, n, count, keys, old_key, key_rows, k_stride, n_keys, writes, old_write, new_write,
    decays, old_decay, decay_rows, decay_stride, first, ring_rows, n_heads, n_rows, n_columns,
):  # fmt: skip
    """Advance a state (ROWS, COLUMNS) from position `begin` to `end`."""
    for p in range(begin, end):
        w = _decay(p, count, decays, old_decay, decay_rows, decay_stride, first, ring_rows, n_heads)
        place = p + tl.zeros((1,), tl.int32)
        key = _keys(place, n, count, end, keys, old_key, key_rows, k_stride, first, ring_rows, n_keys, n_columns)
        u = _writes(place, r, count, end, writes, old_write, new_write, first, ring_rows, n_heads * n_rows, n_rows)
        s = tl.exp(w) * s + tl.trans(u) * key
    return s


@triton.jit
def _decays(p, count, end, ring, old, rows, row_stride, first, ring_rows, n_heads):  # type: ignore[no-untyped-def]
    """Load log decays of positions p < end: (BLOCK,), zeros elsewhere. Those from `count` on are the segment's own."""
    is_old, is_new = (p >= 0) & (p < count), (p >= count) & (p < end)
    old_fade = tl.load(ring + old + (first + p) % ring_rows * n_heads, mask=is_old, other=0.0)
    return old_fade + tl.load(rows + (p - count) * row_stride, mask=is_new, other=0.0).to(tl.float32)


@triton.jit
def _decay(p, count, ring, old, rows, row_stride, first, ring_rows, n_heads):  # type: ignore[no-untyped-def]
    return tl.sum(
        _decays(p + tl.zeros((1,), tl.int32), count, p + 1, ring, old, rows, row_stride, first, ring_rows, n_heads),
        axis=0,
    )


@triton.jit
def _keys(p, n, count, end, ring, old, rows, row_stride, first, ring_rows, ring_stride, n_columns):  # type: ignore[no-untyped-def]
    """Load keys of positions p < end: (BLOCK, COLUMNS), rounded as in a ring, zeros elsewhere."""
    is_old, is_new = (p >= 0) & (p < count), (p >= count) & (p < end)
    is_column = (n < n_columns)[None, :]
    at = ring + old + ((first + p) % ring_rows * ring_stride)[:, None] + n[None, :]
    old_keys = tl.load(at, mask=is_old[:, None] & is_column, other=0.0).to(tl.float32)
    at = rows + ((p - count) * row_stride)[:, None] + n[None, :]
    return old_keys + tl.load(at, mask=is_new[:, None] & is_column, other=0.0).to(ring.dtype.element_ty).to(tl.float32)


@triton.jit
def _writes(p, r, count, end, ring, old, new, first, ring_rows, ring_stride, n_rows):  # type: ignore[no-untyped-def]
    """Load u of positions p < end: (BLOCK, ROWS), zeros elsewhere."""
    mask = ((p >= 0) & (p < end))[:, None] & (r < n_rows)[None, :]
    at = ring + (tl.where(p < count, old, new) + (first + p) % ring_rows * ring_stride)[:, None] + r[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)
