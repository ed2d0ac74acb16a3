"""Divides the tokens of a step among generations, and opens the step."""

from __future__ import annotations

from collections.abc import Mapping

from hybridmem.chat.engine.choose import Plan
from hybridmem.chat.engine.requests import LEAST_CHUNK_TOKENS, Job
from hybridmem.chat.engine.scheduling import Scheduler
from hybridmem.chat.engine.token_trees import TokenTree
from hybridmem.memory import BatchError, HybridMemory, Sequence, SequenceError, Step
from hybridmem.memory.step import Rows

_OF_WAITING = 2
"""A step takes 1 / this of all waiting tokens of short prompts, so that their queue shrinks."""
_MOST_STEPS = 2
"""A step has at most this many times `step_tokens` tokens of prompts, because replies wait for it."""
_LEAST_PART = 4
"""If prompts wait, a step has at least one part in so many of `step_tokens` for them. The oldest prompt gets as much if
it is long.
"""


def plan_step(jobs: list[Job], step_tokens: int) -> Plan:
    """Return how many tokens a step feeds to each job. Jobs that get none are left out.

    Each job that decodes gets one token. All other tokens of the step are from prompts. A short prompt fits into
    `step_tokens`. Short prompts are finished one after the other, the oldest first; if all of them advanced at once,
    all of their first tokens would come late. If few wait, a step takes one of them; if many wait, it takes more. Long
    prompts come after short ones, but the oldest prompt advances at every step.
    """
    plan = [(job, 1) for job in jobs if not job.is_prefilling]
    prompts = sorted((job for job in jobs if job.is_prefilling), key=lambda job: job.rank)
    if not prompts:
        return plan
    queue = sorted(prompts, key=lambda job: ((job.n_unfed - 1) // step_tokens).bit_length())
    shares = dict.fromkeys(prompts, 0)
    # The oldest prompt is long. Without this part, it could wait for short ones forever.
    if queue[0] is not prompts[0]:
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
    """Return how many tokens of prompts a step has; see `plan_step`."""
    n_waiting = sum(job.n_unfed for job in queue if job.n_unfed <= step_tokens)
    least = min(step_tokens, max(queue[0].n_unfed, step_tokens // _LEAST_PART))
    return max(1, least, min(_MOST_STEPS * step_tokens, n_waiting // _OF_WAITING))


def _n_wanted(job: Job) -> int:
    return job.next_stop - job.n_fed


def open_step(memory: HybridMemory, scheduler: Scheduler, plan: Plan, drafts: Mapping[Job, list[int]]) -> Step | None:
    """Return the opened step, or None if somebody else changed one of its sequences.

    The generation of that sequence has ended with an error then.

    Args:
        drafts: tokens to feed after those of the plan, as chains or trees. The step computes the logits of all of them,
            to verify them, and of all tokens of prompts that are scored.
    """
    requests = [(job.live_sequence, [*job.tokens[job.n_fed : job.n_fed + n], *drafts.get(job, ())]) for job, n in plan]
    try:
        return memory.step(requests, outputs=_outputs(plan, drafts), parents=_parents(drafts))
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


def _parents(drafts: Mapping[Job, list[int]]) -> dict[Sequence, list[int]] | None:
    """Return the parents of the tokens of a step in which some drafts are trees.

    The newest token of a text is the root.

    None if all drafts are chains. Such steps may be replayed.
    """
    trees = {job: draft for job, draft in drafts.items() if isinstance(draft, TokenTree)}
    return {job.live_sequence: [-1, *(parent + 1 for parent in tree.parents)] for job, tree in trees.items()} or None


def _outputs(plan: Plan, drafts: Mapping[Job, list[int]]) -> Rows:
    """Return of which tokens a step computes the logits."""
    if not drafts and not any(job.is_scored for job, _ in plan):
        return "last"
    counts = tuple(n if job.is_scored else 1 + len(drafts.get(job, ())) for job, n in plan)
    if all(n == n_rows or (n == 1 and job in drafts) for (job, n), n_rows in zip(plan, counts, strict=True)):
        return "all"
    return counts
