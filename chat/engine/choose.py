"""From the logits of a step to the tokens that follow."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from chat.engine.requests import Job
from memory import StepError

Plan = list[tuple[Job, int]]
"""Who takes part in a step, each with the number of tokens that are fed."""
Choice = int | StepError | None
Choose = Callable[[Tensor, Plan], list[Choice]]


def choose_tokens(logits_SV: Tensor, plan: Plan) -> list[Choice]:
    """The next token of each job that wants one; what ends it where there is none.
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
            except StepError as error:  # no finite logits: it alone ends
                chosen.append(error)
    return chosen
