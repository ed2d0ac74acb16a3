"""Decides which generations of a step get drafts, verifies them, and stops drafting where it does not pay.

Drafts are a mode of the engine's one loop: a draft is fed behind the last token in the same step, the model's choice
after each of its tokens is compared with it, and `step.accept` keeps what agrees.
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
"""Tokens of a draft."""
_PROBED = 3
"""Tokens of a draft that only finds out whether drafts are right."""
_FIRST_REST, _LONGEST_REST = 16, 256
"""Steps without drafts after drafts did not pay: doubled each time, so that trying again costs little."""
_UNKNOWN_REST = 2
"""Steps between two with drafts while nobody knows what they cost."""
_LEAST_RATE, _FORGIVEN = 0.2, 1.02
"""Generations with a lower rate get no drafts; each time, their rate is forgiven a little."""
_COMPARED_EVERY = 64
"""Steps with drafts after which one goes without, so that the comparison stays fresh."""
_OF_PREDICTIONS, _OF_TEXTS = 0.8, 0.5
"""The share of right tokens that is expected of drafts that nobody has seen yet."""

Drafts = dict[Job, list[int]]


@dataclass(frozen=True)
class Speculation:
    """Says where an engine takes drafts from, beside the predictions that requests bring.

    Attributes:
        looks_up: from the texts themselves (prompt lookup).
        adapts: draft only where it pays, as measured. Replies are the same either way.
    """

    looks_up: bool = False
    adapts: bool = True


@dataclass
class Drafted:
    """Holds what the drafts of one generation came to.

    Attributes:
        rate: the share of drafted tokens that were right, as far as the first wrong one; lately.
        n_next: the most tokens of its next draft.
    """

    guesses: Guesses
    rate: float
    n_next: int = MOST_DRAFTED

    def expected(self, n_tokens: int) -> float:
        """Return how many of so many drafted tokens are expected to be right."""
        return sum(accumulate([self.rate] * n_tokens, lambda a, b: a * b))

    def note(self, n_drafted: int, n_right: int) -> None:
        n_seen = n_right + (n_right < n_drafted)
        share = 0.7**n_seen
        self.rate = share * self.rate + (1 - share) * n_right / n_seen
        self.n_next = min(MOST_DRAFTED, 2 * n_right + 1)


class Drafting:
    """Proposes drafts for the steps of an engine, and learns from them whether they pay.

    Without a rollback window there are none: what is wrong could not be taken back.
    """

    def __init__(self, memory: HybridMemory, step_tokens: int, speculation: Speculation) -> None:
        self._most = min(MOST_DRAFTED, memory.rollback_window)
        self._step_tokens = step_tokens
        self._looks_up, self._adapts = speculation.looks_up, speculation.adapts
        self._pace = Pace()
        self._rest, self._next_rest, self._n_drafted_steps = 0, _FIRST_REST, 0
        self._drafted = WeakKeyDictionary[Job, Drafted]()
        self._rate = _OF_TEXTS  # of the texts that were drafted for so far

    def propose(self, plan: Plan) -> Drafts:
        """Return drafts for a step that only decodes, where they are expected to pay; often there are none."""
        if not self._most:
            return {}
        if self._rest > 0:
            self._rest -= 1
            return {}
        if not (self._looks_up or any(job.request.prediction for job, _ in plan)):
            return {}
        if any(job.is_prefilling for job, _ in plan):
            return {}  # with prompts beside them: the logits of all their tokens would be computed
        if self._adapts and self._is_compared():
            return {}
        room = self._step_tokens // len(plan) - 1
        found = {job: guess for job, _ in plan if (guess := self._guess(job, room))}
        if not self._adapts:
            return found
        if not found:  # looking costs too, and is less urgent after drafts have not paid
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
        """True for one step in 64 that goes without drafts on purpose, so that the cost of such steps stays known."""
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
        """Note what a step took that only decoded."""
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
