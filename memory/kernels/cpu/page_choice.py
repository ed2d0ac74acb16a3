"""Chooses the pages that a query reads, by the bounds of their keys (Quest), on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange
from torch import Tensor

from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.numbers import get
from hybridmem.memory.kernels.cpu.rows import as_array, copy_
from hybridmem.memory.kernels.cpu.rules import REDUCING, subroutine
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.cpu.vector_math import prefetch
from hybridmem.memory.kernels.signature import PageChoice, Prepared

_ZERO = np.float32(0.0)
_ONE, _AHEAD, _LINE = np.uint64(1), np.uint64(4), np.uint64(16)


def choose_pages(q_QHD: Tensor, least: Prepared, greatest: Prepared, choice: PageChoice, n_kv_heads: int) -> Tensor:
    checks.choose_pages(q_QHD, choice, n_kv_heads, checks.FLOATS_UP_TO_32_BITS)
    n_queries, _, head_dim = q_QHD.shape
    out_GC = torch.empty(n_kv_heads, int(choice.cu_chosen[-1]), dtype=torch.int64)
    n_threads = use_threads(2 * q_QHD[0].numel() * int(choice.cu_pages[-1]))
    heads_a_task = n_kv_heads if n_queries >= 2 * n_threads else 1
    _choose(
        q_QHD.float().contiguous().numpy().reshape(n_queries, n_kv_heads, -1), as_array(least), as_array(greatest),
        as_array(choice.pages), choice.cu_pages, choice.n_first, choice.n_last, choice.cu_chosen, heads_a_task,
        head_dim, out_GC.numpy(),
    )  # fmt: skip
    return out_GC


@compiled(parallel=True)
def _choose(
    q_QGE, least, greatest, pages, cu_pages, n_first, n_last, cu_chosen, heads_a_task, head_dim, out_GC,
):  # fmt: skip
    """Choose pages. A task is a query and some of its key/value heads."""
    tasks_a_query = len(out_GC) // heads_a_task
    for task in prange(len(q_QGE) * tasks_a_query):
        i, first = task // tasks_a_query, task % tasks_a_query * heads_a_task
        own = pages[cu_pages[i] : cu_pages[i + 1]]
        begin, end = cu_chosen[i], cu_chosen[i + 1]
        if end - begin == len(own):
            for g in range(first, first + heads_a_task):
                copy_(out_GC[g, begin:end], own)
        else:
            scores_GN = np.empty((heads_a_task, len(own) - n_first - n_last[i]), np.float32)
            _score(q_QGE[i, first : first + heads_a_task], least, greatest, own[n_first:], first, head_dim, scores_GN)
            for g in range(heads_a_task):
                _take_best(scores_GN[g], own, n_first, n_last[i], out_GC[first + g, begin:end])


@subroutine(REDUCING)
def _score(q_GE, least, greatest, pages, first, head_dim, scores_GN):
    up_GE, down_GE = np.maximum(q_GE, _ZERO), np.minimum(q_GE, _ZERO)
    n_heads, n_elements, size = np.uint64(len(q_GE)), np.uint64(q_GE.shape[1]), np.uint64(head_dim)
    n_pages = np.uint64(scores_GN.shape[1])
    for p in range(n_pages):
        ahead = np.uint64(pages[min(p + _AHEAD, n_pages - _ONE)]) + np.uint64(first) * size
        for line in range(ahead, ahead + n_heads * size, _LINE):
            prefetch(least, line)  # type: ignore[call-arg]
            prefetch(greatest, line)
        for g in range(n_heads):
            row = np.uint64(pages[p]) + (np.uint64(first) + g) * size
            best = np.float32(-np.inf)
            for h in range(np.uint64(0), n_elements, size):
                score = _ZERO
                for d in range(size):
                    score += up_GE[g, h + d] * get(greatest, row + d) + down_GE[g, h + d] * get(least, row + d)
                # NaN counts as the best score, so that it reaches the output.
                best = score if score > best else best if score == score else np.float32(np.inf)
            scores_GN[g, p] = best


@subroutine()
def _take_best(scores, pages, n_first, n_last, chosen):
    """Fill `chosen` with the first pages, the best of the middle pages, and the last pages, in order."""
    copy_(chosen[:n_first], pages[:n_first])
    copy_(chosen[len(chosen) - n_last :], pages[len(pages) - n_last :])
    n_best = len(chosen) - n_first - n_last
    if n_best == 0:
        return
    least_chosen = select_(scores.copy(), len(scores) - n_best)
    n_equal = n_best
    for p in range(len(scores)):
        n_equal -= scores[p] > least_chosen
    at = n_first
    for p in range(len(scores)):
        if scores[p] > least_chosen or (scores[p] == least_chosen and n_equal > 0):
            n_equal -= scores[p] == least_chosen
            chosen[at] = pages[n_first + p]
            at += 1


@subroutine()
def select_(x, n):
    """Return the number that is at place n when x is sorted; x is reordered (Hoare 1961, "Find").
    There is no NaN. `np.partition` does the same, but takes seven seconds to compile.
    """
    low, high = 0, len(x) - 1
    while low < high:
        pivot, i, j = x[(low + high) // 2], low, high
        while i <= j:
            while x[i] < pivot:
                i += 1
            while x[j] > pivot:
                j -= 1
            if i <= j:
                x[i], x[j] = x[j], x[i]
                i += 1
                j -= 1
        if n <= j:
            high = j
        elif n >= i:
            low = i
        else:
            break
    return x[n]
