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
    """Return the chosen token of each row with its log probability, and with the row's likeliest tokens and theirs."""
    logprobs_SV = logits_SV.detach().float().log_softmax(-1)
    rows = range(len(token_ids))
    own = logprobs_SV[list(rows), list(token_ids)].tolist()
    values_SK, ids_SK = logprobs_SV.topk(min(max((1, *n_top)), logprobs_SV.shape[1]), dim=-1)
    pairs = [
        list(zip(ids, values, strict=True)) for ids, values in zip(ids_SK.tolist(), values_SK.tolist(), strict=True)
    ]
    return [Chosen(token_ids[i], own[i], tuple(pairs[i][: n_top[i]])) for i in rows]
