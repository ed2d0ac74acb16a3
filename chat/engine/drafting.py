"""Decides which generations get drafts in a step, from where and of how many tokens, and learns whether drafts pay.

Drafts come from three sources: the prediction of a request, the text itself (prompt lookup), and a smaller model
(`chat.engine.draft_models`). None changes what a reply says.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import accumulate
from weakref import WeakKeyDictionary

from hybridmem.chat.engine.choose import Plan
from hybridmem.chat.engine.draft_models import Drafts, JobDrafter
from hybridmem.chat.engine.pace import LOST_SHARE, MARGIN, TRIED_SHARE, Ledger, Pace
from hybridmem.chat.engine.requests import Job
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.sampling.guesses import Guesses
from hybridmem.memory import HybridMemory, SpecError

MOST_DRAFTED = 8
"""A draft has at most this many tokens."""
_PROBED = 3
"""A draft that only tests whether drafts are right has this many tokens."""
_FIRST_REST, _LONGEST_REST = 16, 256
"""After drafts from texts did not pay, this many steps go without. The number doubles each time, so that trying again
costs little.
"""
_UNKNOWN_REST = 2
"""While the cost of drafts is unknown, this many steps lie between two steps with drafts."""
_LEAST_RATE, _FORGIVEN = 0.2, 1.02
"""A generation with a lower rate of right tokens gets no draft. Each time, its rate is raised by this factor."""
_COMPARED_EVERY, _COMPARED_AT_FIRST = 64, 16
"""After this many steps with drafts, one goes without, so that both costs stay known."""
_OF_PREDICTIONS, _OF_TEXTS, _OF_MODELS = 0.8, 0.5, 0.7
"""The expected share of right tokens before any draft was verified: in predictions, in the texts, and of a model."""
_TRIED_JOBS, _TRIED_STEPS = 2, 8
"""A trial of a drafter drafts for so many generations, in so many steps."""
_MODEL_REST = 15
"""After a step in which no draft paid, this many steps go without."""
_LENGTHS = (1, 2, 3, 4, 6, 8)
"""The drafter's drafts have one of these lengths, whichever promises the most tokens a second."""
_LEAST_REPLY = 32
"""A reply is expected to go on for as many tokens as it has, and at least for these."""


@dataclass(frozen=True)
class Speculation:
    """Says where an engine gets drafts from, in addition to predictions that come with requests.

    Attributes:
        looks_up: take drafts from the texts themselves (prompt lookup).
        adapts: draft only where measurements say that it pays. Replies are the same either way.
        drafter: drafts with a model, such as `ModelDrafter(small_model, its_memory)`. None: no model drafts.
    """

    looks_up: bool = False
    adapts: bool = True
    drafter: JobDrafter | None = None


@dataclass
class Drafted:
    """Holds how good the drafts of one generation were.

    Attributes:
        rate: the share of recently drafted tokens that were right. Tokens after the first wrong one do not count.
        n_next: the next draft has at most this many tokens.
    """

    rate: float
    n_next: int = MOST_DRAFTED

    def expected(self, n_tokens: int) -> float:
        """Return how many of `n_tokens` drafted tokens are expected to be right."""
        return sum(accumulate([self.rate] * n_tokens, lambda a, b: a * b))

    def note(self, n_drafted: int, n_right: int) -> None:
        n_seen = n_right + (n_right < n_drafted)
        share = 0.7**n_seen
        self.rate = share * self.rate + (1 - share) * n_right / n_seen
        self.n_next = min(MOST_DRAFTED, 2 * n_right + 1)


@dataclass
class _Own:
    """Holds what is known of the drafts of one generation: those of its text, and those of the model."""

    guesses: Guesses
    text: Drafted
    model: Drafted


@dataclass(frozen=True)
class _Turn:
    """Describes a step that is about to be made.

    Attributes:
        jobs: the jobs that decode.
        room: the most tokens of a draft for which the step has room.
        is_mixed: whether the step computes prompts as well.
    """

    jobs: list[Job]
    room: int
    is_mixed: bool

    @property
    def n(self) -> int:
        return len(self.jobs)


@dataclass
class _Proposal:
    """Holds the drafts of one step.

    Attributes:
        modelled: the jobs whose drafts are the drafter's.
        seconds: how long the drafter took.
    """

    drafts: Drafts = field(default_factory=dict)
    modelled: frozenset[Job] = frozenset()
    seconds: float = 0.0


_IDLE = _Proposal()
"""The proposal of a step in which nothing is looked for, measured or counted, because that would take time as well."""


class Drafting:
    """Proposes drafts for the steps of an engine, and measures whether they pay.

    There are no drafts without a rollback window, because wrong tokens could not be taken back.
    """

    def __init__(
        self, memory: HybridMemory, step_tokens: int, speculation: Speculation, tokenizer: Tokenizer | None = None
    ) -> None:
        self._most = min(MOST_DRAFTED, memory.rollback_window)
        self._step_tokens = step_tokens
        self._looks_up, self._adapts = speculation.looks_up, speculation.adapts
        self._drafter = speculation.drafter
        if self._drafter is not None:
            if not self._most:
                raise SpecError("a drafter needs a memory with a rollback window, such as rollback_window=32")
            self._drafter.check(memory, tokenizer)
        self._pace = Pace()
        self._rest, self._next_rest, self._n_drafted_steps = 0, _FIRST_REST, 0
        self._own = WeakKeyDictionary[Job, _Own]()
        self._rates = {"text": _OF_TEXTS, "model": _OF_MODELS}  # The shares of right tokens over all texts so far.
        self._ledger, self._n_tried, self._idle = Ledger(), 0, 0
        self._last = _Proposal()
        self._right: dict[Job, int] = {}

    def propose(self, plan: Plan) -> Drafts:
        """Return drafts for a step, where they are expected to pay. Often there are none."""
        if self._idle > 0:
            self._idle, self._last = self._idle - 1, _IDLE
            return {}
        self._last = self._propose(plan)
        return self._last.drafts

    def _propose(self, plan: Plan) -> _Proposal:
        if not self._most:
            return _Proposal()
        if self._drafter is None:
            if self._rest > 0:
                self._rest -= 1
                return _Proposal()
            if not (self._looks_up or any(job.request.prediction for job, _ in plan)):
                return _Proposal()
        jobs = [job for job, _ in plan if not job.is_prefilling]
        if not jobs or (self._adapts and self._is_compared()):
            return _Proposal()
        turn = _Turn(jobs, self._step_tokens // len(plan) - 1, is_mixed=len(jobs) < len(plan))
        looked_up = self._look_up(turn)
        if self._drafter is None:
            return _Proposal(looked_up)
        proposal = self._add_model(turn, looked_up, self._drafter)
        if not proposal.seconds and not looked_up and self._adapts and self._pace.plain.is_well_known:
            self._idle = _MODEL_REST
            if self._looks_up or any(job.request.prediction for job in jobs):
                self._idle = min(self._idle, self._rest)
                self._rest -= self._idle
        return proposal

    def _is_compared(self) -> bool:
        """Return True for one step in 64, which runs without drafts, so that the cost of such steps stays known.

        There are more such steps at first, because a few slow ones would make drafts look good.
        """
        self._n_drafted_steps += 1
        every = _COMPARED_EVERY if self._n_drafted_steps >= 3 * _COMPARED_EVERY else _COMPARED_AT_FIRST
        return self._n_drafted_steps % every == 0

    # Drafts of the texts

    def _look_up(self, turn: _Turn) -> Drafts:
        if self._rest > 0:
            self._rest -= 1
            return {}
        found = {job: guess for job in turn.jobs if (guess := self._guess(job, turn.room))}
        if not self._adapts:
            return found
        if not found:  # Looking for drafts costs time as well, so pause it if drafts have not paid.
            self._rest = max(turn.n // 8, (self._next_rest - _FIRST_REST) // 16)
            return {}
        good = {job: guess for job, guess in found.items() if self._is_often_right(self._of(job).text)}
        pays = self._pays(turn, good) if good else False
        if pays:
            self._next_rest = _FIRST_REST
            return good
        if pays is None:
            self._rest = _UNKNOWN_REST
        else:
            self._rest, self._next_rest = self._next_rest, min(_LONGEST_REST, 2 * self._next_rest)
        return {job: guess[:_PROBED] for job, guess in found.items()}

    def _guess(self, job: Job, room: int) -> list[int]:
        own = self._of(job)
        n_tokens = min(self._possible(job, room), own.text.n_next)
        if n_tokens <= 0 or job.sampler is None:
            return []
        guess = own.guesses.next(n_tokens)
        return guess[: job.sampler.possible(guess)]

    def _possible(self, job: Job, room: int) -> int:
        """Return the most tokens of a draft that the job could use."""
        if job.ending is not None or not job.wants_choice(1):
            return 0
        return max(0, min(self._most, room, job.request.max_tokens - len(job.generation.token_ids) - 1))

    def _of(self, job: Job) -> _Own:
        own = self._own.get(job)
        if own is None:
            prediction = job.request.prediction
            guesses = Guesses(job.tokens, job.generation.n_prompt, prediction, looks_up=self._looks_up)
            text = Drafted(_OF_PREDICTIONS if prediction else self._rates["text"])
            own = self._own[job] = _Own(guesses, text, Drafted(self._rates["model"]))
        return own

    @staticmethod
    def _is_often_right(drafted: Drafted) -> bool:
        if drafted.rate >= _LEAST_RATE:
            return True
        drafted.rate *= _FORGIVEN
        return False

    def _pays(self, turn: _Turn, drafts: Drafts) -> bool | None:
        return self._pace.pays(turn.n, *self._sums(drafts), is_mixed=turn.is_mixed)

    def _sums(self, drafts: Drafts) -> tuple[int, float]:
        """Return how many tokens drafts of texts have, and how many of these are expected to be right."""
        n_drafted = sum(map(len, drafts.values()))
        return n_drafted, sum(self._of(job).text.expected(len(guess)) for job, guess in drafts.items())

    # Drafts of a model

    def _add_model(self, turn: _Turn, looked_up: Drafts, drafter: JobDrafter) -> _Proposal:
        """Return the drafts of a step: those of the texts, and the drafter's for other jobs, if these pay."""
        most = {
            job: n
            for job in turn.jobs
            if job not in looked_up
            and (n := min(self._possible(job, turn.room), drafter.most_drafted))
            and drafter.n_behind(job) is not None
        }
        wanted = self._choose_model(turn, looked_up, most, drafter) if self._adapts else most
        if not wanted:
            return _Proposal(looked_up)
        started = time.perf_counter()
        drafts = drafter.draft(wanted)
        seconds = time.perf_counter() - started
        for n_rows, of_step in drafter.noted:
            self._pace.model.note(n_rows, of_step)
        return _Proposal(looked_up | drafts, frozenset(drafts), seconds)

    def _choose_model(
        self, turn: _Turn, looked_up: Drafts, most: dict[Job, int], drafter: JobDrafter
    ) -> dict[Job, int]:
        """Return how many tokens the drafter drafts for which jobs.

        If that is not expected to pay, it may be tried, as long as little of the time so far was lost.
        """
        if not most or not self._ledger.allows(LOST_SHARE):
            return {}
        good = [job for job in most if self._is_often_right(self._of(job).model)]
        n_tokens, pays = self._best(turn, looked_up, good, drafter)
        if pays:
            self._n_tried = 0
            return {job: min(n_tokens, most[job]) for job in pays}
        is_cheap = self._n_tried > 0 or self._ledger.allows(TRIED_SHARE)
        if turn.is_mixed or not self._pace.plain.is_well_known or not is_cheap:
            return {}
        self._n_tried = (self._n_tried + 1) % _TRIED_STEPS
        tried = sorted(most, key=lambda job: (drafter.n_behind(job) or 0, -self._of(job).model.rate))[:_TRIED_JOBS]
        return {job: min(_PROBED, most[job]) for job in tried}

    def _best(self, turn: _Turn, looked_up: Drafts, jobs: list[Job], drafter: JobDrafter) -> tuple[int, list[Job]]:
        """Return the best number of tokens for the drafter, and the jobs for which it pays. There may be none."""
        pace, n, n_jobs = self._pace, turn.n, len(jobs)
        if not jobs or not pace.knows(is_mixed=turn.is_mixed) or not pace.model.is_known:
            return 0, []
        n_found, n_right = self._sums(looked_up)
        rate = Drafted(sum(self._of(job).model.rate for job in jobs) / n_jobs)

        def speed(k: int) -> float:
            seconds = pace.seconds(n, n_found + k * n_jobs, is_mixed=turn.is_mixed)
            return (n + n_right + n_jobs * rate.expected(k)) / (seconds + (k * pace.model.of(n_jobs) if k else 0.0))

        best = max((k for k in _LENGTHS if k <= self._most), key=speed)
        least = max(n / pace.plain.of(n), speed(0))
        if speed(best) < MARGIN * least:
            return 0, []
        saved = 1 / least - 1 / speed(best)  # Seconds for each token.
        return best, [job for job in jobs if self._is_worth_feeding(job, drafter, saved)]

    def _is_worth_feeding(self, job: Job, drafter: JobDrafter, saved: float) -> bool:
        """Return whether a job's reply is expected to go on for long enough to pay for feeding its text."""
        n_behind = drafter.n_behind(job) or 0
        if n_behind <= self._most + 1:
            return True
        n_said = len(job.generation.token_ids)
        n_left = min(job.request.max_tokens - n_said, max(_LEAST_REPLY, n_said))
        return n_left * saved >= self._pace.model.of(n_behind)

    # What became of the drafts

    def note(self, plan: Plan, drafts: Drafts, seconds: float) -> float:
        """Record how many seconds a step took, with the time in which its drafts were made.

        Returns how many seconds its drafts have saved. The number is negative if they lost time, and 0 if that is not
        known.
        """
        last, self._last = self._last, _Proposal()
        if last is _IDLE:
            self._ledger.seconds += seconds
            return 0.0
        right, self._right = self._right, {}
        n, n_fed, n_drafted = len(plan), sum(n_tokens for _, n_tokens in plan), sum(map(len, drafts.values()))
        pace, is_mixed = self._pace, n_fed > n
        cost = pace.mixed if is_mixed else pace.drafted if drafts else pace.plain
        cost.note(n_fed + n_drafted, seconds - last.seconds)
        saved = 0.0
        if (drafts or last.seconds) and pace.plain.is_known:
            n_decoding = sum(n_tokens == 1 for _, n_tokens in plan)
            plain = pace.plain.of(n_decoding)
            verified = n_drafted * cost.slope if is_mixed and cost.is_known else seconds - last.seconds - plain
            lost = last.seconds + min(verified, 2 * plain)  # The machine may have done something else in a slow step.
            saved = sum(right.values()) * plain / n_decoding - lost
            for job, n_right in right.items():
                job.generation.saved_seconds += n_right * plain / n_decoding - lost / len(right)
        if self._drafter is not None:
            self._ledger.note(seconds, -saved if last.seconds else 0.0)
        return saved

    def count(self, job: Job, n_drafted: int, n_right: int) -> None:
        """Count how many of a job's drafted tokens were right."""
        job.generation.n_drafts += 1
        job.generation.n_drafted += n_drafted
        job.generation.n_accepted += n_right
        self._right[job] = n_right
        own, is_of_model = self._of(job), job in self._last.modelled
        drafted = own.model if is_of_model else own.text
        drafted.note(n_drafted, n_right)
        if is_of_model or not job.request.prediction:
            source = "model" if is_of_model else "text"
            kept = 0.9 if is_of_model else 0.95
            self._rates[source] = kept * self._rates[source] + (1 - kept) * drafted.rate

    def forget(self, job: Job) -> None:
        """Free what a drafter keeps for a job that has ended."""
        if self._drafter is not None:
            self._drafter.forget(job)
