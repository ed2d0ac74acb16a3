"""Computes attention over pages on the CPU: few queries read pages in place, many gather rows for torch."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.blocked import Rows, attend, blocks, causal_mask, sees_all
from hybridmem.memory.kernels.cpu.addresses import address_of, call_at
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.folded_rows import attend_few_folded
from hybridmem.memory.kernels.cpu.rows import as_array, copy_, gather_rows
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE
from hybridmem.memory.kernels.cpu.softmax import BLOCK, add_values_, find_rows, scale_, score_rows, start_, weigh_
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.reference import row_reader
from hybridmem.memory.kernels.signature import FoldedRows, PagedBatch, Prepared, Scoring

_fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The operator that `scaled_dot_product_attention` calls on a CPU. It also returns the sums of weights."""

_FEW_QUERIES, _FEW_UNFUSED = 16, 32
"""Requests with at most so many queries read pages in place. The second limit is for scores that torch's fused
attention cannot compute, because attention of several operators takes longer.
"""
_MOST_QUERIES, _ROWS, _MOST_ELEMENTS = 1024, 1024, 1 << 22
"""The limits of one call with many queries: the number of queries, of rows, and of elements of the queries."""

NO_WINDOW = 1 << 60
NO_SINKS, NO_BIAS = np.zeros(0, np.float32), np.zeros((0, 0, 0), np.float32)
_ONE = np.float32(1.0)


def paged_attention(
    q_THD: Tensor,
    keys: Prepared,
    values: Prepared,
    batch: PagedBatch,
    n_kv_heads: int,
    scoring: Scoring,
    folded: FoldedRows | None = None,
) -> Tensor:
    checks.paged_attention(q_THD, batch, n_kv_heads, scoring, checks.FLOATS_UP_TO_32_BITS)
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    counts = np.diff(batch.cu_seqlens)
    n_short = int(np.searchsorted(counts, _FEW_QUERIES if _can_fuse(scoring) else _FEW_UNFUSED, side="right"))
    sinks = NO_SINKS if scoring.sinks_H is None else as_array(scoring.sinks_H.contiguous())
    bias_QHL = biases_of(scoring)
    if n_short and folded is not None:
        attend_few_folded(q_THD, keys, values, batch, n_short, n_kv_heads, scoring, sinks, bias_QHL, folded, out_THD)
    elif n_short:
        pages = as_array(batch.pages)
        # The room for pages decides, not the lengths, because a recorded step is replayed for longer sequences.
        n_threads = use_threads(2 * q_THD[0].numel() * int(counts[n_short - 1]) * pages.shape[-1] * batch.page_tokens)
        heads_a_task = n_kv_heads if n_short >= 2 * n_threads and pages.ndim == 1 else 1
        q, k, v = as_array(q_THD.contiguous()), as_array(keys), as_array(values)
        _attend_few(
            _attend_address(q.dtype, k.dtype, v.dtype, sinks.dtype, bias_QHL.dtype), q, k, v,
            batch.cu_seqlens[: n_short + 1], batch.kv_lengths, np.atleast_2d(pages), batch.cu_pages, batch.page_tokens,
            n_kv_heads, heads_a_task, np.float32(scoring.scale),
            NO_WINDOW if scoring.window is None else scoring.window, np.float32(scoring.softcap or 0.0),
            sinks, bias_QHL, as_array(out_THD),
        )  # fmt: skip
    for i in range(n_short, len(counts)):
        own = slice(*batch.cu_seqlens[i : i + 2].tolist())
        n_rows, read = row_reader(gather_rows, keys, values, batch, i, n_kv_heads, q_THD.shape[2], folded)
        _attend_many(q_THD[own], n_rows, n_kv_heads, read, scoring.of(own), out_THD[own])
    return out_THD


def _can_fuse(scoring: Scoring) -> bool:
    """Return whether torch's fused attention can compute such scores."""
    return scoring.softcap is None and scoring.sinks_H is None and scoring.bias_HL is None


def biases_of(scoring: Scoring) -> Prepared:
    """Return biases: (1, H, L), or (queries, H, L) if each query has its own. Without biases, the array is empty."""
    if scoring.bias_HL is None:
        return NO_BIAS
    bias = as_array(scoring.bias_HL.contiguous())
    return bias.reshape(-1, *bias.shape[-2:])


def attend_rows(
    q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, scoring: Scoring, batch: PagedBatch | None = None
) -> Tensor:
    checks.attend_rows(q_THD, k_RGD, v_RGD, scoring, checks.FLOATS_UP_TO_32_BITS)
    if len(q_THD) > _FEW_QUERIES:
        out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        _attend_many(
            q_THD, len(k_RGD), k_RGD.shape[1], lambda begin, end: (k_RGD[begin:end], v_RGD[begin:end]), scoring, out_THD
        )
        return out_THD
    cu_seqlens, lengths, one_page = np.array([0, len(q_THD)]), np.array([len(k_RGD)]), np.array([0, 1])
    batch = PagedBatch(cu_seqlens, lengths, np.zeros(1, np.int64), one_page, page_tokens=len(k_RGD))
    keys, values = (as_array(x.transpose(0, 1).contiguous().view(-1)) for x in (k_RGD, v_RGD))
    return paged_attention(q_THD, keys, values, batch, k_RGD.shape[1], scoring)


def _attend_many(q_THD: Tensor, n_rows: int, n_kv_heads: int, read: Rows, scoring: Scoring, out_THD: Tensor) -> None:
    """Attend from the last T of `n_rows` rows, by torch's fused attention if that can compute such scores.

    It also returns the log of each query's sum of weights, by which the results of several blocks of rows are joined.
    """
    if not _can_fuse(scoring):
        out_THD[:] = attend(q_THD, n_rows, n_kv_heads, read, scoring)
        return
    n_heads, head_dim = q_THD.shape[1:]
    n_at_once = max(_FEW_QUERIES, min(_MOST_QUERIES, _MOST_ELEMENTS // (n_heads * head_dim)))
    for own, first, rows in blocks(len(q_THD), n_rows, scoring.window, n_at_once, _ROWS):
        n_queries = own.stop - own.start
        q_GSTD = q_THD[own].reshape(n_queries, n_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        found_GSTD, log_sum_GST = torch.empty(0), torch.empty(0)
        for begin, end in rows:
            k_GSRD, v_GSRD = (x.transpose(0, 1)[:, None].expand(-1, q_GSTD.shape[1], -1, -1) for x in read(begin, end))
            # Torch's `is_causal` aligns the mask at the top left. That is right only for the queries' own rows.
            mask, is_causal = None, begin == first and (scoring.window is None or n_queries <= scoring.window)
            if not is_causal and not sees_all(n_queries, end - begin, scoring.window, first - begin):
                mask = causal_mask(n_queries, end - begin, scoring.window, q_THD.device, first - begin)
            more_GSTD, log_more_GST = _fused(
                q_GSTD, k_GSRD, v_GSRD, is_causal=is_causal, attn_mask=mask, scale=scoring.scale
            )
            if len(rows) > 1 and (log_more_GST == 0.0).any() and k_GSRD[:, 0].isinf().any():
                # If all scores are -inf, torch returns 0, the log of one. Only infinite keys do that.
                out_THD[:] = attend(q_THD, n_rows, n_kv_heads, read, scoring)
                return
            if begin == rows[0][0]:
                found_GSTD, log_sum_GST = more_GSTD, log_more_GST
                continue
            log_both_GST = torch.logaddexp(log_sum_GST, log_more_GST)
            found_GSTD.mul_((log_sum_GST - log_both_GST).exp_()[..., None])
            found_GSTD.add_(more_GSTD.mul_((log_more_GST - log_both_GST).exp_()[..., None]))
            log_sum_GST = log_both_GST
        out_THD[own].view(n_queries, n_kv_heads, -1, head_dim).copy_(found_GSTD.permute(2, 0, 1, 3))


@cache
def _attend_address(queries: np.dtype, keys: np.dtype, values: np.dtype, sinks: np.dtype, biases: np.dtype) -> int:
    """Return the address of `_attend_task`'s machine code for arrays of these types."""
    i, x, ids = 0, _ONE, np.empty(0, np.int64)
    q_TR = np.empty((0, 0), queries)
    return address_of(
        _attend_task, i, q_TR, np.empty(0, keys), np.empty(0, values), ids, ids, ids.reshape(0, 0), ids, i, i, i, i, x,
        i, x, np.empty(0, sinks), np.empty((0, 0, 0), biases), q_TR,
    )  # fmt: skip


@compiled(parallel=True)
def _attend_few(
    attend_at, q_THD, keys, values, cu_seqlens, kv_lengths, pages_GP, cu_pages, page_tokens, n_kv_heads, heads_a_task,
    scale, window, softcap, sinks, bias_QHL, out_THD,
):  # fmt: skip
    """Attend from all requests in several threads. A task is a request and some of its key/value heads.

    Tasks are called by their address, because the compiler would read the code inside of a parallel loop four times.
    """
    q_TR, out_TR = q_THD.reshape(len(q_THD), -1), out_THD.reshape(len(out_THD), -1)
    n_groups = q_THD.shape[1] // n_kv_heads
    for task in prange((len(cu_seqlens) - 1) * (n_kv_heads // heads_a_task)):
        call_at(attend_at, (
            task, q_TR, keys, values, cu_seqlens, kv_lengths, pages_GP, cu_pages, page_tokens, n_kv_heads, n_groups,
            heads_a_task, scale, window, softcap, sinks, bias_QHL, out_TR,
        ))  # fmt: skip


@compiled(ELEMENTWISE)
def _attend_task(
    task, q_TR, keys, values, cu_seqlens, kv_lengths, pages_GP, cu_pages, page_tokens, n_kv_heads, n_groups,
    heads_a_task, scale, window, softcap, sinks, bias_QHL, out_TR,
):  # fmt: skip
    """Attend from one request with some of its heads, by an online softmax over blocks of rows.

    Source: Milakov & Gimelshein 2018.
    """
    head_dim = q_TR.shape[1] // (n_groups * n_kv_heads)
    apart = page_tokens * head_dim
    n_heads = heads_a_task * n_groups
    tasks_a_request = n_kv_heads // heads_a_task
    i, first = task // tasks_a_request, task % tasks_a_request * heads_a_task
    table = pages_GP[first if len(pages_GP) > 1 else 0][cu_pages[i] : cu_pages[i + 1]]
    rows = np.empty(BLOCK, np.int64)
    scores = np.empty(n_heads * BLOCK, np.float32)
    highest, total = np.empty(n_heads, np.float32), np.empty(n_heads, np.float32)
    q, out = np.empty(n_heads * head_dim, np.float32), np.empty(n_heads * head_dim, np.float32)
    begin_of_heads, end_of_heads = first * n_groups * head_dim, (first * n_groups + n_heads) * head_dim
    for t in range(cu_seqlens[i], cu_seqlens[i + 1]):
        n_rows = kv_lengths[i] - (cu_seqlens[i + 1] - 1 - t)
        copy_(q, q_TR[t, begin_of_heads:end_of_heads])
        start_(out, highest, total, sinks[first * n_groups : first * n_groups + n_heads])
        biases = bias_QHL[min(t, len(bias_QHL) - 1)][first * n_groups : first * n_groups + n_heads]
        for begin in range(max(0, n_rows - window), n_rows, BLOCK):
            n = min(BLOCK, n_rows - begin)
            find_rows(table, begin, page_tokens, first, head_dim, rows[:n])
            score_rows(q, keys, values, rows[:n], n_groups, head_dim, apart, scale, scores, True)
            weigh_(scores, n, out, highest, total, softcap, biases, n_rows - 1 - begin)
            add_values_(out, values, rows[:n], n_groups, head_dim, apart, scores)
        for h in range(n_heads):
            scale_(out[h * head_dim : (h + 1) * head_dim], _ONE / total[h])
        copy_(out_TR[t, begin_of_heads:end_of_heads], out)
