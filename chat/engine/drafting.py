"""Decides which generations of a step get drafts, verifies them, and stops drafting where it does not pay.

Drafts are a mode of the engine's one loop. A step feeds a draft after the last token. The model's choice after each
token is compared with the draft, and `step.accept` keeps what agrees.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from weakref import WeakKeyDictionary

from hybridmem.chat.engine.choose import Plan
from hybridmem.chat.engine.pace import Pace
from hybridmem.chat.engine.requests import Job
from hybridmem.chat.sampling.guesses import Guesses
from hybridmem.memory import HybridMemory

MOST_DRAFTED = 8
"""A draft has at most this many tokens."""
_PROBED = 3
"""A draft that only tests whether drafts are right has this many tokens."""
_FIRST_REST, _LONGEST_REST = 16, 256
"""After drafts did not pay, this many steps go without. The number doubles each time, so that trying again costs
little.
"""
_UNKNOWN_REST = 2
"""While the cost of drafts is unknown, this many steps lie between two steps with drafts."""
_LEAST_RATE, _FORGIVEN = 0.2, 1.02
"""A generation with a lower rate of right tokens gets no draft. Each time, its rate is raised by this factor."""
_COMPARED_EVERY = 64
"""After this many steps with drafts, one goes without, so that both costs stay known."""
_OF_PREDICTIONS, _OF_TEXTS = 0.8, 0.5
"""The expected share of right tokens before any draft was verified: in predictions, and in the texts themselves."""

Drafts = dict[Job, list[int]]


@dataclass(frozen=True)
class Speculation:
    """Says where an engine gets drafts from, in addition to predictions that come with requests.

    Attributes:
        looks_up: take drafts from the texts themselves (prompt lookup).
        adapts: draft only where measurements say that it pays. Replies are the same either way.
    """

    looks_up: bool = False
    adapts: bool = True


@dataclass
class Drafted:
    """Holds how good the drafts of one generation were.

    Attributes:
        rate: the share of recently drafted tokens that were right. Tokens after the first wrong one do not count.
        n_next: the next draft has at most this many tokens.
    """

    guesses: Guesses
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


class Drafting:
    """Proposes drafts for the steps of an engine, and measures whether they pay.

    There are no drafts without a rollback window, because wrong tokens could not be taken back.
    """

    def __init__(self, memory: HybridMemory, step_tokens: int, speculation: Speculation) -> None:
        self._most = min(MOST_DRAFTED, memory.rollback_window)
        self._step_tokens = step_tokens
        self._looks_up, self._adapts = speculation.looks_up, speculation.adapts
        self._pace = Pace()
        self._rest, self._next_rest, self._n_drafted_steps = 0, _FIRST_REST, 0
        self._drafted = WeakKeyDictionary[Job, Drafted]()
        self._rate = _OF_TEXTS  # This is the share of right tokens over all texts so far.

    def propose(self, plan: Plan) -> Drafts:
        """Return drafts for a step that only decodes, where they are expected to pay. Often there are none."""
        if not self._most:
            return {}
        if self._rest > 0:
            self._rest -= 1
            return {}
        if not (self._looks_up or any(job.request.prediction for job, _ in plan)):
            return {}
        if any(job.is_prefilling for job, _ in plan):
            return {}  # A step with prompts has no drafts: it would compute the logits of all tokens of the prompts.
        if self._adapts and self._is_compared():
            return {}
        room = self._step_tokens // len(plan) - 1
        found = {job: guess for job, _ in plan if (guess := self._guess(job, room))}
        if not self._adapts:
            return found
        if not found:  # Looking for drafts costs time as well, so pause it if drafts have not paid.
            self._rest = max(len(plan) // 8, (self._next_rest - _FIRST_REST) // 16)
            return {}
        good = {job: guess for job, guess in found.items() if self._is_often_right(job)}
        pays = self._pays(len(plan), good) if good else False
        if pays:
            self._next_rest = _FIRST_REST
            return good
        if pays is None:
            self._rest = _UNKNOWN_REST
        else:
            self._rest, self._next_rest = self._next_rest, min(_LONGEST_REST, 2 * self._next_rest)
        return {job: guess[:_PROBED] for job, guess in found.items()}

    def _is_compared(self) -> bool:
        """Return True for one step in 64, which runs without drafts, so that the cost of such steps stays known."""
        self._n_drafted_steps += 1
        return self._n_drafted_steps % _COMPARED_EVERY == 0

    def _guess(self, job: Job, room: int) -> list[int]:
        n_left = job.request.max_tokens - len(job.generation.token_ids) - 1
        if job.ending is not None or not job.wants_choice(1):
            return []
        drafted = self._of(job)
        n_tokens = min(self._most, room, n_left, drafted.n_next)
        if n_tokens <= 0 or job.sampler is None:
            return []
        guess = drafted.guesses.next(n_tokens)
        return guess[: job.sampler.possible(guess)]

    def _of(self, job: Job) -> Drafted:
        drafted = self._drafted.get(job)
        if drafted is None:
            prediction = job.request.prediction
            guesses = Guesses(job.tokens, job.generation.n_prompt, prediction, looks_up=self._looks_up)
            drafted = self._drafted[job] = Drafted(guesses, _OF_PREDICTIONS if prediction else self._rate)
        return drafted

    def _is_often_right(self, job: Job) -> bool:
        drafted = self._of(job)
        if drafted.rate >= _LEAST_RATE:
            return True
        drafted.rate *= _FORGIVEN
        return False

    def _pays(self, n_sequences: int, drafts: Drafts) -> bool | None:
        n_drafted = sum(map(len, drafts.values()))
        n_expected = sum(self._of(job).expected(len(guess)) for job, guess in drafts.items())
        return self._pace.pays(n_sequences, n_sequences + n_drafted, n_sequences + n_expected)

    def note(self, plan: Plan, drafts: Drafts, seconds: float) -> None:
        """Record how many seconds a step without prompts took."""
        if drafts:
            self._pace.drafted.note(len(plan) + sum(map(len, drafts.values())), seconds)
        elif not any(job.is_prefilling for job, _ in plan):
            self._pace.plain.note(len(plan), seconds)

    def count(self, job: Job, n_drafted: int, n_right: int) -> None:
        """Count how many of a job's drafted tokens were right."""
        job.generation.n_drafted += n_drafted
        job.generation.n_accepted += n_right
        self._of(job).note(n_drafted, n_right)
        if not job.request.prediction:
            self._rate = 0.95 * self._rate + 0.05 * self._of(job).rate
