"""Attention over pages: few queries read them in place, many gather them once for torch's fused attention."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit, prange
from torch import Tensor

from memory.kernels.cpu.rows import as_array, copy_
from memory.kernels.cpu.threads import ELEMENTWISE, REDUCING, use_threads
from memory.kernels.cpu.vector_math import exp_f32, prefetch
from memory.kernels.reference import attend, causal_mask, gather_rows
from memory.kernels.signature import PagedBatch, Prepared, Scoring

_FEW_QUERIES = 16
_BLOCK = 64
"""Rows whose scores are kept at once, 256 bytes a head."""

_NO_WINDOW = 1 << 60
_NO_SINKS, _NO_BIAS = np.zeros(0, np.float32), np.zeros((0, 0), np.float32)
_ZERO, _ONE, _TWO = np.float32(0.0), np.float32(1.0), np.float32(2.0)
_0, _1, _2, _3, _4, _STRIDE, _LINE = (np.uint64(i) for i in (0, 1, 2, 3, 4, _BLOCK, 16))


def paged_attention(q_THD: Tensor, keys: Prepared, values: Prepared, batch: PagedBatch, n_kv_heads: int, scoring: Scoring) -> Tensor:
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    counts = np.diff(batch.cu_seqlens)
    n_short = int(np.searchsorted(counts, _FEW_QUERIES, side="right"))
    if n_short:
        n_threads = use_threads(2 * q_THD[0].numel() * int((counts * batch.kv_lengths)[:n_short].sum()))
        heads_a_task = n_kv_heads if n_short >= 2 * n_threads else 1
        _attend_few(
            q_THD.contiguous().numpy(), as_array(keys), as_array(values), batch.cu_seqlens[: n_short + 1], batch.kv_lengths,
            as_array(batch.pages), batch.cu_pages, batch.page_tokens, n_kv_heads, heads_a_task, np.float32(scoring.scale),
            _NO_WINDOW if scoring.window is None else scoring.window, np.float32(scoring.softcap or 0.0),
            _NO_SINKS if scoring.sinks_H is None else as_array(scoring.sinks_H),
            _NO_BIAS if scoring.bias_HL is None else as_array(scoring.bias_HL), out_THD.numpy(),
        )  # fmt: skip
    for i in range(n_short, len(counts)):
        start, end = batch.cu_seqlens[i : i + 2].tolist()
        flats = (torch.as_tensor(flat) for flat in (keys, values))
        k_RGD, v_RGD = (gather_rows(flat, batch, i, n_kv_heads, q_THD.shape[2]) for flat in flats)
        out_THD[start:end] = _attend_many(q_THD[start:end], k_RGD, v_RGD, scoring)
    return out_THD


def attend_rows(q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, scoring: Scoring) -> Tensor:
    if len(q_THD) > _FEW_QUERIES:
        return _attend_many(q_THD, k_RGD, v_RGD, scoring)
    cu_seqlens, lengths, one_page = np.array([0, len(q_THD)]), np.array([len(k_RGD)]), np.array([0, 1])
    batch = PagedBatch(cu_seqlens, lengths, np.zeros(1, np.int64), one_page, page_tokens=len(k_RGD))
    keys, values = (x.contiguous().view(-1).numpy() for x in (k_RGD, v_RGD))
    return paged_attention(q_THD, keys, values, batch, k_RGD.shape[1], scoring)


def _attend_many(q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, scoring: Scoring) -> Tensor:
    (n_queries, n_heads, _), (n_rows, n_kv_heads, _), window = q_THD.shape, k_RGD.shape, scoring.window
    n_seen = n_rows if window is None else min(n_rows, n_queries + window - 1)
    k_GRD, v_GRD = (x[n_rows - n_seen :].transpose(0, 1) for x in (k_RGD, v_RGD))
    if scoring.softcap is not None or scoring.sinks_H is not None or scoring.bias_HL is not None:
        return _attend_group_by_group(q_THD, k_GRD, v_GRD, scoring)
    # `is_causal` aligns at the top left, which is right only when there are no earlier rows.
    is_plain = n_queries == n_rows and (window is None or window >= n_rows)
    mask = None if is_plain else causal_mask(n_queries, n_seen, window, q_THD.device) == 0
    out_HTD = F.scaled_dot_product_attention(
        q_THD.transpose(0, 1)[None], k_GRD[None], v_GRD[None], attn_mask=mask, is_causal=is_plain, scale=scoring.scale,
        enable_gqa=n_heads != n_kv_heads,
    )  # fmt: skip
    return out_HTD[0].transpose(0, 1)


def _attend_group_by_group(q_THD: Tensor, k_GRD: Tensor, v_GRD: Tensor, scoring: Scoring) -> Tensor:
    """All scores of a group of heads at once: for what torch's fused attention cannot do."""
    n_shared = q_THD.shape[1] // len(k_GRD)
    sinks_H, bias_HL = (None if x is None else torch.as_tensor(x) for x in (scoring.sinks_H, scoring.bias_HL))
    parts = []
    for g, (k_RD, v_RD) in enumerate(zip(k_GRD, v_GRD, strict=True)):
        heads = slice(g * n_shared, (g + 1) * n_shared)
        own = scoring._replace(sinks_H=None if sinks_H is None else sinks_H[heads], bias_HL=None if bias_HL is None else bias_HL[heads])
        parts.append(attend(q_THD[:, heads].transpose(0, 1), k_RD[None], v_RD[None], own))
    return torch.cat(parts).transpose(0, 1)


@njit(parallel=True, fastmath=ELEMENTWISE, error_model="numpy", cache=True)
def _attend_few(  # type: ignore[no-untyped-def]
    q_THD, keys, values, cu_seqlens, kv_lengths, pages, cu_pages, page_tokens, n_kv_heads, heads_a_task, scale, window, softcap,
    sinks, bias_HL, out_THD,
):  # fmt: skip
    """Online softmax over blocks of rows (Milakov & Gimelshein 2018); a task is a request and some of its key/value heads."""
    head_dim = q_THD.shape[2]
    n_groups = q_THD.shape[1] // n_kv_heads
    n_heads = heads_a_task * n_groups
    tasks_a_request = n_kv_heads // heads_a_task
    q_TR, out_TR = q_THD.reshape(len(q_THD), -1), out_THD.reshape(len(out_THD), -1)
    for task in prange((len(cu_seqlens) - 1) * tasks_a_request):
        i, first = task // tasks_a_request, task % tasks_a_request * heads_a_task
        table = pages[cu_pages[i] : cu_pages[i + 1]]
        rows = np.empty(_BLOCK, np.int64)
        scores = np.empty(n_heads * _BLOCK, np.float32)
        highest, total = np.empty(n_heads, np.float32), np.empty(n_heads, np.float32)
        for t in range(cu_seqlens[i], cu_seqlens[i + 1]):
            n_rows = kv_lengths[i] - (cu_seqlens[i + 1] - 1 - t)
            q = q_TR[t, first * n_groups * head_dim : (first * n_groups + n_heads) * head_dim]
            out = out_TR[t, first * n_groups * head_dim : (first * n_groups + n_heads) * head_dim]
            out[:] = _ZERO
            if len(sinks) > 0:  # a row of its own for each head, without a value
                copy_(highest, sinks[first * n_groups : first * n_groups + n_heads])
                total[:] = _ONE
            else:
                highest[:] = -np.inf
                total[:] = _ZERO
            for begin in range(max(0, n_rows - window), n_rows, _BLOCK):
                n = min(_BLOCK, n_rows - begin)
                for r in range(n):
                    page, slot = (begin + r) // page_tokens, (begin + r) % page_tokens
                    rows[r] = table[page] + (slot * n_kv_heads + first) * head_dim
                _scores(q, keys, values, rows[:n], n_groups, head_dim, scale, scores)
                for h in range(n_heads):
                    row_scores = scores[h * _BLOCK : h * _BLOCK + n]
                    if softcap > _ZERO:
                        _cap_(row_scores, softcap)
                    if len(bias_HL) > 0:
                        _add_bias_(row_scores, bias_HL[first * n_groups + h], n_rows - 1 - begin)
                    new_highest = max(highest[h], _largest(row_scores))
                    if new_highest > highest[h]:
                        fade = exp_f32(highest[h] - new_highest)
                        _scale_(out[h * head_dim : (h + 1) * head_dim], fade)
                        total[h] *= fade
                        highest[h] = new_highest
                    total[h] += _exp_and_sum_(row_scores, highest[h])
                _add_values_(out, values, rows[:n], n_groups, head_dim, scores)
            for h in range(n_heads):
                _scale_(out[h * head_dim : (h + 1) * head_dim], _ONE / total[h])


@njit(fastmath=REDUCING)
def _scores(q, keys, values, rows, n_groups, head_dim, scale, scores):  # type: ignore[no-untyped-def]
    """scores[h, r] = scale q[h] . keys[rows[r]], for the query heads of each of the row's key heads. Asks for the values."""
    head_dim, n_groups = np.uint64(head_dim), np.uint64(n_groups)
    n_kv_heads = np.uint64(len(q)) // (head_dim * n_groups)
    for r in range(np.uint64(len(rows))):
        for g in range(n_kv_heads):
            row = np.uint64(rows[r]) + g * head_dim
            for line in range(_0, head_dim, _LINE):
                prefetch(values, row + line)  # type: ignore[call-arg]
            for h in range(g * n_groups, (g + _1) * n_groups):
                score = _ZERO
                for d in range(head_dim):
                    score += q[h * head_dim + d] * keys[row + d]
                scores[h * _STRIDE + r] = score * scale


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def _add_values_(out, values, rows, n_groups, head_dim, weights):  # type: ignore[no-untyped-def]
    """out[h] += sum of weights[h, r] values[rows[r]]; four rows at once, so that `out` is written less often."""
    head_dim, n_groups, n = np.uint64(head_dim), np.uint64(n_groups), np.uint64(len(rows))
    n_kv_heads = np.uint64(len(out)) // (head_dim * n_groups)
    r = _0
    while r + _4 <= n:
        for g in range(n_kv_heads):
            at = g * head_dim
            a, b = np.uint64(rows[r]) + at, np.uint64(rows[r + _1]) + at
            c, d = np.uint64(rows[r + _2]) + at, np.uint64(rows[r + _3]) + at
            for h in range(g * n_groups, (g + _1) * n_groups):
                o, w = h * head_dim, h * _STRIDE + r
                w_a, w_b, w_c, w_d = weights[w], weights[w + _1], weights[w + _2], weights[w + _3]
                for e in range(head_dim):
                    out[o + e] += w_a * values[a + e] + w_b * values[b + e] + w_c * values[c + e] + w_d * values[d + e]
        r += _4
    while r < n:
        for h in range(n_kv_heads * n_groups):
            row = np.uint64(rows[r]) + h // n_groups * head_dim
            for e in range(head_dim):
                out[h * head_dim + e] += weights[h * _STRIDE + r] * values[row + e]
        r += _1


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def _cap_(x, cap):  # type: ignore[no-untyped-def]
    """x = cap tanh(x / cap)."""
    for e in range(len(x)):
        x[e] = cap * (_ONE - _TWO / (_ONE + exp_f32(_TWO * x[e] / cap)))


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def _add_bias_(x, bias, distance):  # type: ignore[no-untyped-def]
    """x[0] is the score of a row at this distance, those after it are nearer."""
    for e in range(len(x)):
        x[e] += bias[min(distance - e, len(bias) - 1)]


@njit(fastmath=REDUCING)
def _largest(x):  # type: ignore[no-untyped-def]
    largest = x[0]
    for r in range(1, len(x)):
        largest = max(largest, x[r])
    return largest


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def _scale_(x, factor):  # type: ignore[no-untyped-def]
    for e in range(len(x)):
        x[e] *= factor


@njit(fastmath=ELEMENTWISE, error_model="numpy")
def _exp_and_sum_(x, shift):  # type: ignore[no-untyped-def]
    for e in range(len(x)):
        x[e] = exp_f32(x[e] - shift)
    return _sum(x)


@njit(fastmath=REDUCING)
def _sum(x):  # type: ignore[no-untyped-def]
    total = _ZERO
    for e in range(len(x)):
        total += x[e]
    return total
