"""Computes recurrences with one matrix per head as state (Mamba-2, delta rules, RWKV-7), on the CPU.
A task is one segment, over some rows of one head's state.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.eight_bit_rows import has_8_bits
from hybridmem.memory.kernels.cpu.eight_bit_segments import scan_8_bits
from hybridmem.memory.kernels.cpu.numbers import get
from hybridmem.memory.kernels.cpu.rows import as_array, as_flat, close, copy_, opened
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, subroutine
from hybridmem.memory.kernels.cpu.tail_matrices import scan_matrices
from hybridmem.memory.kernels.cpu.tail_states import arrays_of, places_of
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.cpu.vector_math import exp_f32, prefetch
from hybridmem.memory.kernels.cpu.vectors import LANES, load, multiply, multiply_add, splat, store, store_totals, total
from hybridmem.memory.kernels.signature import Erase, Prepared, StateSlots

_LONG_RUN_ELEMENTS = 8192
"""How many elements of a state a task has in long segments.

Their 32 KiB stay in a fast cache from token to token. They are enough to make the fixed costs of a token and of a task
small.
"""

_AHEAD = 1024
"""How many elements ahead of the read position cache lines of a state are prefetched from main memory.

This saves a fifth of the time for 32 sequences of Mamba-2 with states of 24 x 64 x 128.
"""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
NOTHING = np.zeros(0, np.float32)
"""The array that stands for an absent input."""


def matrix_scan(
    q_TGN: Tensor, k_TGN: Tensor, v_THV: Tensor, log_decay: Tensor, erase: Erase | None, state: StateSlots, *,
    strength_TH: Tensor | None = None, skip_H: Prepared | None = None,
) -> Tensor:  # fmt: skip
    checks.matrix_scan(q_TGN, k_TGN, v_THV, log_decay, erase, state, strength_TH, skip_H, checks.FLOATS_UP_TO_32_BITS)
    n_tokens, n_heads, _ = v_THV.shape
    n_columns = q_TGN.shape[2]
    y_THV = torch.empty(v_THV.shape)
    if state.tail is not None:
        inputs = (q_TGN, k_TGN, v_THV, log_decay, erase, state, strength_TH, skip_H, y_THV)
        if has_8_bits(state):
            scan_8_bits(*inputs, _scan_behind_tail)
        else:
            _scan_behind_tail(*inputs)
        return y_THV
    # Inputs are small beside a state, so they become float32: then one kernel serves all dtypes.
    (q, q_stride), (k, k_stride), (v, v_stride) = (as_flat(x.float()) for x in (q_TGN, k_TGN, v_THV))
    a, a_stride, a_heads, b = NOTHING, 0, 1, NOTHING
    if erase is not None:
        (a, a_stride), a_heads = as_flat(erase.a.float()), n_heads // erase.a.shape[1]
        b = NOTHING if erase.b is None else erase.b.float().contiguous().view(-1).numpy()
    strength, strength_stride = (NOTHING, 0) if strength_TH is None else as_flat(strength_TH.float())
    use_threads(4 * v_THV.numel() * n_columns)
    own = opened(state)
    scan_states(
        q, q_stride, n_heads // q_TGN.shape[1], k, k_stride, n_heads // k_TGN.shape[1], v, v_stride,
        log_decay.float().contiguous().view(n_tokens, n_heads, -1).numpy(), a, a_stride, a_heads, b,
        erase is not None and erase.after_decay, strength, strength_stride,
        NOTHING if skip_H is None else as_array(skip_H), own.cu_rows.host, as_array(own.flat), as_array(own.sources),
        as_array(own.targets), np.float32(own.initial), n_columns, is_long(own.cu_rows.host), y_THV.numpy(),
    )  # fmt: skip
    close(own, state)
    return y_THV


def _scan_behind_tail(
    q_TGN: Tensor, k_TGN: Tensor, v_THV: Tensor, log_decay: Tensor, erase: Erase | None, state: StateSlots,
    strength_TH: Tensor | None, skip_H: Prepared | None, y_THV: Tensor,
) -> None:  # fmt: skip
    def array(x: Tensor | None, n_axes: int) -> Prepared:
        return np.zeros((0,) * n_axes, np.float32) if x is None else x.float().contiguous().numpy()

    tail = state.tail
    assert tail is not None
    a, b = (None, None) if erase is None else (erase.a, erase.b)
    inputs = (
        array(q_TGN, 3), array(k_TGN, 3), array(v_THV, 3), array(log_decay.reshape(*v_THV.shape[:2], -1), 3),
        array(a, 3), array(b, 3), array(strength_TH, 2), NOTHING if skip_H is None else as_array(skip_H),
    )  # fmt: skip
    rings, old, new, spans = arrays_of(tail)
    n_missing = 5 - len(rings)  # The rings of b and S a may be missing.
    rings, old, new = ((*parts, *parts[:1] * n_missing) for parts in (rings, old, new))
    use_threads(4 * v_THV.numel() * q_TGN.shape[2])
    kind = erase is not None, erase is not None and erase.after_decay, b is not None
    scan_matrices(inputs, kind, *places_of(state), rings, old, new, tail.ring_rows, spans, y_THV.numpy())


def is_long(cu_rows: Int64s) -> bool:
    """True if segments have so many tokens that states should stay in a cache from token to token.

    In short segments each state is read only once.
    """
    return bool(cu_rows[-1] >= 4 * (len(cu_rows) - 1))


@compiled(ELEMENTWISE, parallel=True)
def scan_states(
    q, q_stride, q_heads, k, k_stride, k_heads, v, v_stride, log_decay, a, a_stride, a_heads, b, after_decay,
    strength, strength_stride, skip, cu_rows, flat, sources, targets, initial, n_columns, is_long, y_THV,
):  # fmt: skip
    n_heads, n_rows = y_THV.shape[1:]
    at_once = min(n_rows, max(8, _LONG_RUN_ELEMENTS // n_columns)) if is_long else n_rows
    n_chunks = -(-n_rows // at_once)
    width = -(-n_columns // LANES) * LANES
    erases, decays_columns = len(a) > 0, log_decay.shape[2] > 1
    for task in prange((len(cu_rows) - 1) * n_heads * n_chunks):
        i, h, first = task // (n_heads * n_chunks), task // n_chunks % n_heads, task % n_chunks * at_once
        last = min(first + at_once, n_rows)
        offset, size = (h * n_rows + first) * n_columns, (last - first) * n_columns
        target = flat[targets[i] + offset : targets[i] + offset + size]
        # Copy the state into its target, and advance it there.
        if sources[i] < 0:
            target[:] = initial
        elif sources[i] != targets[i]:
            copy_(target, flat[sources[i] + offset : sources[i] + offset + size])
        s = target if width == n_columns else _widened(target, n_columns, width)
        # These hold a token's inputs, padded with zeros to whole vectors.
        query, key, u = np.zeros(width, np.float32), np.zeros(width, np.float32), np.empty(last - first, np.float32)
        decay, erasing, writing = np.zeros(width, np.float32), np.zeros(width, np.float32), np.zeros(width, np.float32)
        for t in range(cu_rows[i], cu_rows[i + 1]):
            q_at, k_at = t * q_stride + h // q_heads * n_columns, t * k_stride + h // k_heads * n_columns
            v_at = t * v_stride + h * n_rows
            copy_(query[:n_columns], q[q_at : q_at + n_columns])
            copy_(key[:n_columns], k[k_at : k_at + n_columns])
            value, y = v[v_at + first : v_at + last], y_THV[t, h, first:last]
            beta = strength[t * strength_stride + h] if len(strength) > 0 else _ONE
            _scaled(value, beta, u)
            if not (erases or decays_columns):
                _advance(s, exp_f32(log_decay[t, h, 0]), key, u, query, y, is_long)
            else:
                if decays_columns:
                    _exp(log_decay[t, h], decay[:n_columns])
                else:
                    decay[:] = exp_f32(log_decay[t, h, 0])
                if erases:
                    a_at, b_at = t * a_stride + h // a_heads * n_columns, (t * n_heads + h) * n_columns
                    copy_(erasing[:n_columns], a[a_at : a_at + n_columns])
                    if len(b) > 0:
                        copy_(writing[:n_columns], b[b_at : b_at + n_columns])
                    else:
                        _scaled(key, -beta, writing)
                    if after_decay:
                        _multiply_(erasing, decay)
                _advance_erasing(s, decay, erasing, writing, key, u, query, y, is_long)
            if len(skip) > 0:
                factor = get(skip, h)
                for r in range(last - first):
                    y[r] += factor * value[r]
        if width != n_columns:
            for r in range(last - first):
                copy_(target[r * n_columns : (r + 1) * n_columns], s[r * width : r * width + n_columns])


@subroutine()
def _widened(rows, n_columns, width):
    n_rows = len(rows) // n_columns
    wide = np.zeros(n_rows * width, np.float32)
    for r in range(n_rows):
        copy_(wide[r * width : r * width + n_columns], rows[r * n_columns : (r + 1) * n_columns])
    return wide


@subroutine()
def _advance(s, w, k, u, q, y, is_long):
    """Advance S by a token, s = w s + u k for each row s, and compute y = s . q."""
    n, w = len(k), splat(w)
    for r in range(len(u)):
        u0, y0 = splat(u[r]), splat(_ZERO)
        for e in range(0, n, LANES):
            if not is_long:
                prefetch(s, r * n + e + _AHEAD)  # type: ignore[call-arg]
            s0 = multiply_add(w, load(s, r * n + e), multiply(u0, load(k, e)))
            store(s, r * n + e, s0)
            y0 = multiply_add(s0, load(q, e), y0)
        y[r] = total(y0)


@subroutine()
def _advance_erasing(s, w, a, b, k, u, q, y, is_long):
    """Advance S with erasing and a decay for each column: s = w s + (s . a) b + u k for each row s. Compute y = s . q.

    In long segments, whose state is in a fast cache, four rows share what is loaded, which takes two thirds of the
    time. If the state comes from main memory, reading one row after the other is faster. Both ways sum a row in the
    same order, so they give the same bits.
    """
    n, n_rows = len(k), len(u)
    n_fours = n_rows // 4 if is_long else 0
    for r in range(0, 4 * n_fours, 4):
        f0 = f1 = f2 = f3 = splat(_ZERO)
        for e in range(0, n, LANES):
            erasing, at = load(a, e), r * n + e
            f0, f1 = multiply_add(load(s, at), erasing, f0), multiply_add(load(s, at + n), erasing, f1)
            f2, f3 = multiply_add(load(s, at + 2 * n), erasing, f2), multiply_add(load(s, at + 3 * n), erasing, f3)
        f0, f1, f2, f3 = splat(total(f0)), splat(total(f1)), splat(total(f2)), splat(total(f3))
        u0, u1, u2, u3 = splat(u[r]), splat(u[r + 1]), splat(u[r + 2]), splat(u[r + 3])
        y0 = y1 = y2 = y3 = splat(_ZERO)
        for e in range(0, n, LANES):
            decay, writing, keys, queries, at = load(w, e), load(b, e), load(k, e), load(q, e), r * n + e
            s0 = multiply_add(decay, load(s, at), multiply_add(f0, writing, multiply(u0, keys)))
            s1 = multiply_add(decay, load(s, at + n), multiply_add(f1, writing, multiply(u1, keys)))
            s2 = multiply_add(decay, load(s, at + 2 * n), multiply_add(f2, writing, multiply(u2, keys)))
            s3 = multiply_add(decay, load(s, at + 3 * n), multiply_add(f3, writing, multiply(u3, keys)))
            store(s, at, s0)
            store(s, at + n, s1)
            store(s, at + 2 * n, s2)
            store(s, at + 3 * n, s3)
            y0, y1 = multiply_add(s0, queries, y0), multiply_add(s1, queries, y1)
            y2, y3 = multiply_add(s2, queries, y2), multiply_add(s3, queries, y3)
        store_totals(y, r, y0, y1, y2, y3)
    for r in range(4 * n_fours, n_rows):
        f0 = y0 = splat(_ZERO)
        for e in range(0, n, LANES):
            if not is_long:
                prefetch(s, r * n + e + _AHEAD)  # type: ignore[call-arg]
            f0 = multiply_add(load(s, r * n + e), load(a, e), f0)
        f0, u0 = splat(total(f0)), splat(u[r])
        for e in range(0, n, LANES):
            s0 = multiply_add(load(w, e), load(s, r * n + e), multiply_add(f0, load(b, e), multiply(u0, load(k, e))))
            store(s, r * n + e, s0)
            y0 = multiply_add(s0, load(q, e), y0)
        y[r] = total(y0)


@subroutine(ELEMENTWISE)
def _scaled(x, factor, out):
    for e in range(len(out)):
        out[e] = factor * x[e]


@subroutine(ELEMENTWISE)
def _exp(x, out):
    for e in range(len(out)):
        out[e] = exp_f32(x[e])


@subroutine(ELEMENTWISE)
def _multiply_(x, y):
    for e in range(len(x)):
        x[e] *= y[e]
