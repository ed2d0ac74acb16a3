"""Chooses the next tokens of generations from the logits of a step."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from chat.engine.requests import Job
from memory import StepError

Plan = list[tuple[Job, int]]
"""The jobs of a step, each with the number of tokens that it is fed."""
Choice = int | StepError | None
Choose = Callable[[Tensor, Plan], list[Choice]]


def choose_tokens(logits_SV: Tensor, plan: Plan) -> list[Choice]:
    """Choose the next token of each job that wants one, or the error that ends the job.
    Nothing changes, so a failed step can be tried again.
    """
    highest: list[float] = []
    best: list[int] = []
    if any(job.request.sampling.is_plain for job, _ in plan):
        highest_S, best_S = logits_SV.max(-1)
        highest, best = highest_S.tolist(), best_S.tolist()
    chosen: list[Choice] = []
    for i, (job, n_tokens) in enumerate(plan):
        if not job.wants_choice(n_tokens):
            chosen.append(None)
        elif job.request.sampling.is_plain and abs(highest[i]) < float("inf"):  # not so for NaN
            chosen.append(best[i])
        else:
            assert job.sampler is not None, "made when it was admitted"
            try:
                chosen.append(job.sampler.draw(logits_SV[i]))
            except StepError as error:  # no finite logits: only this job ends
                chosen.append(error)
    return chosen
