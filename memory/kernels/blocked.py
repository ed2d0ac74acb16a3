"""Computes attention in plain torch, block by block, so that its temporary tensors have the same size for any length.

The softmax is continued from block to block (Milakov & Gimelshein 2018). The blocks depend only on the request, so its
result does not depend on other requests of the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hybridmem.memory.kernels.signature import Scoring

Rows = Callable[[int, int], tuple[Tensor, Tensor]]
"""A function that reads rows [begin, end) of a request, and returns their keys and values, (end - begin, G, D) each."""

_ROWS = 512
_SCORES = 1 << 18
"""How many scores, over all heads, are in memory at once."""


def blocks(
    n_queries: int, n_rows: int, window: int | None, queries_at_once: int, rows_at_once: int
) -> Iterator[tuple[slice, int, list[tuple[int, int]]]]:
    """Divide queries, which belong to the last of `n_rows` rows, and the rows that they see into blocks.

    For each block of queries, it generates the block, the number of rows before its first query, and the blocks of rows
    [begin, end) that it sees, oldest first. Few rows are a single block. Of more rows, the queries' own rows are the
    last block. Each query sees at least one row of each block if `rows_at_once` is at least `queries_at_once`. Only a
    narrow window could prevent that; then all rows are one block, which has less than twice as many rows as queries.
    """
    for begin in range(0, n_queries, queries_at_once):
        own = slice(begin, min(begin + queries_at_once, n_queries))
        first, last = n_rows - n_queries + own.start, n_rows - n_queries + own.stop
        oldest = 0 if window is None else max(0, first - window + 1)
        is_narrow = window is not None and last > window and first - oldest < last - first
        is_one = is_narrow or last - oldest <= rows_at_once
        bounds = [oldest, last] if is_one else [*range(oldest, first, rows_at_once), first, last]
        yield own, first, list(itertools.pairwise(bounds))


def attend(q_THD: Tensor, n_rows: int, n_kv_heads: int, read: Rows, scoring: Scoring) -> Tensor:
    """Attend from the last T of `n_rows` rows, in float32: (T, H, D) in the dtype of q."""
    n_heads, head_dim = q_THD.shape[1:]
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    for own, first, rows in blocks(
        len(q_THD), n_rows, scoring.window, max(64, min(_ROWS, _SCORES // (n_heads * _ROWS))), _ROWS
    ):
        q_GXD = q_THD[own].float().transpose(0, 1).reshape(n_kv_heads, -1, head_dim)
        mixed_HTD = q_GXD.new_zeros(n_heads, own.stop - own.start, head_dim)
        highest_HT1, total_HT1 = _start(scoring.sinks_H, mixed_HTD)
        for begin, end in rows:
            k_GRD, v_GRD = (x.transpose(0, 1).float() for x in read(begin, end))
            scores_HTR = (q_GXD @ k_GRD.transpose(1, 2)).view(n_heads, -1, end - begin)
            scores_HTR = scored(scores_HTR, scoring.of(own), first - begin)
            higher_HT1 = torch.maximum(highest_HT1, scores_HTR.amax(-1, keepdim=True))
            # The highest score is -inf as long as no row has a weight.
            shift_HT1 = higher_HT1.masked_fill(higher_HT1 == -torch.inf, 0.0)
            weights_HTR, fade_HT1 = scores_HTR.sub_(shift_HT1).exp_(), (highest_HT1 - shift_HT1).exp()
            total_HT1 = total_HT1 * fade_HT1 + weights_HTR.sum(-1, keepdim=True)
            found_GXD = weights_HTR.view(n_kv_heads, -1, end - begin) @ v_GRD
            mixed_HTD.mul_(fade_HT1).add_(found_GXD.view(mixed_HTD.shape))
            highest_HT1 = higher_HT1
        out_THD[own] = (mixed_HTD / total_HT1).transpose(0, 1)
    return out_THD


def _start(sinks_H: Tensor | None, mixed_HTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return the highest score and the sum of weights with which a softmax starts: those of sinks, if there are any."""
    highest_HT1 = mixed_HTD.new_full((*mixed_HTD.shape[:2], 1), -torch.inf)
    if sinks_H is not None:
        highest_HT1 = highest_HT1.maximum(torch.as_tensor(sinks_H).float()[:, None, None])
    return highest_HT1, (highest_HT1 > -torch.inf).float()


def scored(products_HTR: Tensor, scoring: Scoring, n_before: int) -> Tensor:
    """Compute scores from the products q . k. Rows [0, n_before] are those before the first query, and its own row.
    The function may overwrite the products.
    """
    scores_HTR = products_HTR.mul_(scoring.scale)
    if scoring.softcap is not None:
        scores_HTR = scores_HTR.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    n_queries, n_rows = scores_HTR.shape[1:]
    if scoring.bias_HL is not None:
        bias_HL = torch.as_tensor(scoring.bias_HL)
        distances_TR = torch.arange(n_before, n_before + n_queries)[:, None] - torch.arange(n_rows)
        columns_TR = distances_TR.clamp(0, bias_HL.shape[-1] - 1).to(bias_HL.device)
        if bias_HL.dim() == 2:
            scores_HTR = scores_HTR + bias_HL[:, columns_TR]
        else:
            columns_THR = columns_TR[:, None].expand(-1, len(scores_HTR), -1)
            scores_HTR = scores_HTR + bias_HL.gather(2, columns_THR).transpose(0, 1)
    if not sees_all(n_queries, n_rows, scoring.window, n_before):
        scores_HTR += causal_mask(n_queries, n_rows, scoring.window, scores_HTR.device, n_before)
    return scores_HTR


def sees_all(n_queries: int, n_rows: int, window: int | None, n_before: int) -> bool:
    """True if every query sees every one of these rows."""
    return n_before >= n_rows - 1 and (window is None or n_before + n_queries <= window)


def causal_mask(
    n_queries: int, n_rows: int, window: int | None, device: torch.device, n_before: int | None = None
) -> Tensor:
    """Return a mask (n_queries, n_rows) of 0 and -inf: query i sees rows up to n_before + i.

    With a window, a query sees only the last `window` of these rows. Without `n_before`, the mask is aligned at the
    bottom right: the last query sees every row.
    """
    newest_Q1 = torch.arange(n_queries, device=device)[:, None] + (n_rows - n_queries if n_before is None else n_before)
    row_R = torch.arange(n_rows, device=device)
    is_seen = (row_R <= newest_Q1) if window is None else (row_R <= newest_Q1) & (row_R > newest_Q1 - window)
    return torch.zeros(n_queries, n_rows, device=device).masked_fill_(~is_seen, -torch.inf)
