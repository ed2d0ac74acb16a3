"""Makes the steps of an engine.

A step feeds the running generations, records what was fed, and applies what was chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridmem.chat.engine.callbacks import Callbacks
from hybridmem.chat.engine.choose import Choice, Choose, Plan
from hybridmem.chat.engine.draft_models import Drafts
from hybridmem.chat.engine.drafting import Drafting
from hybridmem.chat.engine.forking import Fork, forks_of, with_forks
from hybridmem.chat.engine.loop import take_step
from hybridmem.chat.engine.requests import Job
from hybridmem.chat.engine.scheduling import Scheduler
from hybridmem.chat.engine.scoring import Scored, plan_scores, scores_of
from hybridmem.chat.engine.stats import EngineStats
from hybridmem.chat.engine.step_plan import open_step
from hybridmem.chat.engine.token_trees import n_levels, right_nodes
from hybridmem.chat.engine.verifying import accepted_of, choose_verified
from hybridmem.chat.sampling.logprobs import Chosen
from hybridmem.chat.sampling.masks import MasksAhead
from hybridmem.memory import CapacityError, HybridMemory, SequenceError, Step, StepError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.sequences import uninterrupted
from hybridmem.models import LanguageModel


@dataclass
class Stepper:
    """Feeds the jobs of a scheduler, one step at a time.

    Attributes:
        step_tokens: the most tokens in one step.
        stop_ids: tokens that end a reply.
        masks: computes the masks of grammars while the model runs.
        to_remember: jobs whose sequences the prefix cache is to keep as they are now. The engine empties this list.
    """

    model: LanguageModel
    memory: HybridMemory
    prefixes: PrefixCache | None
    scheduler: Scheduler
    callbacks: Callbacks
    stats: EngineStats
    choose: Choose
    clock: Callable[[], float]
    step_tokens: int
    stop_ids: tuple[int, ...]
    drafting: Drafting
    to_remember: list[Job] = field(default_factory=list)
    masks: MasksAhead = field(default_factory=MasksAhead)

    def feed(self) -> None:
        """Make one step of the model, with as many of the running generations as the memory has room for."""
        scheduler, limit, may_draft = self.scheduler, self.step_tokens, True
        while scheduler.running:
            started = time.perf_counter()
            plan = plan_scores(scheduler.running, limit, self.memory.spec.vocab_size)
            drafts = self.drafting.propose(plan) if may_draft else {}
            step = open_step(self.memory, scheduler, plan, drafts)
            if step is None:
                continue
            try:
                self._run(step, plan, drafts, started)
                return
            except CapacityError as error:
                if drafts:
                    may_draft = False
                elif len(scheduler.running) > 1:
                    scheduler.preempt()
                elif plan[0][1] > 1:  # With fewer tokens in a step, attention windows and budgets need less room.
                    limit = plan[0][1] // 2
                elif not scheduler.restart():
                    scheduler.end(plan[0][0], "error", error)

    def _run(self, step: Step, plan: Plan, drafts: Drafts, started: float) -> None:
        forks, scores = forks_of(plan), dict[Job, list[Scored]]()

        def keep(chosen: list[list[Choice]]) -> None:  # After this call, the jobs' counts are equal to the memory's.
            self.stats.n_steps += 1
            now = self.clock()
            for job, scored in scores.items():
                job.generation.prompt_logprobs += scored
            for (job, n_tokens), choices in zip(plan, chosen, strict=False):
                self._record(job, len(choices) if job in drafts else n_tokens)
                if job in drafts:
                    self._count(job, drafts[job], choices)
                self._apply_all(job, choices, now)
            for fork, choices in zip(forks, chosen[len(plan) :], strict=True):
                self._fork(fork, choices, now)
            seconds, n_tokens = time.perf_counter() - started, sum(n for _, n in plan)
            self.stats.seconds += seconds
            self.stats.saved_seconds += self.drafting.note(plan, drafts, seconds)
            if self.prefixes is not None and n_tokens > 2 * len(plan):  # Prompts are most of this step.
                self.prefixes.note_speed(seconds / n_tokens)

        def choose(logits: Tensor, step: Step) -> list[list[Choice]]:
            waited = time.perf_counter()
            wait_for_masks()
            self.stats.mask_seconds += time.perf_counter() - waited
            if step.outputs == "last":
                return [[choice] for choice in self.choose(*with_forks(logits, plan, forks))]
            rows = step.split(logits)
            scores.update(scores_of(rows, plan))
            firsts = torch.stack(
                [rows_SV[0 if job in drafts else -1] for rows_SV, (job, _) in zip(rows, plan, strict=True)]
            )
            chosen = choose_verified(self.choose, *with_forks(firsts, plan, forks), rows, drafts, self.stop_ids)
            kept = ((job, choices) for (job, _), choices in zip(plan, chosen, strict=False))
            step.accept({job.live_sequence: accepted_of(drafts[job], own) for job, own in kept if job in drafts})
            return chosen

        wanting = (job.sampler for job, n_tokens in plan if job.wants_choice(n_tokens) and job.sampler is not None)
        matchers = [sampler.matcher for sampler in wanting if sampler.matcher is not None]
        with self.masks.of(matchers) as wait_for_masks:
            take_step(self.model, step, choose, keep, uninterrupted())

    def _fork(self, fork: Fork, choices: list[Choice], now: float) -> None:
        """Let another choice continue from the prompt that its source has just computed, and choose its first token."""
        try:
            sequence = self.memory.fork(fork.source.live_sequence)
        except SequenceError:  # Somebody closed the sequence. The choice computes its prompt itself.
            return
        self.scheduler.join(fork.job, sequence, fork.source, now)
        self._apply_all(fork.job, choices, now)

    def _count(self, job: Job, draft: list[int], choices: list[Choice]) -> None:
        """Count the tokens of a draft, and the right ones. Rejected tokens also count as fed."""
        self.stats.n_fed += 1 + len(draft) - len(choices)
        token_ids = [choice.token_id for choice in choices if isinstance(choice, Chosen)]
        right = right_nodes(draft, token_ids)
        self.stats.count_draft(len(draft), len(right), n_levels(draft))
        self.drafting.count(job, draft, right)

    def _record(self, job: Job, n_tokens: int) -> None:
        """Count `n_tokens` more of the job's tokens as fed."""
        if job.lookup is not None:
            self.stats.count_lookup(job.lookup)
            job.lookup = None
        was_prefilling = job.is_prefilling
        job.n_fed += n_tokens
        job.served = self.stats.n_steps
        self.stats.n_fed += n_tokens
        if was_prefilling:
            job.generation.n_prefilled = min(job.n_fed, job.generation.n_prompt)
            if job.request.reports_prefill and job.generation.first_token_at is None:
                self.callbacks.add(job, "")
            if job.n_fed == job.generation.n_prompt or job.n_fed in job.cuts:
                self.to_remember.append(job)

    def _apply_all(self, job: Job, choices: list[Choice], now: float) -> None:
        try:
            for choice in choices:
                self._apply(job, choice, now)
                if job.calls is not None and job.calls.is_broken:
                    self._take_back(job)
                    return  # What follows was drafted after the call.
        except Exception as error:  # The tokenizer may raise anything. The other generations go on.
            self.scheduler.end(job, "error", error)

    def _take_back(self, job: Job) -> None:
        """Return to the position before a call that breaks its schema. The call is drawn again, by its grammar.

        The memory rolls back as far as it can reach; tokens that it had to drop as well are fed again.
        """
        n_discarded = job.generation.n_discarded
        job.take_back()
        self.stats.n_taken_back += 1
        self.stats.n_discarded += job.generation.n_discarded - n_discarded
        reached = self.memory.resume_point(job.live_sequence, job.n_base + job.n_fed)
        self.memory.rollback(job.live_sequence, to=reached)
        job.n_fed = reached - job.n_base

    def _apply(self, job: Job, choice: Choice, now: float) -> None:
        """Add the chosen token to the job, or end the job."""
        if isinstance(choice, StepError):
            self.scheduler.end(job, "error", choice)
            return
        if choice is not None:
            self.stats.n_generated += 1
            piece = job.take(choice, self.stop_ids, now)
            if job.calls is not None and job.calls.is_broken:
                return
            if job.calls is None or not job.calls.holds_back:
                self.callbacks.add(job, piece)
        elif job.ending is None and job.n_fed == len(job.tokens):
            job.ending = "length"  # With max_tokens=0 there was nothing to choose.
        if job.ending is not None and job.n_fed == len(job.tokens):
            self.to_remember.append(job)
            self.scheduler.end(job, job.ending)
