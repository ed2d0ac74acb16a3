"""Shares the tokens of a step among generations, and opens the step."""

from __future__ import annotations

from collections.abc import Mapping

from hybridmem.chat.engine.choose import Plan
from hybridmem.chat.engine.requests import LEAST_CHUNK_TOKENS, Job
from hybridmem.chat.engine.scheduling import Scheduler
from hybridmem.memory import BatchError, HybridMemory, SequenceError, Step

_OF_WAITING = 2
"""A step takes this part of all tokens of short prompts that wait, so that a queue of them shrinks."""
_MOST_STEPS = 2
"""A step has so many times `step_tokens` of prompts at most: replies wait for it."""
_LEAST_PART = 4
"""A step has this part of `step_tokens` of prompts, where they wait, and a long one that is the oldest gets as much."""


def plan_step(jobs: list[Job], step_tokens: int) -> Plan:
    """Return how many tokens each job is fed in a step; those that get none are left out.

    One for each that decodes, and prompts beside them. Short prompts, which fit into `step_tokens`, are finished one
    after the other, the oldest first: to go on with all of them at once would bring all of their first tokens late.
    Where few wait, a step takes one, so that the next does not wait for it long; where many wait, it takes more. Long
    prompts come after short ones, but the oldest prompt goes on at every step.
    """
    plan = [(job, 1) for job in jobs if not job.is_prefilling]
    prompts = sorted((job for job in jobs if job.is_prefilling), key=lambda job: job.rank)
    if not prompts:
        return plan
    queue = sorted(prompts, key=lambda job: ((job.n_unfed - 1) // step_tokens).bit_length())
    shares = dict.fromkeys(prompts, 0)
    if queue[0] is not prompts[0]:  # it is a long one, and would wait for short ones without an end
        shares[prompts[0]] = min(_n_wanted(prompts[0]), max(1, step_tokens // _LEAST_PART))
    left = _prompt_tokens(queue, step_tokens)
    for job in queue:
        n_tokens = min(_n_wanted(job) - shares[job], left)
        if n_tokens < min(_n_wanted(job), LEAST_CHUNK_TOKENS) and any(shares.values()):
            continue
        shares[job] += n_tokens
        left -= n_tokens
    return plan + [(job, n_tokens) for job, n_tokens in shares.items() if n_tokens]


def _prompt_tokens(queue: list[Job], step_tokens: int) -> int:
    """Return the tokens of prompts in a step; see `plan_step`."""
    n_waiting = sum(job.n_unfed for job in queue if job.n_unfed <= step_tokens)
    least = min(step_tokens, max(queue[0].n_unfed, step_tokens // _LEAST_PART))
    return max(1, least, min(_MOST_STEPS * step_tokens, n_waiting // _OF_WAITING))


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
