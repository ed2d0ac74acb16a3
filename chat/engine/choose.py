"""Chooses the next tokens of generations from the logits of a step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hybridmem.chat.engine.requests import Job
from hybridmem.chat.sampling.logprobs import Chosen, with_logprobs
from hybridmem.chat.sampling.sampler import Sampler, choose_rows
from hybridmem.memory import StepError

Plan = list[tuple[Job, int]]
"""The jobs of a step, each with the number of tokens that it is fed."""
Choice = Chosen | StepError | None
Choose = Callable[[Tensor, Plan], list[Choice]]


def choose_tokens(logits: Tensor, plan: Plan) -> list[Choice]:
    """Choose the next token of each job that wants one, or the error that ends the job.

    Rows that need more than an argmax are processed together. No job is changed, so a failed step can be tried again.

    Args:
        logits: (S, V), one row for each job of the plan.
    """
    wanting = [i for i, (job, n_tokens) in enumerate(plan) if job.wants_choice(n_tokens)]
    chosen: list[Choice] = [None] * len(plan)
    token_ids = _choose_plain(logits, [i for i in wanting if _sampler(plan[i][0]).is_plain])
    # Rows without finite logits are missing here. Only their jobs end with an error.
    others = [i for i in wanting if i not in token_ids]
    if others:
        rows_SV = logits if len(others) == len(logits) else logits[others]
        found = choose_rows(rows_SV, [_sampler(plan[i][0]) for i in others])
        for i, token_id in zip(others, found, strict=True):
            if isinstance(token_id, StepError):
                chosen[i] = token_id
            else:
                token_ids[i] = token_id
    for i, token_id in token_ids.items():
        chosen[i] = Chosen(token_id)
    asking = [(i, n) for i in token_ids if (n := plan[i][0].request.output.logprobs) is not None]
    if asking:
        rows, n_top = zip(*asking, strict=True)
        scored = with_logprobs(logits[list(rows)], [token_ids[i] for i in rows], n_top)
        for i, choice in zip(rows, scored, strict=True):
            chosen[i] = choice
    return chosen


def _choose_plain(logits_SV: Tensor, rows: list[int]) -> dict[int, int]:
    """Return the likeliest token of each of these rows. Rows without a finite logit are left out."""
    if not rows:
        return {}
    highest_S, best_S = logits_SV.max(-1)
    highest, best = highest_S.tolist(), best_S.tolist()
    return {i: best[i] for i in rows if abs(highest[i]) < float("inf")}  # The comparison is also false for NaN.


def _sampler(job: Job) -> Sampler:
    assert job.sampler is not None, "made when it was admitted"
    return job.sampler
