"""Chooses the rows that a query reads by an index's keys on the GPU: a kernel scores them, torch's sort finds the best.

DeepSeek-AI 2025, "DeepSeek-V3.2". A program scores a block of keys for one query: each key is read once for all heads.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridmem.memory.blocks.staging import upload
from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cuda.launch import aligned_elements, dot, head_parts, launch, next_power_of_2
from hybridmem.memory.kernels.cuda.softmax import load_rows
from hybridmem.memory.kernels.signature import PagedBatch, as_tensor

_MOST_SCORES = 1 << 26
"""How many scores are in memory at once, unless one query has more: 256 MiB, and a sort of as many."""
_BLOCK_N, _NUM_WARPS = 64, 4
"""How many keys a program scores, and with how many warps. They are guesses, not measured on a GPU."""


def choose_rows(
    q_THD: Tensor, weights_TH: Tensor, keys: Tensor, batch: PagedBatch, n_chosen: int, scale: float,
    span_tokens: int = 1,
) -> Tensor:  # fmt: skip
    checks.choose_rows(q_THD, weights_TH, batch, checks.FLOATS)
    device, n_new = q_THD.device, np.diff(batch.cu_seqlens)
    behind_T = np.repeat(batch.cu_seqlens[1:], n_new) - np.arange(1, len(q_THD) + 1)
    ends_T = (np.repeat(batch.kv_lengths, n_new) - behind_T) // span_tokens
    n_best_T = np.minimum(ends_T, n_chosen)
    columns_T = np.cumsum(n_best_T) - n_best_T
    of_query = np.stack([np.repeat(batch.cu_pages[:-1], n_new), ends_T, n_best_T, columns_T])
    places_4T = upload(of_query.astype(np.int64), device)
    n_all = int(n_best_T.sum())
    # Rows that are not chosen are written into an additional last place.
    chosen_C = torch.empty(n_all + 1, dtype=torch.int64, device=device)
    most = int(ends_T.max(initial=0))
    n_at_once = max(1, _MOST_SCORES // max(1, most))
    for begin in range(0, len(q_THD) if n_all else 0, n_at_once):
        own = slice(begin, begin + n_at_once)
        scores_TN = _scores(q_THD[own], weights_TH[own], keys, batch, places_4T[:2, own], most, scale)
        order_TN = scores_TN.sort(dim=-1, descending=True, stable=True).indices
        n_TN = torch.arange(most, device=device).expand_as(order_TN)
        _, _, n_best, columns = places_4T[:, own, None]
        is_best_TN = torch.empty_like(order_TN).scatter_(-1, order_TN, n_TN) < n_best
        at_TN = torch.where(is_best_TN, columns + is_best_TN.cumsum(-1) - 1, n_all)
        chosen_C.scatter_(0, at_TN.flatten(), n_TN.flatten())
    return chosen_C[:n_all]


def _scores(
    q_THD: Tensor, weights_TH: Tensor, keys: Tensor, batch: PagedBatch, places_2T: Tensor, most: int, scale: float
) -> Tensor:
    """Compute the scores (T, N) float32 of keys. NaN gets the best score, keys after a query's last one get -inf."""
    n_queries, n_heads, head_dim = q_THD.shape
    q_THD = q_THD if q_THD.stride(-1) == 1 else q_THD.contiguous()
    scores_TN = torch.empty(n_queries, most, dtype=torch.float32, device=q_THD.device)
    launch(
        _score, (n_queries, triton.cdiv(most, _BLOCK_N)),
        q_THD, weights_TH.contiguous(), keys, as_tensor(batch.pages), places_2T[0], places_2T[1], scores_TN,
        q_THD.stride(0), q_THD.stride(1), scale, most, H=n_heads, PAGE=batch.page_tokens,
        BLOCK_M=max(16, next_power_of_2(n_heads)), BLOCK_N=_BLOCK_N, D=head_dim,
        ALIGN=aligned_elements(head_dim, keys.element_size()), **head_parts(head_dim), num_warps=_NUM_WARPS,
    )  # fmt: skip
    return scores_TN


@triton.jit(do_not_specialize=["most"])
def _score(
    q, weights, keys, pages, first_pages, ends, scores, q_query, q_head, scale, most, H: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, D0: tl.constexpr,
    D1: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Score a block of keys for one query: sum_h weights_h relu(scale q_h . key)."""
    query = tl.program_id(0).to(tl.int64)
    n, m = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M)
    inside = n < tl.load(ends + query)
    page = tl.load(pages + tl.load(first_pages + query) + n // PAGE, mask=inside, other=0)
    at = tl.multiple_of(page + n % PAGE * D, ALIGN)
    q0, q1 = load_rows(q, query * q_query + m * q_head, m < H, D, D0, D1)
    k0, k1 = load_rows(keys, at, inside, D, D0, D1)
    s = dot(q0, tl.trans(k0), tl.zeros([BLOCK_M, BLOCK_N], tl.float32))
    if D1 > 0:
        s = dot(q1, tl.trans(k1), s)
    s *= scale
    weight = tl.load(weights + query * H + m, mask=m < H, other=0.0)
    # This is a comparison, because a maximum may hide a NaN.
    found = tl.sum(tl.where(s < 0.0, 0.0, s) * weight[:, None], 0)
    found = tl.where(found == found, found, float("inf"))
    tl.store(scores + query * most + n, tl.where(inside, found, float("-inf")), mask=n < most)
