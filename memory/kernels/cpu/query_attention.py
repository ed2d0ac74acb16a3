"""Attends from few queries of each request, which read pages in place: single tokens, drafts, trees and short prompts.

For each query, rows are read in blocks that begin at the query's first row, and every sum is formed in one order. So a
query has the same bits whatever step it is in, and however many queries share what is loaded of a row.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cpu.addresses import address_of, call_at
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.query_tiles import MANY_UNITS, add_tiles_, score_tiles, widen_
from hybridmem.memory.kernels.cpu.rows import as_array, copy_
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, subroutine
from hybridmem.memory.kernels.cpu.softmax import BLOCK, find_rows, scale_, start_, weigh_unit_
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.signature import PagedBatch, Prepared, Scoring, TreePaths

NO_WINDOW = 1 << 60
NO_SINKS, NO_BIAS = np.zeros(0, np.float32), np.zeros((0, 0, 0), np.float32)

_UNITS = 64
"""A task computes at most so many units (one query of one head), so that scores and outputs stay in the first-level
caches.
"""
_FEWEST_UNITS, _TASKS_A_THREAD = 16, 4
"""With fewer tasks a thread, tasks are made smaller, down to so many units."""
_ONE = np.float32(1.0)
_NO_PATHS = np.zeros(0, np.int64)


def biases_of(scoring: Scoring) -> Prepared:
    """Return biases: (1, H, L), or (queries, H, L) if each query has its own. Without biases, the array is empty."""
    if scoring.bias_HL is None:
        return NO_BIAS
    bias = as_array(scoring.bias_HL.contiguous())
    return bias.reshape(-1, *bias.shape[-2:])


def attend_in_place(
    q_THD: Tensor, keys: Prepared, values: Prepared, batch: PagedBatch, n_kv_heads: int, scoring: Scoring,
    out_THD: Tensor, paths: TreePaths | None = None,
) -> None:  # fmt: skip
    """Attend from the requests of the batch, to which the first queries belong, and write into `out_THD`.

    Args:
        q_THD, out_THD: there may be more queries than the batch has. What belongs to these is not touched.
        paths: the rows that each query sees, if the requests are trees.
    """
    sinks = NO_SINKS if scoring.sinks_H is None else as_array(scoring.sinks_H.contiguous())
    bias_QHL = biases_of(scoring)
    pages, n_requests = as_array(batch.pages), len(batch.kv_lengths)
    n_queries, n_units = int(batch.cu_seqlens[-1]), q_THD.shape[1] // n_kv_heads
    # The room for pages decides, not the lengths, because a recorded step is replayed for longer sequences.
    n_threads = use_threads(
        2 * n_queries * q_THD[0].numel() * pages.shape[-1] * batch.page_tokens // max(1, n_requests)
    )
    at_once, n_blocks = 1, n_queries
    if paths is None and n_queries > n_requests:
        own_units = min(_UNITS, n_queries * n_units * n_kv_heads // (_TASKS_A_THREAD * n_threads))
        at_once = max(1, max(_FEWEST_UNITS, own_units) // n_units)
        n_blocks = int(ceil_div(np.diff(batch.cu_seqlens), at_once).sum())
    heads_a_task = n_kv_heads if n_blocks >= 2 * n_threads and pages.ndim == 1 else 1
    q, k, v = as_array(q_THD.contiguous()), as_array(keys), as_array(values)
    starts, path_rows, cu_path_rows = (_NO_PATHS,) * 3 if paths is None else paths
    _attend_all(
        _task_address(q.dtype, k.dtype, v.dtype, sinks.dtype, bias_QHL.dtype), q, k, v, batch.cu_seqlens,
        batch.kv_lengths, at_once, n_blocks, np.atleast_2d(pages), batch.cu_pages, batch.page_tokens,
        n_kv_heads, heads_a_task, np.float32(scoring.scale), NO_WINDOW if scoring.window is None else scoring.window,
        np.float32(scoring.softcap or 0.0), sinks, bias_QHL, starts, path_rows, cu_path_rows, as_array(out_THD),
    )  # fmt: skip


def tree_attention(
    q_QHD: Tensor, keys: Prepared, values: Prepared, batch: PagedBatch, paths: TreePaths, n_kv_heads: int,
    scoring: Scoring,
) -> Tensor:  # fmt: skip
    checks.paged_attention(q_QHD, batch, n_kv_heads, scoring, checks.FLOATS_UP_TO_32_BITS)
    out_QHD = torch.empty_like(q_QHD, memory_format=torch.contiguous_format)
    attend_in_place(q_QHD, keys, values, batch, n_kv_heads, scoring, out_QHD, paths)
    return out_QHD


def in_one_page(n_queries: int, k_RGD: Tensor, v_RGD: Tensor) -> tuple[Prepared, Prepared, PagedBatch]:
    """Return keys, values and a batch of one request, whose rows (R, G, D) are those of a single page."""
    ends, first, of_request = np.array([0, n_queries]), np.zeros(1, np.int64), np.array([0, 1])
    batch = PagedBatch(ends, np.array([len(k_RGD)]), first, of_request, page_tokens=len(k_RGD))
    keys, values = (as_array(x.transpose(0, 1).contiguous().view(-1)) for x in (k_RGD, v_RGD))
    return keys, values, batch


@cache
def _task_address(queries: np.dtype, keys: np.dtype, values: np.dtype, sinks: np.dtype, biases: np.dtype) -> int:
    """Return the address of `_attend_task`'s machine code for arrays of these types."""
    i, x, ids = 0, _ONE, np.empty(0, np.int64)
    q_TR = np.empty((0, 0), queries)
    return address_of(
        _attend_task, i, q_TR, np.empty(0, keys), np.empty(0, values), ids, ids, ids, i, i, ids.reshape(0, 0), ids, i,
        i, i, i, x, i, x, np.empty(0, sinks), np.empty((0, 0, 0), biases), ids, ids, ids, q_TR,
    )  # fmt: skip


@compiled(parallel=True)
def _attend_all(
    attend_at, q_THD, keys, values, cu_seqlens, kv_lengths, at_once, n_blocks, pages_GP, cu_pages,
    page_tokens, n_kv_heads, heads_a_task, scale, window, softcap, sinks, bias_QHL, starts, path_rows, cu_path_rows,
    out_THD,
):  # fmt: skip
    """Attend in several threads. A task is some queries of a request, and some of its key/value heads."""
    q_TR, out_TR = q_THD.reshape(len(q_THD), -1), out_THD.reshape(len(out_THD), -1)
    n_groups = q_THD.shape[1] // n_kv_heads
    cu_queries = np.zeros(len(cu_seqlens), np.int64)
    for i in range(len(kv_lengths)):
        cu_queries[i + 1] = cu_queries[i] - (cu_seqlens[i] - cu_seqlens[i + 1]) // at_once
    for task in prange(n_blocks * (n_kv_heads // heads_a_task)):
        call_at(attend_at, (
            task, q_TR, keys, values, cu_seqlens, kv_lengths, cu_queries, at_once, n_blocks, pages_GP, cu_pages,
            page_tokens, n_kv_heads, n_groups, heads_a_task, scale, window, softcap, sinks, bias_QHL, starts, path_rows,
            cu_path_rows, out_TR,
        ))  # fmt: skip


@compiled(ELEMENTWISE)
def _attend_task(
    task, q_TR, keys, values, cu_seqlens, kv_lengths, cu_queries, at_once, n_blocks, pages_GP, cu_pages, page_tokens,
    n_kv_heads, n_groups, heads_a_task, scale, window, softcap, sinks, bias_QHL, starts, path_rows, cu_path_rows,
    out_TR,
):  # fmt: skip
    """Attend with some queries of a request, by an online softmax over blocks of rows.

    Queries that see all rows before them share blocks. Those that see a window, or a path of a tree, are taken one by
    one, because their blocks begin at other rows. For many units, rows become float32 once, and not at each reading.
    Source: Milakov & Gimelshein 2018.
    """
    head_dim = q_TR.shape[1] // (n_groups * n_kv_heads)
    n_parts = n_kv_heads // heads_a_task
    nth, first_head = task // n_parts, task % n_parts * heads_a_task
    # Later queries of a prompt see more rows, so threads take blocks from its beginning and from its end in turn.
    block = nth // 2 if nth % 2 == 0 else n_blocks - 1 - nth // 2
    is_tree = len(starts) > 0
    i = _request_of(block, cu_seqlens if is_tree else cu_queries)
    if is_tree:
        begin, end = block, block + 1
    else:
        begin = cu_seqlens[i] + (block - cu_queries[i]) * at_once
        end = min(begin + at_once, cu_seqlens[i + 1])
    n_before = starts[i] if is_tree else 0
    path = path_rows[cu_path_rows[begin] : cu_path_rows[end]] if is_tree else path_rows
    most_rows = n_before + len(path) if is_tree else kv_lengths[i] - (cu_seqlens[i + 1] - end)
    step = end - begin if most_rows <= window else 1
    n_units = step * n_groups
    rows, counts = np.empty(BLOCK, np.int64), np.empty(step, np.int64)
    scores = np.empty(n_units * BLOCK, np.float32)
    highest, total = np.empty(n_units, np.float32), np.empty(n_units, np.float32)
    q, out = np.empty(n_units * head_dim, np.float32), np.empty(n_units * head_dim, np.float32)
    widens = n_units >= MANY_UNITS
    wide_keys = np.empty(BLOCK * head_dim if widens else 0, np.float32)
    wide_values, wide_rows = np.empty_like(wide_keys), np.arange(BLOCK) * head_dim
    size = n_groups * head_dim
    for g in range(first_head, first_head + heads_a_task):
        table = pages_GP[g if len(pages_GP) > 1 else 0][cu_pages[i] : cu_pages[i + 1]]
        own_sinks = sinks[g * n_groups : (g + 1) * n_groups]
        for t in range(begin, end, step):
            for s in range(step):
                copy_(q[s * size : (s + 1) * size], q_TR[t + s, g * size : (g + 1) * size])
                heads = slice(s * n_groups, (s + 1) * n_groups)
                start_(out[s * size : (s + 1) * size], highest[heads], total[heads], own_sinks)
            n_rows = most_rows - (end - step - t)
            for first in range(max(0, n_rows - window), n_rows, BLOCK):
                n = min(BLOCK, n_rows - first)
                n_old = min(n, max(0, n_before - first)) if is_tree else n
                if n_old > 0:
                    find_rows(table, first, page_tokens, g, head_dim, rows[:n_old])
                for r in range(n_old, n):
                    place = n_before + path[first + r - n_before]
                    rows[r] = table[place // page_tokens] + (g * page_tokens + place % page_tokens) * head_dim
                if widens:
                    widen_(keys, rows[:n], head_dim, wide_keys)
                    widen_(values, rows[:n], head_dim, wide_values)
                    score_tiles(q, wide_keys, wide_values, wide_rows[:n], n_units, head_dim, scale, scores)
                else:
                    score_tiles(q, keys, values, rows[:n], n_units, head_dim, scale, scores)
                for s in range(step):
                    counts[s] = min(BLOCK, n_rows - (step - 1 - s) - first)
                for u in range(n_units):
                    n_own, h = counts[u // n_groups], g * n_groups + u % n_groups
                    biases = bias_QHL[min(t + u // n_groups, len(bias_QHL) - 1)]
                    if n_own > 0:
                        weigh_unit_(
                            scores[u * BLOCK : u * BLOCK + n_own], out[u * head_dim : (u + 1) * head_dim], highest,
                            total, u, softcap, biases[h : h + 1].reshape(-1),
                            n_rows - (step - 1 - u // n_groups) - 1 - first,
                        )  # fmt: skip
                if widens:
                    add_tiles_(out, wide_values, wide_rows, counts, n_units, n_groups, head_dim, scores)
                else:
                    add_tiles_(out, values, rows, counts, n_units, n_groups, head_dim, scores)
            for u in range(n_units):
                scale_(out[u * head_dim : (u + 1) * head_dim], _ONE / total[u])
            for s in range(step):
                copy_(out_TR[t + s, g * size : (g + 1) * size], out[s * size : (s + 1) * size])


@subroutine()
def _request_of(block, cu_blocks):
    """Return the request to which a block belongs. Requests without blocks are skipped."""
    low, high = 0, len(cu_blocks) - 1
    while high - low > 1:
        middle = (low + high) // 2
        if cu_blocks[middle] <= block:
            low = middle
        else:
            high = middle
    return low
