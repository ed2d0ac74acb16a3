"""Finds drafts in predictions and in the texts themselves (prompt lookup), and learns how often they are right.

A guess that is not fed to the model is compared with what the reply says all the same. So a rate is learned at no cost,
and drafts from ordinary text, which are mostly wrong, are never verified.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from hybridmem.chat.engine.requests import Job
from hybridmem.chat.sampling.guesses import MOST_SAME, Guess, Guesses

_RIGHT_AT_FIRST = {False: (0.3, 0.5, 0.7, 0.85), True: (0.5, 0.8, 0.8, 0.9)}
"""Is predicted -> the expected share of right tokens before any was compared: after a change, and after few, more and
many tokens that agree.
"""
_LONGER, _LONGEST = 6, MOST_SAME
"""Guesses before which fewer tokens agree than these are right less often, and have rates of their own."""
_OF_ALL = 0.98
"""With each compared token, the share of right tokens over all texts keeps this part of its value."""
_KEPT = 0.93
"""With each token, what was known of a rate before keeps this part of its weight. Long drafts need a rate near 1,
and copies go on for many tokens.
"""
_COMPARED = 4
"""A guess that was not fed is compared up to this many tokens."""
_SURE = 0.995
"""From this rate on, a draft has as many tokens as it may have."""
_LEAST_CHANCES = (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Drafts end where a token is right with less than one of these probabilities, whichever promises the most tokens a
second.
"""
_LENGTHS = (1, 2, 3, 5, 7, 11, 15, 23, 31)
"""Drafts have one of these lengths, because steps are replayed only if equal ones occur again (`memory.recorded`)."""


@dataclass
class Rate:
    """Holds the share of recently drafted tokens that were right. Tokens after the first wrong one do not count.

    Attributes:
        kept: with each token, what was known before keeps this part of its weight.
    """

    value: float
    kept: float = 0.7

    def expected(self, n_tokens: int) -> float:
        """Return how many of `n_tokens` drafted tokens are expected to be right."""
        r = self.value
        return float(n_tokens) if r == 1 else r * (1 - r**n_tokens) / (1 - r)

    @property
    def is_hopeful(self) -> bool:
        """True if drafts of some length may pay."""
        return self.value >= _LEAST_CHANCES[-1]

    def n_likely(self, chance: float) -> float:
        """Return how many drafted tokens are right with at least this probability."""
        return math.inf if self.value >= _SURE else math.log(chance) // math.log(max(self.value, 0.01))

    def note(self, n_drafted: int, n_right: int) -> None:
        n_seen = n_right + (n_right < n_drafted)
        share = self.kept**n_seen
        self.value = share * self.value + (1 - share) * n_right / n_seen


@dataclass
class _Followed:
    """Holds the guesses of one job.

    Attributes:
        rates: kind of guess -> how often such guesses were right for this job.
        unfed: the latest guess that was not fed, and how many tokens the job had then.
        kind: the kind of the guess that is being verified.
    """

    guesses: Guesses
    rates: dict[tuple[bool, int], Rate]
    unfed: tuple[Guess, int] | None = None
    kind: tuple[bool, int] = (False, 0)


class TextDrafts:
    """Finds drafts in texts.

    Args:
        looks_up: find them in the texts themselves, and not only in predictions.
    """

    def __init__(self, *, looks_up: bool) -> None:
        self.looks_up = looks_up
        self._followed = WeakKeyDictionary[Job, _Followed]()
        self._of_all = dict[tuple[bool, int], float]()

    def find(self, jobs: Iterable[Job], most: Callable[[Job], int]) -> dict[Job, Guess]:
        """Return a guess for each job that has one. It counts as unfed until `feed` is called.

        Args:
            most: returns the most tokens of a job's guess. It is asked only where there may be one.
        Cost: where the newest tokens of a text are new to it, an entry in an index for each token.
        """
        found = dict[Job, Guess]()
        for job in jobs:
            followed = self._of(job)
            if followed.unfed is not None:
                self._compare(job, followed, followed.unfed)
            if followed.guesses.grow() and (n := most(job)) > 0 and (guess := _possible(followed.guesses.next(n), job)):
                found[job] = guess
                if followed.unfed is None:
                    followed.unfed = guess, len(job.tokens)
        return found

    def others(self, job: Job, guess: Guess, n_tokens: int, most: int) -> list[list[int]]:
        """Return up to `most` other ways in which the text may go on, of up to `n_tokens` tokens each.

        Each begins with another token than the guess.
        """
        assert job.sampler is not None, "made when it was admitted"
        several = self._of(job).guesses.several(n_tokens, most + 1)
        ways = [other.token_ids for other in several if other.token_ids[0] != guess.token_ids[0]]
        return [way[:n] for way in ways[:most] if (n := job.sampler.possible(way))]

    def feed(self, job: Job, guess: Guess) -> None:
        """Note that tokens of this guess will be verified."""
        followed = self._of(job)
        followed.unfed, followed.kind = None, _kind(guess)

    def rate(self, job: Job, guess: Guess) -> Rate:
        """Return how often such guesses are right for this job."""
        return self._rate(self._of(job), _kind(guess))

    def expected(self, job: Job, n_tokens: int) -> float:
        """Return how many tokens of the draft that is being verified are expected to be right."""
        followed = self._of(job)
        return self._rate(followed, followed.kind).expected(n_tokens)

    def note(self, job: Job, n_drafted: int, n_right: int) -> None:
        """Learn from a draft that was verified."""
        followed = self._of(job)
        self._learn(followed, followed.kind, n_drafted, n_right)

    def _compare(self, job: Job, followed: _Followed, unfed: tuple[Guess, int]) -> None:
        """Learn from the guess that was not fed, if the reply has left it, or has followed it for long enough."""
        guess, n_then = unfed
        expected = guess.token_ids[:_COMPARED]
        said = job.tokens[n_then : n_then + len(expected)]
        n_right = next((i for i, (a, b) in enumerate(zip(expected, said, strict=False)) if a != b), len(said))
        if n_right < len(said) or len(said) == len(expected):
            kind, followed.unfed = _kind(guess), None
            self._learn(followed, kind, len(expected), n_right)
            if not guess.n_same and not n_right and not self._rate(followed, kind).is_hopeful:
                followed.guesses.leave_copy()
        elif len(job.tokens) < n_then:  # A call of a tool was taken back.
            followed.unfed = None

    def _learn(self, followed: _Followed, kind: tuple[bool, int], n_drafted: int, n_right: int) -> None:
        rate = self._rate(followed, kind)
        rate.note(n_drafted, n_right)
        of_all = self._of_all.get(kind, _RIGHT_AT_FIRST[kind[0]][kind[1]])
        share = _OF_ALL ** (n_right + (n_right < n_drafted))
        self._of_all[kind] = share * of_all + (1 - share) * rate.value

    def _rate(self, followed: _Followed, kind: tuple[bool, int]) -> Rate:
        rate = followed.rates.get(kind)
        if rate is None:
            rate = followed.rates[kind] = Rate(self._of_all.get(kind, _RIGHT_AT_FIRST[kind[0]][kind[1]]), _KEPT)
        return rate

    def _of(self, job: Job) -> _Followed:
        return self._followed.get(job) or self._follow(job)

    def _follow(self, job: Job) -> _Followed:
        guesses = Guesses(job.tokens, job.generation.n_prompt, job.request.prediction, looks_up=self.looks_up)
        followed = self._followed[job] = _Followed(guesses, {})
        return followed


def _possible(guess: Guess, job: Job) -> Guess | None:
    """Return a guess as far as the job's grammar allows it, or None if there is nothing left of it."""
    assert job.sampler is not None, "made when it was admitted"
    n_tokens = len(guess.token_ids)
    n_possible = job.sampler.possible(guess.token_ids) if n_tokens else 0
    if n_possible == n_tokens:
        return guess if n_tokens else None
    return Guess(guess.token_ids[:n_possible], guess.n_same, guess.is_predicted) if n_possible else None


def _kind(guess: Guess) -> tuple[bool, int]:
    """Return the facts that decide how often guesses are right: their source, and how many tokens before them agree."""
    n = guess.n_same
    return guess.is_predicted, (n > 0) + (n >= _LONGER) + (n >= _LONGEST)


def lengths_of(rates: Mapping[Job, Rate], most: Mapping[Job, int]) -> list[dict[Job, int]]:
    """Return several choices of how many tokens to draft for each job: the ones that are right often enough.

    The first choice has the most tokens. Jobs whose first token is too likely to be wrong are left out. Lengths are
    rounded down to one of a few.
    """
    found, hopeful = list[dict[Job, int]](), [(job, rate) for job, rate in rates.items() if rate.is_hopeful]
    for chance in reversed(_LEAST_CHANCES):
        lengths = {job: n for job, rate in hopeful if (n := _rounded(min(most[job], rate.n_likely(chance))))}
        if not lengths:
            break
        if not found or lengths != found[-1]:
            found.append(lengths)
    return found


def _rounded(n_tokens: float) -> int:
    """Return the largest length of a draft up to this number, or 0."""
    at = bisect_right(_LENGTHS, n_tokens)
    return _LENGTHS[at - 1] if at else 0
