"""Scores the tokens of prompts: their log probabilities, from the logits of the steps that compute the prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hybridmem.chat.engine.choose import Plan
from hybridmem.chat.engine.requests import Job
from hybridmem.chat.engine.step_plan import plan_step
from hybridmem.chat.sampling.logprobs import Chosen, with_logprobs

_MOST_LOGITS = 1 << 25
"""A step that scores computes at most this many logits, 128 MiB in float32. Other steps compute one row a request."""
_LEAST_TOKENS = 16
"""A step that scores has at least this many tokens, however large the vocabulary is."""


@dataclass(frozen=True)
class Scored(Chosen):
    """Holds a token of a prompt, with its log probability given the tokens before it.

    Attributes:
        rank: the token's rank by probability among all tokens. The likeliest has rank 1.
    """

    rank: int = 0


def plan_scores(jobs: list[Job], step_tokens: int, n_vocab: int) -> Plan:
    """Return the plan of a step, as `plan_step` does.

    A step that scores computes the logits of all of its tokens. So no step mixes prompts that are scored with others.
    The oldest prompt decides of which kind this step is.
    """
    prompts = [job for job in jobs if job.is_prefilling]
    scored = [job for job in prompts if job.is_scored]
    if not scored:
        return plan_step(jobs, step_tokens)
    if not min(prompts, key=lambda job: job.rank).is_scored:
        return plan_step([job for job in jobs if job not in scored], step_tokens)
    most = min(step_tokens, max(_LEAST_TOKENS, _MOST_LOGITS // n_vocab))
    return plan_step([job for job in jobs if job in scored or not job.is_prefilling], most)


def scores_of(rows: Sequence[Tensor], plan: Plan) -> dict[Job, list[Scored]]:
    """Return the scores that a step gives for each job's tokens.

    Args:
        rows: the logits of each job's tokens in this step.
    """
    found = dict[Job, list[Scored]]()
    for (job, n_tokens), rows_SV in zip(plan, rows, strict=True):
        if job.is_scored:
            first = max(job.n_fed, job.next_scored - 1)
            token_ids = job.tokens[first + 1 : min(job.n_fed + n_tokens + 1, job.generation.n_prompt)]
            at = first - job.n_fed
            found[job] = _score(rows_SV[at : at + len(token_ids)], token_ids, job.request.output.prompt_logprobs or 0)
    return found


def _score(rows_SV: Tensor, token_ids: list[int], n_top: int) -> list[Scored]:
    if not token_ids:
        return []
    own_S = rows_SV[range(len(token_ids)), token_ids]
    ranks = (1 + (rows_SV > own_S[:, None]).sum(-1)).tolist()
    chosen = with_logprobs(rows_SV, token_ids, [n_top] * len(token_ids))
    return [Scored(c.token_id, c.logprob, c.top, rank) for c, rank in zip(chosen, ranks, strict=True)]
