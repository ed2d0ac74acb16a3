"""Computes attention of trees of draft tokens over pages on the CPU: each query reads the rows on its path in place."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cpu.addresses import address_of, call_at
from hybridmem.memory.kernels.cpu.attention import NO_SINKS, NO_WINDOW, biases_of
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.rows import as_array, copy_
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE
from hybridmem.memory.kernels.cpu.softmax import BLOCK, add_values_, find_rows, scale_, score_rows, start_, weigh_
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.signature import PagedBatch, Prepared, Scoring, TreePaths

_ONE = np.float32(1.0)


def tree_attention(
    q_QHD: Tensor, keys: Prepared, values: Prepared, batch: PagedBatch, paths: TreePaths, n_kv_heads: int,
    scoring: Scoring,
) -> Tensor:  # fmt: skip
    checks.paged_attention(q_QHD, batch, n_kv_heads, scoring, checks.FLOATS_UP_TO_32_BITS)
    out_QHD = torch.empty_like(q_QHD, memory_format=torch.contiguous_format)
    sinks = NO_SINKS if scoring.sinks_H is None else as_array(scoring.sinks_H.contiguous())
    bias_QHL = biases_of(scoring)
    q, k, v = as_array(q_QHD.contiguous()), as_array(keys), as_array(values)
    use_threads(2 * q_QHD.numel() * int(batch.kv_lengths.max()))
    _attend_nodes(
        _node_address(q.dtype, k.dtype, v.dtype, sinks.dtype, bias_QHL.dtype), q, k, v,
        np.repeat(np.arange(len(paths.starts)), np.diff(batch.cu_seqlens)), paths.starts, paths.rows, paths.cu_rows,
        as_array(batch.pages), batch.cu_pages, batch.page_tokens, n_kv_heads, np.float32(scoring.scale),
        NO_WINDOW if scoring.window is None else scoring.window, np.float32(scoring.softcap or 0.0), sinks, bias_QHL,
        as_array(out_QHD),
    )  # fmt: skip
    return out_QHD


@cache
def _node_address(queries: np.dtype, keys: np.dtype, values: np.dtype, sinks: np.dtype, biases: np.dtype) -> int:
    """Return the address of `_attend_node`'s machine code for arrays of these types."""
    i, x, ids = 0, _ONE, np.empty(0, np.int64)
    q_QR = np.empty((0, 0), queries)
    return address_of(
        _attend_node, i, q_QR, np.empty(0, keys), np.empty(0, values), ids, ids, ids, ids, ids, ids, i, i, i, x, i, x,
        np.empty(0, sinks), np.empty((0, 0, 0), biases), q_QR,
    )  # fmt: skip


@compiled(parallel=True)
def _attend_nodes(
    attend_at, q_QHD, keys, values, requests, starts, path_rows, cu_rows, pages, cu_pages, page_tokens, n_kv_heads,
    scale, window, softcap, sinks, bias_QHL, out_QHD,
):  # fmt: skip
    """Attend from all queries in several threads. A task is a query and one of its key/value heads."""
    q_QR, out_QR = q_QHD.reshape(len(q_QHD), -1), out_QHD.reshape(len(out_QHD), -1)
    n_groups = q_QHD.shape[1] // n_kv_heads
    for task in prange(len(q_QHD) * n_kv_heads):
        call_at(attend_at, (
            task, q_QR, keys, values, requests, starts, path_rows, cu_rows, pages, cu_pages, page_tokens, n_kv_heads,
            n_groups, scale, window, softcap, sinks, bias_QHL, out_QR,
        ))  # fmt: skip


@compiled(ELEMENTWISE)
def _attend_node(
    task, q_QR, keys, values, requests, starts, path_rows, cu_rows, pages, cu_pages, page_tokens, n_kv_heads, n_groups,
    scale, window, softcap, sinks, bias_QHL, out_QR,
):  # fmt: skip
    """Attend from one query by an online softmax over blocks of rows: those of its sequence, then those on its path."""
    head_dim = q_QR.shape[1] // (n_groups * n_kv_heads)
    apart = page_tokens * head_dim
    # The queries of a head come one after the other, because they share the rows of the sequence.
    t, head = task % len(q_QR), task // len(q_QR)
    i = requests[t]
    table, path = pages[cu_pages[i] : cu_pages[i + 1]], path_rows[cu_rows[t] : cu_rows[t + 1]]
    n_before = starts[i]
    n_rows = n_before + len(path)
    rows = np.empty(BLOCK, np.int64)
    scores = np.empty(n_groups * BLOCK, np.float32)
    highest, total = np.empty(n_groups, np.float32), np.empty(n_groups, np.float32)
    q, out = np.empty(n_groups * head_dim, np.float32), np.empty(n_groups * head_dim, np.float32)
    begin_of_heads, end_of_heads = head * n_groups * head_dim, (head + 1) * n_groups * head_dim
    copy_(q, q_QR[t, begin_of_heads:end_of_heads])
    start_(out, highest, total, sinks[head * n_groups : (head + 1) * n_groups])
    biases = bias_QHL[min(t, len(bias_QHL) - 1)][head * n_groups : (head + 1) * n_groups]
    for begin in range(max(0, n_rows - window), n_rows, BLOCK):
        n = min(BLOCK, n_rows - begin)
        n_old = min(n, max(0, n_before - begin))
        if n_old > 0:
            find_rows(table, begin, page_tokens, head, head_dim, rows[:n_old])
        for r in range(n_old, n):
            place = n_before + path[begin + r - n_before]
            rows[r] = table[place // page_tokens] + (head * page_tokens + place % page_tokens) * head_dim
        score_rows(q, keys, values, rows[:n], n_groups, head_dim, apart, scale, scores, True)
        weigh_(scores, n, out, highest, total, softcap, biases, n_rows - 1 - begin)
        add_values_(out, values, rows[:n], n_groups, head_dim, apart, scores)
    for h in range(n_groups):
        scale_(out[h * head_dim : (h + 1) * head_dim], _ONE / total[h])
    copy_(out_QR[t, begin_of_heads:end_of_heads], out)
