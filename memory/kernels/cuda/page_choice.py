"""Chooses the pages that a query reads (Quest) on the GPU: a kernel scores them, torch's sort finds the best."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridmem.memory.blocks.staging import upload
from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cuda.choices import powers_of_2, tunable
from hybridmem.memory.kernels.cuda.launch import aligned_elements, dot, head_parts, launch, next_power_of_2
from hybridmem.memory.kernels.cuda.softmax import load_rows
from hybridmem.memory.kernels.signature import PageChoice


class ScorePages(NamedTuple):
    """Holds a choice: how many pages a tile has, and how many warps."""

    block_n: int
    num_warps: int


@tunable("score_pages", ScorePages, block_n=powers_of_2(16, 256), num_warps=powers_of_2(1, 16))
def _choose(block_m: int, head_dim: int, itemsize: int) -> ScorePages:
    return ScorePages(64, 4)


class _Places(NamedTuple):
    """Says for each query which pages are scored, how many are chosen, and which columns of the result they get.

    Attributes:
        begin_Q: the index of the first page that is scored.
        n_scored_Q, n_best_Q: how many pages are scored, and how many of these are chosen.
        column_Q: the column in the result of the first page chosen by score.
        fixed: (2, n) the column and the index of each page that is chosen whatever its score.
        most_scored: the greatest of n_scored_Q.
    """

    begin_Q: Tensor
    n_scored_Q: Tensor
    n_best_Q: Tensor
    column_Q: Tensor
    fixed: Tensor
    most_scored: int


def plan_choice(choice: PageChoice, device: torch.device) -> None:
    _lay_out(choice, device)


def choose_pages(q_QHD: Tensor, least: Tensor, greatest: Tensor, choice: PageChoice, n_kv_heads: int) -> Tensor:
    checks.choose_pages(q_QHD, choice, n_kv_heads, checks.FLOATS)
    device, n_chosen = q_QHD.device, int(choice.cu_chosen[-1])
    places, pages = _lay_out(choice, device), choice.pages
    # Pages that are not chosen are written into an additional last column.
    chosen_GC = torch.empty(n_kv_heads, n_chosen + 1, dtype=torch.int64, device=device)
    chosen_GC[:, places.fixed[0]] = pages[places.fixed[1]]
    if places.most_scored:
        scores_QGN = _scores(q_QHD, least, greatest, pages, places, n_kv_heads)
        order_QGN = scores_QGN.sort(dim=-1, descending=True, stable=True).indices
        n_QGN = torch.arange(places.most_scored, device=device).expand_as(order_QGN)
        is_best_QGN = torch.empty_like(order_QGN).scatter_(-1, order_QGN, n_QGN) < places.n_best_Q[:, None, None]
        column_QGN = places.column_Q[:, None, None] + is_best_QGN.cumsum(-1) - 1
        columns_GM = torch.where(is_best_QGN, column_QGN, n_chosen).transpose(0, 1).flatten(1)
        found_QN = pages[(places.begin_Q[:, None] + n_QGN[0, :1]).clamp(max=len(pages) - 1)]
        chosen_GC.scatter_(1, columns_GM, found_QN.flatten().expand(n_kv_heads, -1))
    return chosen_GC[:, :n_chosen]


def _lay_out(choice: PageChoice, device: torch.device) -> _Places:
    """Return the places for a choice. They are computed once for all layers."""
    if "places" not in choice.layouts:
        choice.layouts["places"] = _places(choice, device)
    places: _Places = choice.layouts["places"]
    return places


def _places(choice: PageChoice, device: torch.device) -> _Places:
    n_pages, n_chosen = np.diff(choice.cu_pages), np.diff(choice.cu_chosen)
    takes_all = n_pages == n_chosen
    n_first, n_last = np.where(takes_all, n_pages, choice.n_first), np.where(takes_all, 0, choice.n_last)
    n_scored, n_best = n_pages - n_first - n_last, n_chosen - n_first - n_last
    of_query = np.stack([choice.cu_pages[:-1] + n_first, n_scored, n_best, choice.cu_chosen[:-1] + n_first])
    is_fixed = np.ones(int(choice.cu_chosen[-1]), np.bool_)
    for column, n in zip(of_query[3].tolist(), n_best.tolist(), strict=True):
        is_fixed[column : column + n] = False
    columns = is_fixed.nonzero()[0]
    query = np.searchsorted(choice.cu_chosen, columns, side="right") - 1
    place = columns - choice.cu_chosen[query]
    fixed = np.stack(
        [columns, choice.cu_pages[query] + place + np.where(place < n_first[query], 0, (n_scored - n_best)[query])]
    )
    ints = upload(np.concatenate([of_query.ravel(), fixed.ravel()]), device)
    begin_Q, n_scored_Q, n_best_Q, column_Q = ints[: of_query.size].view(4, -1)
    return _Places(begin_Q, n_scored_Q, n_best_Q, column_Q, ints[of_query.size :].view(2, -1), int(n_scored.max()))


def _scores(q_QHD: Tensor, least: Tensor, greatest: Tensor, pages: Tensor, places: _Places, n_kv_heads: int) -> Tensor:
    """Compute the scores (Q, G, N) float32 of pages; after a query's last scored page they are -inf."""
    n_queries, n_heads, head_dim = q_QHD.shape
    q_QHD = q_QHD if q_QHD.stride(-1) == 1 else q_QHD.contiguous()
    n_shared, itemsize = n_heads // n_kv_heads, q_QHD.element_size()
    block_m = max(16, next_power_of_2(n_shared))
    block_n, num_warps = _choose(q_QHD.device, block_m, head_dim, itemsize)
    scores_QGN = torch.empty(n_queries, n_kv_heads, places.most_scored, dtype=torch.float32, device=q_QHD.device)
    launch(
        _score, (n_queries, triton.cdiv(places.most_scored, block_n), n_kv_heads),
        q_QHD, least, greatest, pages, places.begin_Q, places.n_scored_Q, scores_QGN, q_QHD.stride(0), q_QHD.stride(1),
        places.most_scored, N_SHARED=n_shared, BLOCK_M=block_m, BLOCK_N=block_n, D=head_dim,
        ALIGN=aligned_elements(head_dim, itemsize), **head_parts(head_dim), num_warps=num_warps,
    )  # fmt: skip
    return scores_QGN


@triton.jit(do_not_specialize=["most_scored"])
def _score(
    q, least, greatest, pages, begins, counts, scores, q_query, q_head, most_scored, N_SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    """Score a block of pages for one query and one key/value head.
    Positive elements of q are multiplied by the greatest key, negative ones by the least key.
    """
    query, g = tl.program_id(0).to(tl.int64), tl.program_id(2)
    p = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    inside = p < tl.load(counts + query)
    at = tl.multiple_of(tl.load(pages + tl.load(begins + query) + p, mask=inside, other=0) + g * D, ALIGN)
    q0, q1 = load_rows(q, query * q_query + (g * N_SHARED + m) * q_head, m < N_SHARED, D, D0, D1)
    most0, most1 = load_rows(greatest, at, inside, D, D0, D1)
    least0, least1 = load_rows(least, at, inside, D, D0, D1)
    s = dot(tl.maximum(q0.to(tl.float32), 0.0).to(q0.dtype), tl.trans(most0), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
    s = dot(tl.minimum(q0.to(tl.float32), 0.0).to(q0.dtype), tl.trans(least0), s)
    if D1 > 0:
        s = dot(tl.maximum(q1.to(tl.float32), 0.0).to(q1.dtype), tl.trans(most1), s)
        s = dot(tl.minimum(q1.to(tl.float32), 0.0).to(q1.dtype), tl.trans(least1), s)
    s = tl.where((m < N_SHARED)[:, None], s, float("-inf"))
    best = tl.max(s, 0) + tl.sum(tl.where(s != s, s, 0.0), 0)  # The sum is there because a maximum may hide a NaN.
    row = (query * tl.num_programs(2) + g) * most_scored
    tl.store(scores + row + p, tl.where(inside, best, float("-inf")), mask=p < most_scored)
