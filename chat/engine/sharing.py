"""Shares the tokens of a step among generations, and opens the step."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

from chat.engine.choose import Plan
from chat.engine.requests import LEAST_CHUNK_TOKENS, Job
from chat.engine.scheduling import Scheduler
from memory import BatchError, HybridMemory, SequenceError, Step


def plan_step(jobs: list[Job], step_tokens: int) -> Plan:
    """Return how many tokens each job is fed in a step; those that get none are left out.

    One for each that decodes. What is left goes in equal parts to the prompts: a short one is soon done, a long one
    goes on at every step. Where there are too many prompts for all to get a chunk, those that have waited for the
    longest do.

    Args:
        step_tokens: of the step, more than there are decodes.
    """
    plan = [(job, 1) for job in jobs if not job.is_prefilling]
    left = max(1, step_tokens - len(plan))
    queue = sorted((job for job in jobs if job.is_prefilling), key=lambda job: (job.served, *job.rank))
    needed = accumulate(min(_n_wanted(job), LEAST_CHUNK_TOKENS) for job in queue)
    prompts = queue[: max(1, sum(n_tokens <= left for n_tokens in needed))]
    for i, job in enumerate(sorted(prompts, key=_n_wanted)):  # short ones first: what they leave goes to the longer
        n_tokens = min(_n_wanted(job), left // (len(prompts) - i))
        left -= n_tokens
        plan.append((job, n_tokens))
    return plan


def _n_wanted(job: Job) -> int:
    return job.next_stop - job.n_fed


def open_step(memory: HybridMemory, scheduler: Scheduler, plan: Plan, drafts: Mapping[Job, list[int]]) -> Step | None:
    """Return the opened step, or None if a sequence of it was changed from outside.
    The generation of that sequence has ended with an error then.

    Args:
        drafts: tokens that are fed behind those of the plan, to be verified.
    """
    requests = [(job.live_sequence, [*job.tokens[job.n_fed : job.n_fed + n], *drafts.get(job, ())]) for job, n in plan]
    try:
        return memory.step(requests, outputs="all" if drafts else "last")
    except (BatchError, SequenceError):
        n_running = len(scheduler.running)
        for (job, _), request in zip(plan, requests, strict=True):
            try:
                memory.step([request])
            except (BatchError, SequenceError) as error:
                scheduler.end(job, "error", error)
        if len(scheduler.running) == n_running:
            raise
        return None
