"""Computes recurrences with matrix states for tokens that come after a tail, on the CPU; see `tail_states`.

A task is one segment, over some rows of one head's state.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.numbers import get, put
from hybridmem.memory.kernels.cpu.rows import copy_, fill_
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, subroutine
from hybridmem.memory.kernels.cpu.vector_math import exp_f32
from hybridmem.memory.kernels.cpu.vectors import LANES, load, multiply, multiply_add, splat, store, total

_ELEMENTS_AT_ONCE = 8192
"""How many elements of a state a task has: 32 KiB stay in a fast cache from token to token."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


@compiled(ELEMENTWISE, parallel=True)
def scan_matrices(inputs, kind, cu_rows, flat, sources, targets, initial, rings, old, new, ring_rows, spans, y_THV):
    """Advance matrix states.

    Args:
        inputs: q, k (T, G, N), v (T, H, V), logarithms of decays (T, H, 1 or N), and the a, b, strength and skip of
            `Kernels.matrix_scan`, which may be empty. q, k and a have one row for each group of heads.
        kind: three flags: tokens erase, they erase after the decay, and they have b.
        rings: the rings of keys, of written values, of decays, and, if there is b, of b and S a.
        old, new: for each ring, the blocks to read and the blocks to write.
        spans: `firsts`, `counts` and `folds` of the tail.
    """
    n_heads, n_rows = y_THV.shape[1:]
    at_once = min(n_rows, max(8, _ELEMENTS_AT_ONCE // inputs[0].shape[2]))
    n_chunks = -(-n_rows // at_once)
    for task in prange((len(cu_rows) - 1) * n_heads * n_chunks):
        i, h, first = task // (n_heads * n_chunks), task // n_chunks % n_heads, task % n_chunks * at_once
        own = (h, first, min(first + at_once, n_rows))
        span = (cu_rows[i], cu_rows[i + 1], spans[0][i], spans[1][i], spans[2][i])
        reads = (old[0][i], old[1][i], old[2][i], old[3][i], old[4][i])
        writes = (new[0][i], new[1][i], new[2][i], new[3][i], new[4][i])
        _scan(inputs, kind, own, span, flat, sources[i], targets[i], initial, rings, reads, writes, ring_rows, y_THV)


@subroutine(ELEMENTWISE)
def _scan(inputs, kind, own, span, flat, source, target, initial, rings, reads, writes, ring_rows, y_THV):
    """Advance rows [first, last) of head h over a segment."""
    h, first, last = own
    start, end, first_slot, count, fold = span
    n_heads, n_rows = y_THV.shape[1:]
    n_columns, moves, size = inputs[0].shape[2], target >= 0, last - first
    width = -(-n_columns // LANES) * LANES
    # A token's inputs are padded with zeros to whole vectors.
    s, query, decay = np.zeros(size * width, np.float32), np.zeros(width, np.float32), np.zeros(width, np.float32)
    key, writing = np.zeros(width, np.float32), np.zeros(width, np.float32)
    u, found, y = np.empty(size, np.float32), np.zeros(size, np.float32), np.empty(size, np.float32)
    log_decay = np.empty(inputs[3].shape[2], np.float32)
    change = (key, u, log_decay, writing, found)
    _copy_state(flat, source, initial, own, n_rows, n_columns, s, False)
    n_tokens = count + end - start
    for p in range(n_tokens + 1):
        if moves and p == fold:
            _copy_state(flat, target, initial, own, n_rows, n_columns, s, True)
        if p == n_tokens:
            break
        slot, t = (first_slot + p) % ring_rows, start + p - count
        if p < count:
            _copy_change(rings, reads, slot, inputs, own, n_rows, kind[2], change, False)
            _spread(log_decay, n_columns, decay)
            query[:] = _ZERO
        else:
            _find_change(inputs, kind, own, t, s, rings, change, decay)
            copy_(query[:n_columns], inputs[0][t, h // (n_heads // inputs[0].shape[1])])
            if not moves or p >= fold:
                _copy_change(rings, writes, slot, inputs, own, n_rows, kind[2], change, True)
        _advance(s, decay, writing, kind[2], found, key, u, query, y)
        if p >= count:
            _write_output(y, inputs[7], h, inputs[2][t, h, first:last], y_THV[t, h, first:last])


@subroutine()
def _copy_state(flat, at, initial, own, n_rows, n_columns, s, is_written):
    """Read the state of some rows, or write it."""
    h, first, last = own
    width = len(s) // (last - first)
    for r in range(last - first):
        row, place = s[r * width : r * width + n_columns], at + (h * n_rows + first + r) * n_columns
        if is_written:
            copy_(flat[place : place + n_columns], row)
        elif at < 0:
            fill_(row, initial)
        else:
            copy_(row, flat[place : place + n_columns])


@subroutine()
def _copy_change(rings, blocks, slot, inputs, own, n_rows, has_b, change, is_written):
    """Read what a token changed from the rings, or write it there.

    What a group of heads shares is written only by the task with its first head and first rows.
    """
    h, first, last = own
    key, u, log_decay, writing, found = change
    n_keys, n_columns = inputs[1].shape[1:]
    n_heads, n_decays = inputs[3].shape[1:]
    a_group, is_first = n_heads // n_keys, first == 0 or not is_written
    if is_first and (h % a_group == 0 or not is_written):
        at = blocks[0] + (slot * n_keys + h // a_group) * n_columns
        _copy(rings[0][at : at + n_columns], key[:n_columns], is_written)
    at = blocks[1] + (slot * n_heads + h) * n_rows
    _copy(rings[1][at + first : at + last], u, is_written)
    if is_first:
        at = blocks[2] + (slot * n_heads + h) * n_decays
        _copy(rings[2][at : at + n_decays], log_decay, is_written)
    if has_b:
        if is_first:
            at = blocks[3] + (slot * n_heads + h) * n_columns
            _copy(rings[3][at : at + n_columns], writing[:n_columns], is_written)
        at = blocks[4] + (slot * n_heads + h) * n_rows
        _copy(rings[4][at + first : at + last], found, is_written)


@subroutine()
def _copy(ring, x, is_written):
    if is_written:
        copy_(ring, x)
    else:
        copy_(x, ring)


@subroutine(ELEMENTWISE)
def _find_change(inputs, kind, own, t, s, rings, change, decay):
    """Set `change` to what a new token changes, rounded to the rings' dtypes, and `decay` to decays per column."""
    _, k_TGN, v_THV, decay_THD, a_TGN, b_THN, strength_TH, _ = inputs
    erases, after_decay, has_b = kind
    h, first, last = own
    key, u, log_decay, writing, found = change
    n_heads, n_columns = v_THV.shape[1], k_TGN.shape[2]
    _round(k_TGN[t, h // (n_heads // k_TGN.shape[1])], rings[0], key[:n_columns])
    _round(decay_THD[t, h], rings[2], log_decay)
    _spread(log_decay, n_columns, decay)
    if erases:
        erasing = np.zeros(len(key), np.float32)
        copy_(erasing[:n_columns], a_TGN[t, h // (n_heads // a_TGN.shape[1])])
        if after_decay:
            _multiply_(erasing, decay)
        _read_out(s, erasing, found)
    strength = strength_TH[t, h] if len(strength_TH) > 0 else _ONE
    rounded, value = np.empty(len(u), rings[1].dtype), v_THV[t, h, first:last]
    for r in range(len(u)):
        put(rounded, r, (value[r] - found[r] if erases and not has_b else value[r]) * strength)
    copy_(u, rounded)
    if has_b:
        _round(b_THN[t, h], rings[3], writing[:n_columns])
        _round(found, rings[4], found)


@subroutine()
def _round(x, like, out):
    """Set `out` to x, rounded to the dtype of `like`."""
    rounded = np.empty(len(out), like.dtype)
    copy_(rounded, x)
    copy_(out, rounded)


@subroutine(ELEMENTWISE)
def _spread(log_decay, n_columns, decay):
    """Set `decay` to exp(log_decay) for each column."""
    if len(log_decay) == 1:
        decay[:] = exp_f32(log_decay[0])
    else:
        for e in range(n_columns):
            decay[e] = exp_f32(log_decay[e])


@subroutine(ELEMENTWISE)
def _multiply_(x, y):
    for e in range(len(x)):
        x[e] *= y[e]


@subroutine()
def _read_out(s, a, found):
    """Set `found` to S a."""
    n = len(a)
    for r in range(len(found)):
        f0 = splat(_ZERO)
        for e in range(0, n, LANES):
            f0 = multiply_add(load(s, r * n + e), load(a, e), f0)
        found[r] = total(f0)


@subroutine()
def _advance(s, w, b, has_b, found, k, u, q, y):
    """Advance S by a token, s = w s + u k + (S a) b for each row s, and compute y = s . q."""
    n = len(k)
    for r in range(len(u)):
        u0, y0, f0 = splat(u[r]), splat(_ZERO), splat(found[r])
        for e in range(0, n, LANES):
            added = multiply(u0, load(k, e))
            if has_b:
                added = multiply_add(f0, load(b, e), added)
            s0 = multiply_add(load(w, e), load(s, r * n + e), added)
            store(s, r * n + e, s0)
            y0 = multiply_add(s0, load(q, e), y0)
        y[r] = total(y0)


@subroutine(ELEMENTWISE)
def _write_output(y, skip, h, value, out):
    factor = get(skip, h) if len(skip) > 0 else _ZERO
    for r in range(len(out)):
        out[r] = y[r] + factor * value[r]
