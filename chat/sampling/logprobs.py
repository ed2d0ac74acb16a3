"""Adds log probabilities to chosen tokens.

They are the model's own, before penalties, bias, grammar and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

MOST_LOGPROBS = 20
"""A request may ask for this many alternatives, as in OpenAI's interface."""


@dataclass(frozen=True)
class Chosen:
    """Holds a chosen token.

    Attributes:
        logprob: the token's log probability, if it was asked for.
        top: the likeliest tokens with their log probabilities, as many as were asked for, the likeliest first.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def with_logprobs(logits_SV: Tensor, token_ids: Sequence[int], n_top: Sequence[int]) -> list[Chosen]:
    """Return the chosen token of each row, with its log probability and the row's `n_top` likeliest tokens."""
    logits_SV = logits_SV.detach().float()
    log_sums_S = _log_sum_exp(logits_SV)
    rows = range(len(token_ids))
    own = (logits_SV[list(rows), list(token_ids)].double() - log_sums_S).tolist()
    values_SK, ids_SK = logits_SV.topk(min(max((1, *n_top)), logits_SV.shape[1]), dim=-1)
    values_SK = values_SK.double() - log_sums_S[:, None]
    pairs = [
        list(zip(ids, values, strict=True)) for ids, values in zip(ids_SK.tolist(), values_SK.tolist(), strict=True)
    ]
    return [Chosen(token_ids[i], own[i], tuple(pairs[i][: n_top[i]])) for i in rows]


def _log_sum_exp(logits_SV: Tensor) -> Tensor:
    """Return (S,) the logarithm of each row's sum of exponentials, in float64."""
    highest_S1 = logits_SV.amax(-1, keepdim=True)
    sums_S = (logits_SV - highest_S1).exp_().sum(-1)
    return highest_S1[:, 0].double() + sums_S.double().log()
