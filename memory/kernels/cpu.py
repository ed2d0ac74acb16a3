"""Kernels for float32 on the CPU, compiled by numba.

Pages, rows and states are read and written in place. Each output element is computed by one thread in an order that does
not depend on the rest of the batch, so a request's result is the same bits whoever shares its step.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from numba import get_num_threads, njit, prange, set_num_threads
from torch import Tensor

from memory.kernels.reference import gather_rows
from memory.kernels.signature import PagedBatch, StateSlots
from memory.kernels.vector_math import exp_f32

# Reassociation lets dot products use vector registers; where nothing is reduced it stays off. Together with "nsz" it would let
# LLVM merge the two parts of ln 2 in `exp_f32` and cost it 4 ulp. "nnan" and "ninf" stay off: NaN must come through.
_REDUCING = {"reassoc", "contract"}
_ELEMENTWISE = {"contract", "arcp", "nsz"}
_CHANNELS_AT_ONCE = 128
"""Channels of a recurrence that one task runs: 128 x 16 float32 states are 8 KiB and stay in the first-level cache."""
_FEW_QUERIES = 16
"""Requests with at most this many queries read their pages in place; longer ones gather them once for torch's attention."""

_WORTH_A_THREAD = 1 << 16
"""Multiplications that a second thread must save: waking it costs some ten microseconds, far more on a busy machine."""

_MOST_THREADS = get_num_threads()

_ZERO, _ONE = np.float32(0.0), np.float32(1.0)


def _use_threads(n_multiplications: int) -> None:
    """As many threads as torch uses, fewer for little work."""
    n_threads = min(torch.get_num_threads(), _MOST_THREADS, 1 + n_multiplications // _WORTH_A_THREAD)
    set_num_threads(n_threads)


def write_rows_(flat: Tensor, offsets_T: Tensor, rows_TR: Tensor) -> None:
    _write_rows(flat.numpy(), offsets_T.numpy(), rows_TR.contiguous().numpy())


@njit(cache=True)
def _write_rows(flat, offsets_T, rows_TR):  # type: ignore[no-untyped-def]
    for t in range(len(offsets_T)):
        start = offsets_T[t]
        flat[start : start + rows_TR.shape[1]] = rows_TR[t]


def read_rows(flat: Tensor, offsets_T: Tensor, shape: tuple[int, ...], initial: float) -> Tensor:
    rows_TR = torch.empty(len(offsets_T), math.prod(shape))
    _read_rows(flat.numpy(), offsets_T.numpy(), rows_TR.numpy(), np.float32(initial))
    return rows_TR.reshape(len(offsets_T), *shape)


@njit(cache=True)
def _read_rows(flat, offsets_T, rows_TR, initial):  # type: ignore[no-untyped-def]
    for t in range(len(offsets_T)):
        start = offsets_T[t]
        if start < 0:
            rows_TR[t] = initial
        else:
            rows_TR[t] = flat[start : start + rows_TR.shape[1]]


def paged_attention(q_THD: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, n_kv_heads: int, scale: float) -> Tensor:
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    counts = np.diff(batch.cu_seqlens)
    n_short = int(np.searchsorted(counts, _FEW_QUERIES, side="right"))
    if n_short:
        _use_threads(2 * q_THD[0].numel() * int((counts * batch.kv_lengths)[:n_short].sum()))
        _attend_few(
            q_THD.contiguous().numpy(), keys.numpy(), values.numpy(), batch.cu_seqlens[: n_short + 1], batch.kv_lengths,
            batch.page_table.numpy(), batch.page_tokens, n_kv_heads, np.float32(scale), out_THD.numpy(),
        )  # fmt: skip
    for i in range(n_short, len(counts)):
        start, end = batch.cu_seqlens[i : i + 2].tolist()
        out_THD[start:end] = _attend_many(q_THD[start:end], keys, values, batch, i, n_kv_heads, scale)
    return out_THD


def _attend_many(q_THD: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, request: int, n_kv_heads: int, scale: float) -> Tensor:
    n_queries, n_heads, head_dim = q_THD.shape
    n_rows = int(batch.kv_lengths[request])
    k_GRD, v_GRD = (gather_rows(flat, batch, request, n_kv_heads, head_dim).transpose(0, 1)[None] for flat in (keys, values))
    # `is_causal` aligns at the top left, which is right only when there are no earlier rows.
    mask = None if n_queries == n_rows else torch.ones(n_queries, n_rows, dtype=torch.bool).tril(n_rows - n_queries)
    out_HTD = F.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None], k_GRD, v_GRD, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=n_heads != n_kv_heads
    )
    return out_HTD[0].transpose(0, 1)


@njit(parallel=True, fastmath=_REDUCING, cache=True)
def _attend_few(q_THD, keys, values, cu_seqlens, kv_lengths, page_table, page_tokens, n_kv_heads, scale, out_THD):  # type: ignore[no-untyped-def]
    n_heads, head_dim = q_THD.shape[1], q_THD.shape[2]
    n_groups = n_heads // n_kv_heads
    n_requests = len(cu_seqlens) - 1
    row_elements = n_kv_heads * head_dim
    for task in prange(n_requests * n_kv_heads):
        i, g = task // n_kv_heads, task % n_kv_heads
        n_queries = cu_seqlens[i + 1] - cu_seqlens[i]
        weights = np.empty((n_groups, kv_lengths[i]), np.float32)
        out = np.empty(head_dim, np.float32)
        for j in range(n_queries):
            t = cu_seqlens[i] + j
            n_rows = kv_lengths[i] - n_queries + j + 1
            for r in range(n_rows):
                row = page_table[i, r // page_tokens] + (r % page_tokens) * row_elements + g * head_dim
                for h in range(n_groups):
                    score = _ZERO
                    for d in range(head_dim):
                        score += q_THD[t, g * n_groups + h, d] * keys[row + d]
                    weights[h, r] = score * scale
            for h in range(n_groups):
                highest = weights[h, 0]
                for r in range(1, n_rows):
                    highest = max(highest, weights[h, r])
                total = _ZERO
                for r in range(n_rows):
                    weight = exp_f32(weights[h, r] - highest)
                    weights[h, r] = weight
                    total += weight
                out[:] = _ZERO
                for r in range(n_rows):
                    row = page_table[i, r // page_tokens] + (r % page_tokens) * row_elements + g * head_dim
                    weight = weights[h, r]
                    for d in range(head_dim):
                        out[d] += weight * values[row + d]
                for d in range(head_dim):
                    out_THD[t, g * n_groups + h, d] = out[d] / total


def causal_conv(rows_TE: Tensor, weight_WE: Tensor, bias_E: Tensor | None, window: StateSlots) -> Tensor:
    out_TE = torch.empty_like(rows_TE, memory_format=torch.contiguous_format)
    bias = torch.zeros(rows_TE.shape[1]) if bias_E is None else bias_E
    _use_threads(rows_TE.numel() * len(weight_WE))
    _causal_conv(
        rows_TE.contiguous().numpy(), weight_WE.numpy(), bias.numpy(), window.cu_rows, window.flat.numpy(),
        window.sources.numpy(), window.targets.numpy(), np.float32(window.initial), out_TE.numpy(),
    )  # fmt: skip
    return out_TE


@njit(parallel=True, fastmath=_ELEMENTWISE, cache=True)
def _causal_conv(rows_TE, weight_WE, bias_E, cu_rows, flat, sources, targets, initial, out_TE):  # type: ignore[no-untyped-def]
    n_taps, n_channels = weight_WE.shape
    n_chunks = -(-n_channels // _CHANNELS_AT_ONCE)
    for task in prange((len(cu_rows) - 1) * n_chunks):
        i, first = task // n_chunks, (task % n_chunks) * _CHANNELS_AT_ONCE
        last = min(first + _CHANNELS_AT_ONCE, n_channels)
        start, end = cu_rows[i], cu_rows[i + 1]
        # The rows before and the new rows up to the last one; a ring would save the copy and cost the vectoriser.
        before = np.empty((n_taps - 1, last - first), np.float32)
        for w in range(n_taps - 1):
            if sources[i] < 0:
                before[w] = initial
            else:
                before[w] = flat[sources[i] + w * n_channels + first : sources[i] + w * n_channels + last]
        for t in range(start, end):
            for e in range(first, last):
                out_TE[t, e] = bias_E[e]
            for w in range(n_taps):
                r = t - (n_taps - 1 - w)
                if r >= start:
                    for e in range(first, last):
                        out_TE[t, e] += weight_WE[w, e] * rows_TE[r, e]
                else:
                    for e in range(first, last):
                        out_TE[t, e] += weight_WE[w, e] * before[r - start + n_taps - 1, e - first]
            for e in range(first, last):
                out_TE[t, e] = out_TE[t, e] / (_ONE + exp_f32(-out_TE[t, e]))
        for w in range(n_taps - 1):
            r = end - (n_taps - 1 - w)
            target = targets[i] + w * n_channels
            if r >= start:
                flat[target + first : target + last] = rows_TE[r, first:last]
            else:
                flat[target + first : target + last] = before[r - start + n_taps - 1]


def selective_scan(x_TE: Tensor, dt_TE: Tensor, b_TN: Tensor, c_TN: Tensor, a_NE: Tensor, d_E: Tensor, state: StateSlots) -> Tensor:
    y_TE = torch.empty_like(x_TE, memory_format=torch.contiguous_format)
    _use_threads(10 * x_TE.numel() * len(a_NE))
    _selective_scan(
        x_TE.contiguous().numpy(), dt_TE.contiguous().numpy(), b_TN.contiguous().numpy(), c_TN.contiguous().numpy(),
        a_NE.numpy(), d_E.numpy(), state.cu_rows, state.flat.numpy(), state.sources.numpy(), state.targets.numpy(),
        np.float32(state.initial), y_TE.numpy(),
    )  # fmt: skip
    return y_TE


@njit(parallel=True, fastmath=_ELEMENTWISE, cache=True)
def _selective_scan(x_TE, dt_TE, b_TN, c_TN, a_NE, d_E, cu_rows, flat, sources, targets, initial, y_TE):  # type: ignore[no-untyped-def]
    n_states, n_channels = a_NE.shape
    n_chunks = -(-n_channels // _CHANNELS_AT_ONCE)
    for task in prange((len(cu_rows) - 1) * n_chunks):
        i, first = task // n_chunks, (task % n_chunks) * _CHANNELS_AT_ONCE
        width = min(_CHANNELS_AT_ONCE, n_channels - first)
        h = np.empty((n_states, width), np.float32)
        a = np.empty((n_states, width), np.float32)
        for n in range(n_states):
            a[n] = a_NE[n, first : first + width]
            if sources[i] < 0:
                h[n] = initial
            else:
                source = sources[i] + n * n_channels + first
                h[n] = flat[source : source + width]
        for t in range(cu_rows[i], cu_rows[i + 1]):
            x, dt, y = x_TE[t, first : first + width], dt_TE[t, first : first + width], y_TE[t, first : first + width]
            for e in range(width):
                y[e] = d_E[first + e] * x[e]
            for n in range(n_states):
                b_n, c_n = b_TN[t, n], c_TN[t, n]
                for e in range(width):
                    h_new = exp_f32(dt[e] * a[n, e]) * h[n, e] + dt[e] * x[e] * b_n
                    h[n, e] = h_new
                    y[e] += h_new * c_n
        for n in range(n_states):
            target = targets[i] + n * n_channels + first
            flat[target : target + width] = h[n]
