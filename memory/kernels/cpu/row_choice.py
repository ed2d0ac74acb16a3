"""Chooses the rows that a query reads by the keys of an index, on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.page_choice import select_
from hybridmem.memory.kernels.cpu.query_tiles import score_tiles
from hybridmem.memory.kernels.cpu.rows import as_array
from hybridmem.memory.kernels.cpu.rules import subroutine
from hybridmem.memory.kernels.cpu.softmax import BLOCK, find_rows
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.signature import PagedBatch, Prepared

_ZERO = np.float32(0.0)
_MOST_SCORES = 1 << 24
"""How many scores are in memory at once, unless one query has more."""
_ROWS_A_TASK = 512


def choose_rows(
    q_THD: Tensor, weights_TH: Tensor, keys: Prepared, batch: PagedBatch, n_chosen: int, scale: float,
    span_tokens: int = 1,
) -> Tensor:  # fmt: skip
    checks.choose_rows(q_THD, weights_TH, batch, checks.FLOATS_UP_TO_32_BITS)
    n_heads, head_dim = q_THD.shape[1:]
    ends_T = np.repeat(batch.kv_lengths - batch.cu_seqlens[1:], np.diff(batch.cu_seqlens)) + np.arange(
        1, len(q_THD) + 1
    )
    ends_T //= span_tokens
    cu_chosen = np.concatenate([[0], np.minimum(ends_T, n_chosen).cumsum()])
    out_C, pages = torch.empty(int(cu_chosen[-1]), dtype=torch.int64), as_array(batch.pages)
    q_TE, w_TH = (x.float().contiguous().numpy().reshape(len(x), -1) for x in (q_THD, weights_TH))
    for i, n_rows in enumerate((batch.kv_lengths // span_tokens).tolist()):
        begin, end = batch.cu_seqlens[i : i + 2].tolist()
        table, n_at_once = pages[batch.cu_pages[i] : batch.cu_pages[i + 1]], max(1, _MOST_SCORES // max(1, n_rows))
        for first in range(begin, end, n_at_once):
            own = slice(first, min(end, first + n_at_once))
            use_threads(q_TE[own].size * n_rows)
            scores_TR = np.empty((own.stop - first, int(ends_T[own.stop - 1])), np.float32)
            _score(
                q_TE[own], w_TH[own], as_array(keys), table, batch.page_tokens, n_heads, head_dim, np.float32(scale),
                ends_T[own], scores_TR,
            )  # fmt: skip
            _take(scores_TR, ends_T[own], cu_chosen[first : own.stop + 1], out_C.numpy())
    return out_C


@compiled(parallel=True)
def _score(q_TE, w_TH, keys, table, page_tokens, n_heads, head_dim, scale, ends_T, scores_TR):
    """Score rows for queries of one request. A task is some rows, read by all queries while they are in the cache."""
    n_rows = scores_TR.shape[1]
    for task in prange((n_rows + _ROWS_A_TASK - 1) // _ROWS_A_TASK):
        begin = task * _ROWS_A_TASK
        end = min(n_rows, begin + _ROWS_A_TASK)
        _score_some(q_TE, w_TH, keys, table, page_tokens, n_heads, head_dim, scale, ends_T, begin, end, scores_TR)


@subroutine()
def _score_some(q_TE, w_TH, keys, table, page_tokens, n_heads, head_dim, scale, ends_T, first, last, scores_TR):
    rows, products = np.empty(BLOCK, np.int64), np.empty(n_heads * BLOCK, np.float32)
    for begin in range(first, last, BLOCK):
        n = min(BLOCK, last - begin)
        find_rows(table, begin, page_tokens, 0, head_dim, rows[:n])
        for t in range(len(q_TE)):
            own = min(n, ends_T[t] - begin)
            if own > 0:
                score_tiles(q_TE[t], keys, keys, rows[:own], n_heads, head_dim, scale, products)
                _weigh(products, w_TH[t], scores_TR[t, begin : begin + own])


@subroutine()
def _weigh(products, weights, scores):
    """Compute sum_h weights_h relu(products_h) of each row. NaN becomes the best score, and so reaches the output."""
    scores[:] = _ZERO
    for h in range(len(weights)):
        own, weight = products[h * BLOCK : h * BLOCK + len(scores)], weights[h]
        for r in range(len(scores)):
            scores[r] += weight * (_ZERO if own[r] < _ZERO else own[r])
    for r in range(len(scores)):
        scores[r] = scores[r] if scores[r] == scores[r] else np.float32(np.inf)


@compiled(parallel=True)
def _take(scores_TR, ends_T, cu_chosen, out_C):
    """Write the positions of the best rows of each query, in order."""
    for t in prange(len(scores_TR)):
        scores, chosen = scores_TR[t, : ends_T[t]], out_C[cu_chosen[t] : cu_chosen[t + 1]]
        least = np.float32(-np.inf)
        if len(chosen) < len(scores):
            least = select_(scores.copy(), len(scores) - len(chosen))
        n_equal = len(chosen)
        for r in range(len(scores)):
            n_equal -= scores[r] > least
        at = 0
        for r in range(len(scores)):
            if scores[r] > least or (scores[r] == least and n_equal > 0):
                n_equal -= scores[r] == least
                chosen[at] = r
                at += 1
