"""Computes attention and its gradients block by block, so that no tensor grows with the number of pairs of tokens.

The softmax is continued from block to block, and backward its weights are computed again from the sums that forward
kept (Dao et al. 2022, "FlashAttention", Alg. 1 and 4). Rows of earlier chunks are no inputs for autograd: backward adds
their gradients to those that later chunks have left, so that they exist once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridmem.memory.kernels.signature import Scoring

_ROWS = 1024
_SCORES = 1 << 21
"""How many rows a block has at most, and how many scores over all heads."""


class Rows(NamedTuple):
    """Holds keys and values (R, G, D) of consecutive tokens, and the sums of their gradients, or None for the latter.

    The gradients are added to in place.
    """

    k: Tensor
    v: Tensor
    dk: Tensor | None = None
    dv: Tensor | None = None

    def cut(self, begin: int, end: int) -> Rows:
        return Rows(*(None if x is None else x[begin:end] for x in self))  # type: ignore[arg-type]


def attend(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, past: Sequence[Rows], scoring: Scoring, chosen_TR: Tensor | None = None
) -> Tensor:
    """Return (T, H, V) in the dtype of q: each query sees the rows of the past, and its own rows up to itself.

    Args:
        past: the rows before the first query, oldest first. With a window, older ones may be left out.
        chosen_TR: True where a query sees a row, among those up to its own; None for all.
    """
    sinks_H = None if scoring.sinks_H is None else scoring.sinks_H.float()
    y_THV: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        q_THD.float(), k_TGD.float(), v_TGD.float(), sinks_H, scoring.bias_HL, scoring, past, chosen_TR
    )
    return y_THV.to(q_THD.dtype)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, sinks_H: Tensor | None, bias_HL: Tensor | None,
        scoring: Scoring, past: Sequence[Rows], chosen_TR: Tensor | None,
    ) -> Tensor:  # fmt: skip
        blocks = _Blocks(q_THD, k_TGD.shape[1], [*past, Rows(k_TGD, v_TGD)], scoring, chosen_TR)
        y_THV = q_THD.new_empty(*q_THD.shape[:2], v_TGD.shape[2])
        log_sum_HT1 = q_THD.new_empty(q_THD.shape[1], len(q_THD), 1)
        for own in blocks.queries():
            mixed = q_THD.new_zeros(q_THD.shape[1], own.stop - own.start, v_TGD.shape[2])
            highest = mixed.new_full((*mixed.shape[:2], 1), -torch.inf)
            if sinks_H is not None:
                highest = sinks_H[:, None, None].expand_as(highest)
            total = (highest > -torch.inf).to(q_THD.dtype)
            for begin, parts in blocks.rows_of(own):
                k_GRD, v_GRD = blocks.read(parts)
                scores, _ = blocks.scores(own, begin, k_GRD)
                higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
                shift = higher.masked_fill(higher == -torch.inf, 0.0)
                weights, fade = scores.sub_(shift).exp_(), (highest - shift).exp()
                total = total * fade + weights.sum(-1, keepdim=True)
                mixed = mixed * fade + blocks.over_groups(weights, v_GRD)
                highest = higher
            y_THV[own] = (mixed / total).transpose(0, 1)
            log_sum_HT1[:, own] = highest + total.log()
        ctx.of_past = scoring, past, chosen_TR
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, y_THV, log_sum_HT1, sinks_H, bias_HL)
        return y_THV

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy_THV,), (scoring, past, chosen_TR) = grads, ctx.of_past
        q_THD, k_TGD, v_TGD, y_THV, log_sum_HT1, sinks_H, bias_HL = ctx.saved_tensors
        new = Rows(k_TGD, v_TGD, torch.zeros_like(k_TGD), torch.zeros_like(v_TGD))
        blocks = _Blocks(q_THD, k_TGD.shape[1], [*past, new], scoring, chosen_TR)
        dq_THD, dbias_HL = torch.zeros_like(q_THD), None if bias_HL is None else torch.zeros_like(bias_HL)
        mean_HT1 = (dy_THV * y_THV).sum(-1).T[:, :, None]
        for own in blocks.queries():
            dy_HTV, q_HTD = dy_THV[own].transpose(0, 1), q_THD[own].transpose(0, 1)
            for begin, parts in blocks.rows_of(own):
                k_GRD, v_GRD = blocks.read(parts)
                scores, slopes = blocks.scores(own, begin, k_GRD)
                weights = scores.sub_(log_sum_HT1[:, own]).exp_()
                dv_RGD = blocks.of_groups(weights, dy_HTV).transpose(0, 1)
                dscores = blocks.over_groups(dy_HTV, v_GRD.transpose(1, 2)).sub_(mean_HT1[:, own]).mul_(weights)
                if dbias_HL is not None:
                    at = blocks.distances(own, begin, k_GRD.shape[1]).clamp(0, dbias_HL.shape[-1] - 1)
                    if dbias_HL.dim() == 2:
                        dbias_HL.index_add_(1, at.flatten(), dscores.flatten(1))
                    else:
                        at_THR = at[:, None].expand(-1, len(dscores), -1)
                        dbias_HL[own].scatter_add_(2, at_THR, dscores.transpose(0, 1))
                if slopes is not None:
                    dscores.mul_(slopes)
                dscores.mul_(scoring.scale)
                dq_THD[own] += blocks.over_groups(dscores, k_GRD).transpose(0, 1)
                _add(parts, blocks.of_groups(dscores, q_HTD).transpose(0, 1), dv_RGD)
        dsinks_H = None
        if sinks_H is not None:
            dsinks_H = -((sinks_H[:, None, None] - log_sum_HT1).exp() * mean_HT1).sum((1, 2))
        return dq_THD, new.dk, new.dv, dsinks_H, dbias_HL, None, None, None


def _add(parts: Sequence[Rows], dk_RGD: Tensor, dv_RGD: Tensor) -> None:
    """Add the gradients of a block's rows to those of its parts."""
    sizes = [len(part.k) for part in parts]
    for part, dk, dv in zip(parts, torch.split(dk_RGD, sizes), torch.split(dv_RGD, sizes), strict=True):
        if part.dk is not None and part.dv is not None:
            part.dk.add_(dk.to(part.dk.device))
            part.dv.add_(dv.to(part.dv.device))


class _Blocks:
    """Cuts queries and rows into blocks, and computes the scores of a block."""

    def __init__(
        self, q_THD: Tensor, n_groups: int, parts: Sequence[Rows], scoring: Scoring, chosen_TR: Tensor | None
    ) -> None:
        self.q, self.n_groups, self._parts, self.scoring, self._chosen = q_THD, n_groups, parts, scoring, chosen_TR
        self._n_rows = sum(len(part.k) for part in parts)
        self._n_before = self._n_rows - len(q_THD)

    def queries(self) -> Iterator[slice]:
        at_once = max(64, _SCORES // (self.q.shape[1] * min(_ROWS, self._n_rows)))
        for begin in range(0, len(self.q), at_once):
            yield slice(begin, min(begin + at_once, len(self.q)))

    def rows_of(self, own: slice) -> Iterator[tuple[int, list[Rows]]]:
        """Return the blocks of rows that some of these queries see: the number of the first row, and its parts."""
        window, end = self.scoring.window, self._n_before + own.stop
        oldest = 0 if window is None else max(0, self._n_before + own.start - window + 1)
        block, n_rows, first, at = list[Rows](), 0, oldest, 0
        for part in self._parts:
            begin, stop = max(oldest - at, 0), min(len(part.k), end - at)
            at += len(part.k)
            while begin < stop:
                cut = min(stop, begin + _ROWS - n_rows)
                block.append(part.cut(begin, cut))
                n_rows, begin = n_rows + cut - begin, cut
                if n_rows == _ROWS:
                    yield first, block
                    block, n_rows, first = [], 0, first + _ROWS
        if block:
            yield first, block

    def read(self, parts: Sequence[Rows]) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a block, (G, R, D) each, on the queries' device."""
        k_GRD, v_GRD = (
            torch.cat([part[i].to(self.q) for part in parts]).transpose(0, 1)  # type: ignore[union-attr]
            for i in range(2)
        )
        return k_GRD, v_GRD

    def distances(self, own: slice, begin: int, n_rows: int) -> Tensor:
        """Return how many rows each row lies before each query's own: (queries, rows)."""
        at_T = torch.arange(own.start, own.stop, device=self.q.device) + self._n_before
        distances: Tensor = at_T[:, None] - torch.arange(begin, begin + n_rows, device=self.q.device)
        return distances

    def scores(self, own: slice, begin: int, k_GRD: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return scores (H, queries, rows), and the factors by which a cap changes their gradients."""
        scoring, slopes, n_rows = self.scoring, None, k_GRD.shape[1]
        scores = self.over_groups(self.q[own].transpose(0, 1), k_GRD.transpose(1, 2)).mul_(scoring.scale)
        if scoring.softcap is not None:
            capped = scores.div_(scoring.softcap).tanh_()
            slopes = 1 - capped.square()
            scores = capped.mul_(scoring.softcap)
        if scoring.bias_HL is not None:
            bias = scoring.bias_HL.detach()
            bias = bias if bias.dim() == 2 else bias[own]
            at = self.distances(own, begin, n_rows).clamp(0, bias.shape[-1] - 1)
            if bias.dim() == 2:
                scores = scores + bias[:, at]
            else:
                scores = scores + bias.gather(2, at[:, None].expand(-1, len(scores), -1)).transpose(0, 1)
        window, n_before = scoring.window, self._n_before + own.start
        if n_before < begin + n_rows - 1 or (window is not None and self._n_before + own.stop - begin > window):
            distances = self.distances(own, begin, n_rows)
            is_hidden = distances < 0 if window is None else (distances < 0) | (distances >= window)
            scores = scores.masked_fill_(is_hidden, -torch.inf)
        if self._chosen is not None:
            scores = scores.masked_fill_(~self._chosen[own, begin : begin + n_rows], -torch.inf)
        return scores, slopes

    def over_groups(self, x_HTA: Tensor, y_GAB: Tensor) -> Tensor:
        """Return x @ y (H, T, B), where all heads of a group share one y."""
        n_heads, n_queries = x_HTA.shape[:2]
        return (x_HTA.reshape(len(y_GAB), -1, x_HTA.shape[2]) @ y_GAB).view(n_heads, n_queries, -1)

    def of_groups(self, x_HTA: Tensor, y_HTB: Tensor) -> Tensor:
        """Return x^T @ y summed over the heads of each group: (G, A, B)."""
        x_GXA, y_GXB = (x.reshape(self.n_groups, -1, x.shape[2]) for x in (x_HTA, y_HTB))
        return x_GXA.transpose(1, 2) @ y_GXB
