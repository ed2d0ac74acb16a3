"""Recurrences whose state is a matrix a head. A task is one run over some rows of one head's state."""

from __future__ import annotations

import numpy as np
from numba import njit, prange
from torch import Tensor

from memory.interface import Int64s
from memory.kernels.cpu.rows import as_array, as_flat, copy_, require_shapes
from memory.kernels.cpu.threads import ELEMENTWISE, REDUCING, use_threads
from memory.kernels.cpu.vector_math import exp_f32
from memory.kernels.signature import Erase, Prepared, StateSlots

_LONG_RUN_ELEMENTS = 4096
"""State elements a task runs in long runs: 16 KiB stay in the first-level cache from token to token."""

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)
_NOTHING = np.zeros(0, np.float32)


def matrix_scan(
    q_TGN: Tensor, k_TGN: Tensor, v_THV: Tensor, log_decay: Tensor, erase: Erase | None, state: StateSlots, *,
    strength_TH: Tensor | None = None, skip_H: Prepared | None = None,
) -> Tensor:  # fmt: skip
    n_tokens, n_heads, n_rows = v_THV.shape
    n_columns = q_TGN.shape[2]
    require_shapes(
        "matrix_scan", state=(state.shape, (n_heads, n_rows, n_columns)), keys=(k_TGN.shape[2:], (n_columns,)),
        log_decay=(log_decay.shape[1:2], (n_heads,)), skip=((n_heads,) if skip_H is None else skip_H.shape, (n_heads,)),
        strength=((n_heads,) if strength_TH is None else strength_TH.shape[1:], (n_heads,)),
    )  # fmt: skip
    y_THV = v_THV.new_empty(v_THV.shape)
    (q, q_stride), (k, k_stride), (v, v_stride) = as_flat(q_TGN), as_flat(k_TGN), as_flat(v_THV)
    a, a_stride, a_heads, b = _NOTHING, 0, 1, _NOTHING
    if erase is not None:
        (a, a_stride), a_heads = as_flat(erase.a), n_heads // erase.a.shape[1]
        b = _NOTHING if erase.b is None else erase.b.contiguous().view(-1).numpy()
    strength, strength_stride = (_NOTHING, 0) if strength_TH is None else as_flat(strength_TH)
    use_threads(4 * v_THV.numel() * n_columns)
    _matrix_scan(
        q, q_stride, n_heads // q_TGN.shape[1], k, k_stride, n_heads // k_TGN.shape[1], v, v_stride,
        log_decay.contiguous().view(n_tokens, n_heads, -1).numpy(), a, a_stride, a_heads, b, erase is not None and erase.after_decay,
        strength, strength_stride, _NOTHING if skip_H is None else as_array(skip_H),
        state.cu_rows, as_array(state.flat), as_array(state.sources), as_array(state.targets), np.float32(state.initial),
        n_columns, _rows_at_once(state.cu_rows, n_tokens, n_rows, n_columns), y_THV.numpy(),
    )  # fmt: skip
    return y_THV


def _rows_at_once(cu_rows: Int64s, n_tokens: int, n_rows: int, n_columns: int) -> int:
    """In short runs each state is met once: a task takes a whole head."""
    return n_rows if n_tokens < 4 * (len(cu_rows) - 1) else min(n_rows, max(8, _LONG_RUN_ELEMENTS // n_columns))


@njit(parallel=True, fastmath=ELEMENTWISE, error_model="numpy", cache=True)
def _matrix_scan(  # type: ignore[no-untyped-def]
    q, q_stride, q_heads, k, k_stride, k_heads, v, v_stride, log_decay, a, a_stride, a_heads, b, after_decay,
    strength, strength_stride, skip, cu_rows, flat, sources, targets, initial, n_columns, at_once, y_THV,
):  # fmt: skip
    n_heads, n_rows = y_THV.shape[1:]
    n_chunks = -(-n_rows // at_once)
    erases, decays_columns = len(a) > 0, log_decay.shape[2] > 1
    for task in prange((len(cu_rows) - 1) * n_heads * n_chunks):
        i, h, first = task // (n_heads * n_chunks), task // n_chunks % n_heads, task % n_chunks * at_once
        last = min(first + at_once, n_rows)
        offset, size = (h * n_rows + first) * n_columns, (last - first) * n_columns
        s = flat[targets[i] + offset : targets[i] + offset + size]
        # The state is run in place, in its target.
        if sources[i] < 0:
            s[:] = initial
        elif sources[i] != targets[i]:
            copy_(s, flat[sources[i] + offset : sources[i] + offset + size])
        decay, erasing = np.empty(n_columns, np.float32), np.zeros(n_columns, np.float32)
        writing = np.zeros(n_columns, np.float32)
        for t in range(cu_rows[i], cu_rows[i + 1]):
            q_at, k_at = t * q_stride + h // q_heads * n_columns, t * k_stride + h // k_heads * n_columns
            v_at = t * v_stride + h * n_rows
            query, key, value = q[q_at : q_at + n_columns], k[k_at : k_at + n_columns], v[v_at + first : v_at + last]
            y = y_THV[t, h, first:last]
            beta = strength[t * strength_stride + h] if len(strength) > 0 else _ONE
            if not (erases or decays_columns):
                w = exp_f32(log_decay[t, h, 0])
                for r in range(last - first):
                    y[r] = _advance(s[r * n_columns : (r + 1) * n_columns], w, key, beta * value[r], query)
            else:
                if decays_columns:
                    _exp(log_decay[t, h], decay)
                else:
                    decay[:] = exp_f32(log_decay[t, h, 0])
                if erases:
                    a_at, b_at = t * a_stride + h // a_heads * n_columns, (t * n_heads + h) * n_columns
                    copy_(erasing, a[a_at : a_at + n_columns])
                    if len(b) > 0:
                        copy_(writing, b[b_at : b_at + n_columns])
                    else:
                        _scaled(key, -beta, writing)
                    if after_decay:
                        _multiply_(erasing, decay)
                for r in range(last - first):
                    y[r] = _advance_erasing(s[r * n_columns : (r + 1) * n_columns], decay, erasing, writing, key, beta * value[r], query)
            if len(skip) > 0:
                for r in range(last - first):
                    y[r] += skip[h] * value[r]


@njit(fastmath=REDUCING)
def _advance(s, w, k, v, q):  # type: ignore[no-untyped-def]
    """A row of S goes on by a token: s = w s + v k; returns s . q."""
    y = _ZERO
    for e in range(len(s)):
        new = w * s[e] + v * k[e]
        s[e] = new
        y += new * q[e]
    return y


@njit(fastmath=REDUCING)
def _advance_erasing(s, w, a, b, k, v, q):  # type: ignore[no-untyped-def]
    """As `_advance`, a decay for each column: s = w s + (s . a) b + v k."""
    found = _ZERO
    for e in range(len(s)):
        found += s[e] * a[e]
    y = _ZERO
    for e in range(len(s)):
        new = w[e] * s[e] + found * b[e] + v * k[e]
        s[e] = new
        y += new * q[e]
    return y


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def _scaled(x, factor, out):  # type: ignore[no-untyped-def]
    for e in range(len(out)):
        out[e] = factor * x[e]


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def _exp(x, out):  # type: ignore[no-untyped-def]
    for e in range(len(out)):
        out[e] = exp_f32(x[e])


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def _multiply_(x, y):  # type: ignore[no-untyped-def]
    for e in range(len(x)):
        x[e] *= y[e]
