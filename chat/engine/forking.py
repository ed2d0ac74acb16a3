"""Lets the choices of a request share their prompt: one choice computes it, and the others fork its sequence.

The fork happens in the step that completes the prompt. All choices draw their first token from the logits of that step,
so no token of the prompt is computed twice. A fork copies no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hybridmem.chat.engine.choose import Plan
from hybridmem.chat.engine.requests import Job


@dataclass(frozen=True)
class Fork:
    """Names a choice that begins in a step.

    Attributes:
        source: the choice whose prompt the step completes. `row` is the row of its logits.
    """

    job: Job
    source: Job
    row: int


def forks_of(plan: Plan) -> list[Fork]:
    """Return the choices whose prompt this step completes."""
    forks = list[Fork]()
    for row, (job, n_tokens) in enumerate(plan):
        if job.others and not job.has_prompt and job.n_fed + n_tokens == job.generation.n_prompt:
            for other in job.others:
                if other.is_new:
                    other.begin_reply(other.tokens)
                    forks.append(Fork(other, job, row))
    return forks


def with_forks(logits: Tensor, plan: Plan, forks: list[Fork]) -> tuple[Tensor, Plan]:
    """Return logits and plan with one more row for each fork.

    The row is a copy of the source's row, from which the fork draws its own token.
    """
    if not forks:
        return logits, plan
    rows = [*range(len(plan)), *(fork.row for fork in forks)]
    return logits[rows], plan + [(fork.job, len(fork.job.tokens)) for fork in forks]
