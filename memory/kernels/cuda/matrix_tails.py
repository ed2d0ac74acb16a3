"""Computes a few tokens of matrix states on the GPU from a state and a tail, without writing the state.
A program computes one segment over some rows of one head's state. Its tokens are computed together, by products of
matrices.

Let S be the state, U the rows that were written since then, K their keys, and G the sums of log decays up to and
including each token. Token i reads q_i. Over all tokens j <= i of the tail and of the segment,

    y_i = exp(G_i) S q_i + sum of exp(G_i - G_j) (k_j . q_i) u_j        u = strength v, or strength (v - S a)

so S is only read, and the rings of u, k and log decay are small (ReplaySSM, Dao AI Lab 2026). If tokens erase, what a
token finds, S a, depends on the u of the tokens before it in the segment, so these are found one by one. Every few
steps there is a target. Then S, which is still in registers, is advanced by the oldest tokens and written to the target
as the new body.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.kernels.cuda.choices import powers_of_2, tunable
from hybridmem.memory.kernels.cuda.eight_bits import SCALE_BYTES, codes_of, load_state
from hybridmem.memory.kernels.cuda.launch import (
    MOST_REGISTERS,
    aligned_elements,
    dot,
    launch,
    load_rows,
    next_power_of_2,
)
from hybridmem.memory.kernels.cuda.math import bound, summable
from hybridmem.memory.kernels.cuda.matrix_inputs import Inputs
from hybridmem.memory.kernels.cuda.rings import rings_of
from hybridmem.memory.kernels.signature import StateSlots

FEW_TOKENS = 16
"""The most tokens of a segment. It is the fewest rows that a product of matrices has."""
_WIDTH = 32
"""How many columns of a state a product takes at once."""


class ReadStates(NamedTuple):
    """Holds a choice: rows of a head's state of a program, tokens of a tail that are read at once, warps, parts of a
    state in flight, and the most registers of a thread.
    """

    rows: int
    block: int
    num_warps: int
    num_stages: int
    max_registers: int


@tunable(
    "read_states",
    ReadStates,
    rows=powers_of_2(16, 128),
    block=powers_of_2(16, 64),
    num_warps=powers_of_2(1, 16),
    num_stages=range(1, 5),
    max_registers=range(64, MOST_REGISTERS + 1),
)
def _choose(n_rows: int, n_columns: int, itemsize: int, erases: bool) -> ReadStates:
    """Choose two warps, and for rows of 16 bits half of the registers that a thread may have, so that more programs
    run at once. Products of float32 rows need them all.
    """
    registers = 128 if itemsize == 2 else MOST_REGISTERS
    return ReadStates(min(32, max(16, next_power_of_2(n_rows))), 32, 2, 3, registers)


def read_states(inputs: Inputs, bodies: StateSlots, state: StateSlots, cu_rows: Tensor, y_THV: Tensor) -> None:
    """Compute `Kernels.matrix_scan` for segments of at most `FEW_TOKENS` tokens after a tail.

    States are read from `bodies`, which may have 8 bits, and new ones are written to `state`.
    """
    assert state.tail is not None, "`matrix_scan` chooses this kernel only with a tail"
    n_heads, n_rows, n_columns = inputs.sizes
    n_runs, erases = len(state.cu_rows.host) - 1, inputs.a is not None
    choice = _choose(y_THV.device, n_rows, n_columns, inputs.v.element_size(), erases)
    codes = codes_of(bodies)
    flat = bodies.flat.view(torch.uint8) if codes else bodies.flat
    launch(
        _read_states, (ceil_div(n_rows, choice.rows), n_heads, n_runs), *inputs.pointers, y_THV, cu_rows, flat,
        bodies.sources, state.flat, state.targets, float(state.initial), *rings_of(state.tail), n_heads, n_rows,
        n_columns, **inputs.flags, CODES=codes, ROWS=choice.rows,
        WIDTH=max(16, min(_WIDTH, next_power_of_2(n_columns))), BLOCK=choice.block, TOKENS=FEW_TOKENS,
        ALIGN=aligned_elements(n_rows * (n_columns + (SCALE_BYTES.value if codes else 0)), flat.element_size()),
        ALIGN_NEW=aligned_elements(n_rows * n_columns, state.flat.element_size()),
        ALIGN_KEY=aligned_elements(n_columns, state.tail.flats[0].element_size()),
        ALIGN_WRITE=aligned_elements(n_rows, state.tail.flats[1].element_size()), num_warps=choice.num_warps,
        num_stages=choice.num_stages, max_registers=choice.max_registers,
    )  # fmt: skip


@triton.jit
def _read_states(
    q, q_stride, q_heads, k, k_stride, k_heads, a, a_stride, a_heads, v, v_stride, log_decay, decay_stride, strength,
    strength_stride, skip, y, cu_rows, flat, sources, new_flat, targets, initial, keys, key_sources, key_targets,
    writes, write_sources, write_targets, decays, decay_sources, decay_targets, ring_rows, firsts, counts, folds,
    n_heads, n_rows, n_columns, ERASES: tl.constexpr, HAS_STRENGTH: tl.constexpr, HAS_SKIP: tl.constexpr,
    CODES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    ALIGN: tl.constexpr, ALIGN_NEW: tl.constexpr, ALIGN_KEY: tl.constexpr, ALIGN_WRITE: tl.constexpr,
):  # fmt: skip
    h, run = tl.program_id(1), tl.program_id(2)
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group, n_keys = h // k_heads, n_heads // k_heads * n_columns
    source, target, start = tl.load(sources + run), tl.load(targets + run), tl.load(cu_rows + run)
    count, first = tl.load(counts + run).to(tl.int32), tl.load(firsts + run).to(tl.int32)
    n_new, fold = (tl.load(cu_rows + run + 1) - start).to(tl.int32), tl.load(folds + run).to(tl.int32)
    # These are offsets of this head's part of slot 0, in the blocks that are read and in those that are written.
    old_key, new_key = _aligned(key_sources, key_targets, run, group * n_columns, ALIGN_KEY)
    old_write, new_write = _aligned(write_sources, write_targets, run, h * n_rows, ALIGN_WRITE)
    old_decay, new_decay = _aligned(decay_sources, decay_targets, run, h, 1)
    body = flat + tl.multiple_of(source, ALIGN) + h * n_rows * (n_columns + SCALE_BYTES if CODES else n_columns)
    i = tl.arange(0, TOKENS)
    rows, is_new, slots = start + i, i < n_new, (first + count + i) % ring_rows
    query, reading = q + h // q_heads * n_columns, a + h // a_heads * n_columns
    key_rows, decay_rows = k + start * k_stride + group * n_columns, log_decay + start * decay_stride + h
    value = load_rows(v + h * n_rows, v_stride, rows, is_new, r, n_rows).to(tl.float32)
    fade = tl.load(decay_rows + i * decay_stride, mask=is_new, other=0.0)

    out, found, weights, erased = _meet_state(
        query, q_stride, reading, a_stride, rows, is_new, body, bound(source, n_rows), initial, r, key_rows, k_stride,
        i, keys.dtype.element_ty, n_columns, ERASES, CODES, ROWS, WIDTH, TOKENS,
    )  # fmt: skip
    tail_out, tail_found, total = _meet_tail(
        query, q_stride, reading, a_stride, rows, is_new, r, count, keys + old_key, n_keys, writes + old_write,
        decays + old_decay, first, ring_rows, n_heads, n_rows, n_columns, ERASES, ROWS, WIDTH, BLOCK, TOKENS,
    )  # fmt: skip
    # The sums are float64, so that their differences are as exact as the decays.
    sums = tl.cumsum(summable(fade), axis=0)
    so_far, seen = tl.exp(sums.to(tl.float32))[:, None], i[:, None] >= i[None, :]
    left = tl.exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0).to(tl.float32))
    power = tl.full((TOKENS,), 1.0, tl.float32)
    if HAS_STRENGTH:
        power = tl.load(strength + rows * strength_stride + h, mask=is_new, other=0.0).to(tl.float32)
    u = value
    if ERASES:
        u -= so_far * (tl.exp(total) * found + tail_found)
    u = _updates(u, erased * left, power, n_new, writes.dtype.element_ty, ERASES, TOKENS)
    out = dot(tl.where(seen, weights * left, 0.0), u, so_far * (tl.exp(total) * out + tail_out))
    if HAS_SKIP:
        out += tl.load(skip + h).to(tl.float32) * value
    is_row = is_new[:, None] & (r < n_rows)[None, :]
    tl.store(y + (rows * n_heads + h)[:, None] * n_rows + r[None, :], out, mask=is_row)
    tl.store(writes + new_write + (slots * n_heads * n_rows)[:, None] + r[None, :], u, mask=is_row)
    if tl.program_id(0) == 0:
        tl.store(decays + new_decay + slots * n_heads, fade.to(tl.float32), mask=is_new)
    n_own = tl.where((tl.program_id(0) == 0) & (h % k_heads == 0), n_columns, 0)
    _keep_keys(key_rows, k_stride, i, is_new, keys + new_key, slots * n_keys, n_own, n_columns, WIDTH)
    tl.debug_barrier()  # Wait for all threads, because the tokens that fold may be those that were just written.
    _move_body(
        body, source, new_flat + tl.multiple_of(target, ALIGN_NEW) + h * n_rows * n_columns, target, initial, fold, r,
        count, keys, old_key, key_rows, k_stride, n_keys, writes, old_write, new_write, decays, old_decay, decay_rows,
        decay_stride, first, ring_rows, n_heads, n_rows, n_columns, CODES, WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def _aligned(sources, targets, run, part, ALIGN: tl.constexpr):
    """Return the offsets of a part of the blocks that are read and written.

    If the compiler knows that offsets are multiples of a number of elements, several elements are loaded at once.
    """
    old, new = tl.load(sources + run), tl.load(targets + run)
    return tl.multiple_of(old, ALIGN) + part, tl.multiple_of(new, ALIGN) + part


@triton.jit
def _meet_state(
    query, q_stride, reading, a_stride, rows, is_new, body, limit, initial, r, key_rows, k_stride, i,
    dtype: tl.constexpr, n_columns, ERASES: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Return what queries and erasing tokens read from the state, (TOKENS, ROWS) each, and products with keys of the
    new tokens, (TOKENS, TOKENS) each. Rows of the state from `limit` on are `initial`; keys are rounded to `dtype`.
    """
    out, found = tl.zeros((TOKENS, ROWS), tl.float32), tl.zeros((TOKENS, ROWS), tl.float32)
    weights, erased = tl.zeros((TOKENS, TOKENS), tl.float32), tl.zeros((TOKENS, TOKENS), tl.float32)
    for column in range(0, n_columns, WIDTH):
        n = column + tl.arange(0, WIDTH)
        s = load_state(body, r, limit, n, n_columns, initial, CODES)
        key = load_rows(key_rows, k_stride, i, is_new, n, n_columns).to(dtype)
        x = load_rows(query, q_stride, rows, is_new, n, n_columns)
        out = dot(x, tl.trans(s), out)
        weights = dot(x, tl.trans(key), weights)
        if ERASES:
            x = load_rows(reading, a_stride, rows, is_new, n, n_columns)
            found = dot(x, tl.trans(s), found)
            erased = dot(x, tl.trans(key), erased)
    return out, found, weights, erased


@triton.jit
def _meet_tail(
    query, q_stride, reading, a_stride, rows, is_new, r, count, keys, n_keys, writes, decays, first, ring_rows, n_heads,
    n_rows, n_columns, ERASES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Return what queries and erasing tokens read from the tail, (TOKENS, ROWS) each, and the sum of its log decays."""
    total, out, found = 0.0, tl.zeros((TOKENS, ROWS), tl.float32), tl.zeros((TOKENS, ROWS), tl.float32)
    # The loop goes from the newest token to the oldest, because a token's decay is the sum over all newer tokens.
    for block in range(tl.cdiv(count, BLOCK)):
        p = count - (block + 1) * BLOCK + tl.arange(0, BLOCK)
        slots, is_old = (first + p) % ring_rows, p >= 0
        later = decays + (first + p + 1) % ring_rows * n_heads
        fades = tl.load(later, mask=is_old & (p + 1 < count), other=0.0)
        u = load_rows(writes, n_heads * n_rows, slots, is_old, r, n_rows)
        left = tl.exp(total + tl.cumsum(fades, axis=0, reverse=True))[None, :]
        total += tl.sum(fades, axis=0)
        of_query, of_reading = tl.zeros((TOKENS, BLOCK), tl.float32), tl.zeros((TOKENS, BLOCK), tl.float32)
        for column in range(0, n_columns, WIDTH):
            n = column + tl.arange(0, WIDTH)
            key = tl.trans(load_rows(keys, n_keys, slots, is_old, n, n_columns))
            of_query = dot(load_rows(query, q_stride, rows, is_new, n, n_columns), key, of_query)
            if ERASES:
                of_reading = dot(load_rows(reading, a_stride, rows, is_new, n, n_columns), key, of_reading)
        out = dot(of_query * left, u, out)
        if ERASES:
            found = dot(of_reading * left, u, found)
    total += tl.load(decays + first % ring_rows * n_heads, mask=count > 0, other=0.0)
    return out, found, total


@triton.jit
def _updates(u, erased, power, n_new, dtype: tl.constexpr, ERASES: tl.constexpr, TOKENS: tl.constexpr):
    """Return the values that tokens write, (TOKENS, ROWS), rounded to `dtype`: u times `power`.

    If tokens erase, what each reads of earlier tokens is subtracted, one by one. `erased` (TOKENS, TOKENS) has their
    shares.
    """
    i = tl.arange(0, TOKENS)
    u *= power[:, None]
    if ERASES:
        erased = tl.where(i[:, None] > i[None, :], erased, 0.0) * power[:, None]
        for t in range(n_new):
            of_token = tl.sum(tl.where(i[:, None] == t, erased, 0.0), axis=0)
            rest = u - tl.sum(of_token[:, None] * u, axis=0)[None, :]
            u = tl.where(i[:, None] == t, rest.to(dtype).to(tl.float32), u)
    return u.to(dtype)


@triton.jit
def _keep_keys(rows, stride, i, is_new, ring, offsets, n_own, n_columns, WIDTH: tl.constexpr):
    """Store the keys of new tokens at their offsets in the tail's ring. If `n_own`, their columns, is 0, store none."""
    for column in range(0, n_own, WIDTH):
        n = column + tl.arange(0, WIDTH)
        key = load_rows(rows, stride, i, is_new, n, n_columns).to(ring.dtype.element_ty)
        tl.store(ring + offsets[:, None] + n[None, :], key, mask=is_new[:, None] & (n < n_columns)[None, :])


@triton.jit
def _move_body(
    body, source, new_body, target, initial, fold, r, count, keys, old_key, key_rows, k_stride, n_keys, writes,
    old_write, new_write, decays, old_decay, decay_rows, decay_stride, first, ring_rows, n_heads, n_rows, n_columns,
    CODES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store the state after the oldest `fold` tokens if there is a target for it."""
    at, is_row = r[:, None] * n_columns, (r < n_rows)[:, None]
    for column in range(0, bound(target, n_columns), WIDTH):
        n = column + tl.arange(0, WIDTH)
        s = load_state(body, r, bound(source, n_rows), n, n_columns, initial, CODES)
        s = fold_tail(
            s, 0, fold, r, n, count, keys, old_key, key_rows, k_stride, n_keys, writes, old_write, new_write, decays,
            old_decay, decay_rows, decay_stride, first, ring_rows, n_heads, n_rows, n_columns, BLOCK,
        )  # fmt: skip
        tl.debug_barrier()  # All threads have read the state, so it can be written in place.
        tl.store(new_body + at + n[None, :], s.to(new_body.dtype.element_ty), mask=is_row & (n < n_columns)[None, :])


@triton.jit
def fold_tail(
    s, begin, end, r, n, count, keys, old_key, key_rows, k_stride, n_keys, writes, old_write, new_write, decays,
    old_decay, decay_rows, decay_stride, first, ring_rows, n_heads, n_rows, n_columns, BLOCK: tl.constexpr,
):  # fmt: skip
    """Advance a state's rows r and columns n by its tail's tokens from `begin` to `end`, `BLOCK` of them at once."""
    for start in range(begin, end, BLOCK):
        p, stop = start + tl.arange(0, BLOCK), tl.minimum(start + BLOCK, end)
        later = _decays(p + 1, count, stop, decays, old_decay, decay_rows, decay_stride, first, ring_rows, n_heads)
        own = _decays(p, count, start + 1, decays, old_decay, decay_rows, decay_stride, first, ring_rows, n_heads)
        key = _keys(p, n, count, stop, keys, old_key, key_rows, k_stride, first, ring_rows, n_keys, n_columns)
        u = _writes(p, r, count, stop, writes, old_write, new_write, first, ring_rows, n_heads * n_rows, n_rows)
        left = tl.exp(tl.cumsum(later, axis=0, reverse=True))
        s = dot(tl.trans(u * left[:, None]), key, s * tl.exp(tl.sum(own, axis=0) + tl.sum(later, axis=0)))
    return s


@triton.jit
def _decays(p, count, end, ring, old, rows, row_stride, first, ring_rows, n_heads):
    """Load the log decays of positions p < end, and zeros for others: (BLOCK,).

    The first `count` positions are tokens of the tail, in the ring. The segment's own tokens follow them.
    """
    is_old, is_new = (p < count) & (p < end), (p >= count) & (p < end)
    old_fade = tl.load(ring + old + (first + p) % ring_rows * n_heads, mask=is_old, other=0.0)
    return old_fade + tl.load(rows + (p - count) * row_stride, mask=is_new, other=0.0).to(tl.float32)


@triton.jit
def _keys(p, n, count, end, ring, old, rows, row_stride, first, ring_rows, ring_stride, n_columns):
    """Load keys of positions p < end: (BLOCK, COLUMNS), rounded to the ring's dtype. Other keys are zeros."""
    is_old, is_new = (p < count) & (p < end), (p >= count) & (p < end)
    is_column = (n < n_columns)[None, :]
    at = ring + old + ((first + p) % ring_rows * ring_stride)[:, None] + n[None, :]
    old_keys = tl.load(at, mask=is_old[:, None] & is_column, other=0.0)
    at = rows + ((p - count) * row_stride)[:, None] + n[None, :]
    return tl.where(
        is_old[:, None], old_keys, tl.load(at, mask=is_new[:, None] & is_column, other=0.0).to(ring.dtype.element_ty)
    )


@triton.jit
def _writes(p, r, count, end, ring, old, new, first, ring_rows, ring_stride, n_rows):
    """Load u of positions p < end, and zeros for others: (BLOCK, ROWS)."""
    mask = ((p >= 0) & (p < end))[:, None] & (r < n_rows)[None, :]
    at = ring + (tl.where(p < count, old, new) + (first + p) % ring_rows * ring_stride)[:, None] + r[None, :]
    return tl.load(at, mask=mask, other=0.0).to(tl.float32)
