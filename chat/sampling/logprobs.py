"""Adds log probabilities to chosen tokens: the model's own, before penalties, bias, grammar and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

MOST_LOGPROBS = 20
"""Alternatives that can be asked for, as in OpenAI's interface."""


@dataclass(frozen=True)
class Chosen:
    """Holds a token that was chosen.

    Attributes:
        logprob: its log probability, if it was asked for.
        top: the likeliest tokens and theirs, as many as were asked for, the likeliest first.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def with_logprobs(logits_SV: Tensor, token_ids: Sequence[int], n_top: Sequence[int]) -> list[Chosen]:
    """Return the chosen token of each row with its log probability, and those of the row's likeliest tokens."""
    logprobs_SV = logits_SV.detach().float().log_softmax(-1)
    rows = range(len(token_ids))
    own = logprobs_SV[list(rows), list(token_ids)].tolist()
    values_SK, ids_SK = logprobs_SV.topk(min(max((1, *n_top)), logprobs_SV.shape[1]), dim=-1)
    pairs = [
        list(zip(ids, values, strict=True)) for ids, values in zip(ids_SK.tolist(), values_SK.tolist(), strict=True)
    ]
    return [Chosen(token_ids[i], own[i], tuple(pairs[i][: n_top[i]])) for i in rows]
