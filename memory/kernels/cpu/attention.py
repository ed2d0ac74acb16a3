"""Attention over pages: few queries read them in place, many gather them once for torch's fused attention."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numba import prange
from torch import Tensor

from memory.kernels import checks
from memory.kernels.cpu.compiled import compiled
from memory.kernels.cpu.folded_rows import attend_few_folded
from memory.kernels.cpu.rows import as_array, gather_rows
from memory.kernels.cpu.softmax import BLOCK, add_values_, find_rows, scale_, score_rows, start_, weigh_
from memory.kernels.cpu.threads import ELEMENTWISE, use_threads
from memory.kernels.reference import attend, causal_mask, gather_folded
from memory.kernels.signature import FoldedRows, PagedBatch, Prepared, Scoring

_FEW_QUERIES = 16
_NO_WINDOW = 1 << 60
_NO_SINKS, _NO_BIAS = np.zeros(0, np.float32), np.zeros((0, 0), np.float32)
_ONE = np.float32(1.0)


def paged_attention(
    q_THD: Tensor, keys: Prepared, values: Prepared, batch: PagedBatch, n_kv_heads: int, scoring: Scoring, folded: FoldedRows | None = None
) -> Tensor:
    checks.paged_attention(q_THD, batch, n_kv_heads, scoring, checks.FLOAT32)
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    counts = np.diff(batch.cu_seqlens)
    n_short = int(np.searchsorted(counts, _FEW_QUERIES, side="right"))
    sinks = _NO_SINKS if scoring.sinks_H is None else as_array(scoring.sinks_H)
    bias_HL = _NO_BIAS if scoring.bias_HL is None else as_array(scoring.bias_HL)
    if n_short and folded is not None:
        attend_few_folded(q_THD, keys, values, batch, n_short, n_kv_heads, scoring, sinks, bias_HL, folded, out_THD)
    elif n_short:
        n_threads = use_threads(2 * q_THD[0].numel() * int((counts * batch.kv_lengths)[:n_short].sum()))
        pages = as_array(batch.pages)
        heads_a_task = n_kv_heads if n_short >= 2 * n_threads and pages.ndim == 1 else 1
        _attend_few(
            q_THD.contiguous().numpy(), as_array(keys), as_array(values), batch.cu_seqlens[: n_short + 1], batch.kv_lengths,
            np.atleast_2d(pages), batch.cu_pages, batch.page_tokens, n_kv_heads, heads_a_task, np.float32(scoring.scale),
            _NO_WINDOW if scoring.window is None else scoring.window, np.float32(scoring.softcap or 0.0), sinks, bias_HL, out_THD.numpy(),
        )  # fmt: skip
    for i in range(n_short, len(counts)):
        start, end = batch.cu_seqlens[i : i + 2].tolist()
        k_RGD, v_RGD = (gather_rows(flat, batch, i, n_kv_heads, q_THD.shape[2]) for flat in (keys, values))
        if folded is not None:
            k_RGD, v_RGD = (torch.cat(pair) for pair in zip(gather_folded(folded, i), (k_RGD, v_RGD), strict=True))
        out_THD[start:end] = _attend_many(q_THD[start:end], k_RGD, v_RGD, scoring)
    return out_THD


def attend_rows(q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, scoring: Scoring, batch: PagedBatch | None = None) -> Tensor:
    checks.attend_rows(q_THD, k_RGD, v_RGD, scoring, checks.FLOAT32)
    if len(q_THD) > _FEW_QUERIES:
        return _attend_many(q_THD, k_RGD, v_RGD, scoring)
    cu_seqlens, lengths, one_page = np.array([0, len(q_THD)]), np.array([len(k_RGD)]), np.array([0, 1])
    batch = PagedBatch(cu_seqlens, lengths, np.zeros(1, np.int64), one_page, page_tokens=len(k_RGD))
    keys, values = (x.transpose(0, 1).contiguous().view(-1).numpy() for x in (k_RGD, v_RGD))
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


@compiled(parallel=True, fastmath=ELEMENTWISE, error_model="numpy")
def _attend_few(  # type: ignore[no-untyped-def]
    q_THD, keys, values, cu_seqlens, kv_lengths, pages_GP, cu_pages, page_tokens, n_kv_heads, heads_a_task, scale, window, softcap,
    sinks, bias_HL, out_THD,
):  # fmt: skip
    """Online softmax over blocks of rows (Milakov & Gimelshein 2018); a task is a request and some of its key/value heads."""
    head_dim = q_THD.shape[2]
    apart = page_tokens * head_dim
    n_groups = q_THD.shape[1] // n_kv_heads
    n_heads = heads_a_task * n_groups
    tasks_a_request = n_kv_heads // heads_a_task
    q_TR, out_TR = q_THD.reshape(len(q_THD), -1), out_THD.reshape(len(out_THD), -1)
    for task in prange((len(cu_seqlens) - 1) * tasks_a_request):
        i, first = task // tasks_a_request, task % tasks_a_request * heads_a_task
        table = pages_GP[first if len(pages_GP) > 1 else 0][cu_pages[i] : cu_pages[i + 1]]
        rows = np.empty(BLOCK, np.int64)
        scores = np.empty(n_heads * BLOCK, np.float32)
        highest, total = np.empty(n_heads, np.float32), np.empty(n_heads, np.float32)
        for t in range(cu_seqlens[i], cu_seqlens[i + 1]):
            n_rows = kv_lengths[i] - (cu_seqlens[i + 1] - 1 - t)
            q = q_TR[t, first * n_groups * head_dim : (first * n_groups + n_heads) * head_dim]
            out = out_TR[t, first * n_groups * head_dim : (first * n_groups + n_heads) * head_dim]
            start_(out, highest, total, sinks[first * n_groups : first * n_groups + n_heads])
            for begin in range(max(0, n_rows - window), n_rows, BLOCK):
                n = min(BLOCK, n_rows - begin)
                find_rows(table, begin, page_tokens, first, head_dim, rows[:n])
                score_rows(q, keys, values, rows[:n], n_groups, head_dim, apart, scale, scores, True)
                biases = bias_HL[first * n_groups : first * n_groups + n_heads]
                weigh_(scores, n, out, highest, total, softcap, biases, n_rows - 1 - begin)
                add_values_(out, values, rows[:n], n_groups, head_dim, apart, scores)
            for h in range(n_heads):
                scale_(out[h * head_dim : (h + 1) * head_dim], _ONE / total[h])
