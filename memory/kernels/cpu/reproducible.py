"""Defines kernels of the CPU that give a row the same bits however many rows are computed together.

One kernel attends for single tokens, drafts, trees of drafts and prompts. For each query it reads rows in blocks that
begin at the query's first row, and forms every sum in one order, so that a query has the same bits whatever step it is
in. The other functions are those of `memory.kernels.cpu`, which take a prompt's tokens one after the other.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hybridmem.memory.blocks.arrays import ceil_div
from hybridmem.memory.errors import StepError
from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cpu.addresses import address_of, call_at
from hybridmem.memory.kernels.cpu.attention import NO_SINKS, NO_WINDOW, biases_of
from hybridmem.memory.kernels.cpu.channel_states import linear_scan, softplus, wkv4
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.matrix_states import matrix_scan
from hybridmem.memory.kernels.cpu.norms import norm_parts, rms_norm
from hybridmem.memory.kernels.cpu.page_choice import choose_pages
from hybridmem.memory.kernels.cpu.query_tiles import add_tiles_, score_tiles, weigh_unit_
from hybridmem.memory.kernels.cpu.recurrences import causal_conv, selective_scan
from hybridmem.memory.kernels.cpu.row_choice import choose_rows
from hybridmem.memory.kernels.cpu.rows import (
    as_array,
    copy_,
    plan_attention,
    plan_choice,
    prepare,
    read_rows,
    write_rows_,
)
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, subroutine
from hybridmem.memory.kernels.cpu.softmax import BLOCK, find_rows, scale_, start_
from hybridmem.memory.kernels.cpu.stabiliser import stabilise
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.signature import FoldedRows, PagedBatch, Prepared, Scoring, TreePaths

__all__ = [
    "attend_rows",
    "causal_conv",
    "choose_pages",
    "choose_rows",
    "linear_scan",
    "matrix_scan",
    "norm_parts",
    "paged_attention",
    "plan_attention",
    "plan_choice",
    "prepare",
    "read_rows",
    "rms_norm",
    "selective_scan",
    "softplus",
    "stabilise",
    "tree_attention",
    "wkv4",
    "write_rows_",
]

_UNITS = 64
"""How many units a task has at least, if there are as many: then scores and outputs stay in the first-level caches."""

_ONE = np.float32(1.0)
_NO_PATHS = np.zeros(0, np.int64)


def paged_attention(
    q_THD: Tensor, keys: Prepared, values: Prepared, batch: PagedBatch, n_kv_heads: int, scoring: Scoring,
    folded: FoldedRows | None = None,
) -> Tensor:  # fmt: skip
    if folded is not None:
        raise StepError("attention to rows that a storage keeps depends on how tokens are split into steps")
    at_once, n_blocks = 1, len(q_THD)
    if n_blocks > len(batch.kv_lengths):
        at_once = max(1, _UNITS * n_kv_heads // q_THD.shape[1])
        n_blocks = int(ceil_div(np.diff(batch.cu_seqlens), at_once).sum())
    return _attend(q_THD, keys, values, batch, n_kv_heads, scoring, at_once, n_blocks, None)


def tree_attention(
    q_QHD: Tensor, keys: Prepared, values: Prepared, batch: PagedBatch, paths: TreePaths, n_kv_heads: int,
    scoring: Scoring,
) -> Tensor:  # fmt: skip
    return _attend(q_QHD, keys, values, batch, n_kv_heads, scoring, 1, len(q_QHD), paths)


def attend_rows(
    q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, scoring: Scoring, batch: PagedBatch | None = None
) -> Tensor:
    checks.attend_rows(q_THD, k_RGD, v_RGD, scoring, checks.FLOATS_UP_TO_32_BITS)
    own = PagedBatch(
        np.array([0, len(q_THD)]), np.array([len(k_RGD)]), np.zeros(1, np.int64), np.array([0, 1]), len(k_RGD)
    )
    keys, values = (as_array(x.transpose(0, 1).contiguous().view(-1)) for x in (k_RGD, v_RGD))
    return paged_attention(q_THD, keys, values, own, k_RGD.shape[1], scoring)


def _attend(
    q_THD: Tensor, keys: Prepared, values: Prepared, batch: PagedBatch, n_kv_heads: int, scoring: Scoring,
    at_once: int, n_blocks: int, paths: TreePaths | None,
) -> Tensor:  # fmt: skip
    checks.paged_attention(q_THD, batch, n_kv_heads, scoring, checks.FLOATS_UP_TO_32_BITS)
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    sinks = NO_SINKS if scoring.sinks_H is None else as_array(scoring.sinks_H.contiguous())
    bias_QHL = biases_of(scoring)
    pages = as_array(batch.pages)
    # The room for pages decides, not the lengths, because a recorded step is replayed for longer sequences.
    n_threads = use_threads(2 * q_THD.numel() * pages.shape[-1] * batch.page_tokens // max(1, len(batch.kv_lengths)))
    heads_a_task = n_kv_heads if n_blocks >= 2 * n_threads and pages.ndim == 1 else 1
    q, k, v = as_array(q_THD.contiguous()), as_array(keys), as_array(values)
    starts, path_rows, cu_path_rows = (_NO_PATHS,) * 3 if paths is None else paths
    _attend_all(
        _task_address(q.dtype, k.dtype, v.dtype, sinks.dtype, bias_QHL.dtype), q, k, v, batch.cu_seqlens,
        batch.kv_lengths, at_once, n_blocks, np.atleast_2d(pages), batch.cu_pages, batch.page_tokens,
        n_kv_heads, heads_a_task, np.float32(scoring.scale), NO_WINDOW if scoring.window is None else scoring.window,
        np.float32(scoring.softcap or 0.0), sinks, bias_QHL, starts, path_rows, cu_path_rows, as_array(out_THD),
    )  # fmt: skip
    return out_THD


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
    one, because their blocks begin at other rows. Source: Milakov & Gimelshein 2018.
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
