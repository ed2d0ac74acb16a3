"""Shares the tokens of a step among generations, and opens the step."""

from __future__ import annotations

from collections.abc import Mapping

from chat.engine.choose import Plan
from chat.engine.requests import LEAST_CHUNK_TOKENS, Job
from chat.engine.scheduling import Scheduler
from memory import BatchError, HybridMemory, SequenceError, Step

_TOKENS_A_REPLY = 4
"""Tokens of prompts in a step for each reply in it, where that is more than `step_tokens`: with fewer, prompts would
come to wait for each other while many replies go on, since each reply that ends brings a prompt in its place.
"""
_OLDEST_SHARE = 4
"""The prompt that has waited longest gets this part of a step's tokens at least."""


def plan_step(jobs: list[Job], step_tokens: int) -> Plan:
    """Return how many tokens each job is fed in a step; those that get none are left out.

    One for each that decodes, and beside them `step_tokens` for prompts, or more beside many replies. Prompts that fit
    into a step are finished one after the other, the oldest first: to go on with all of them at once would bring all
    of their first tokens late. Longer ones come after them, and the oldest prompt goes on at every step.

    Args:
        step_tokens: of prompts.
    """
    plan = [(job, 1) for job in jobs if not job.is_prefilling]
    left = max(step_tokens, _TOKENS_A_REPLY * len(plan))
    prompts = sorted((job for job in jobs if job.is_prefilling), key=lambda job: job.rank)
    shares = dict.fromkeys(prompts, 0)
    if prompts:
        shares[prompts[0]] = min(_n_wanted(prompts[0]), max(1, left // _OLDEST_SHARE))
        left -= shares[prompts[0]]
    for job in sorted(prompts, key=lambda job: ((job.n_unfed // step_tokens).bit_length(), job.rank)):
        n_tokens = min(_n_wanted(job) - shares[job], left)
        if n_tokens < min(_n_wanted(job), LEAST_CHUNK_TOKENS) and not shares[job]:
            continue
        shares[job] += n_tokens
        left -= n_tokens
    return plan + [(job, n_tokens) for job, n_tokens in shares.items() if n_tokens]


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
