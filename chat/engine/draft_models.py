"""Drafts the next tokens of an engine's replies with a smaller model, which has a memory of its own.

A draft model chooses each token with the sampler of the reply, and so with the same random number, penalties and
grammar as the model itself. Where both models agree on the probabilities, the draft is what the model will choose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from hybridmem.chat.engine.arguments import check_belonging, check_parts
from hybridmem.chat.engine.loop import take_step
from hybridmem.chat.engine.remembered_texts import RememberedTexts
from hybridmem.chat.engine.requests import Job
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.sampling.sampler import Sampler, choose_rows
from hybridmem.defaults import STEP_TOKENS
from hybridmem.memory import CapacityError, HybridMemory, Sequence, SpecError, Step, StepError
from hybridmem.memory.blocks import read_count
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.sequences import uninterrupted
from hybridmem.models import LanguageModel

Drafts = dict[Job, list[int]]
_PROBES = ("The year 1984, don't  you?\n\tif x >= 10:\n", "Größe naïve Ærø 東京 привет 🙂", "HTTPServer_v2.0/αβγ")
"""Tokenizers with the same tokens may still cut texts in other ways, so these texts are compared as well."""


class JobDrafter(Protocol):
    """Makes drafts for jobs of an engine.

    Attributes:
        most_drafted: the most tokens that a draft may have.
        drafts_at_once: whether one step of the drafter drafts all tokens of a draft. If not, each token takes one.
        noted: the rows and seconds of each step that the drafter made in the last call of `draft`.
        texts: what it remembers of texts beyond their jobs. None: nothing.
        following_seconds: how long it has followed texts so far, in calls other than `draft`.
    """

    most_drafted: int
    drafts_at_once: bool
    noted: list[tuple[int, float]]
    following_seconds: float
    texts: RememberedTexts | None

    def check(self, memory: HybridMemory, tokenizer: Tokenizer | None) -> None:
        """Raise SpecError if the drafts could not be used by the model of this memory, with this tokenizer."""
        ...

    def watch(self, model: LanguageModel, running: Callable[[], Iterable[Job]]) -> LanguageModel:
        """Return the model that the engine is to run. It gives the same logits, and may tell the drafter more.

        Args:
            running: returns the jobs that may be in the step.
        """
        ...

    def pause(self) -> None:
        """Follow no texts until `resume` is called, because drafts do not pay. There are no drafts until then."""
        ...

    def resume(self) -> None:
        """Follow texts again, from the next request on."""
        ...

    def n_behind(self, job: Job) -> int | None:
        """Return how many tokens must be fed before the job gets a draft. None: it gets none."""
        ...

    def draft(self, wanted: Mapping[Job, int]) -> Drafts:
        """Return drafts of at most this many tokens for these jobs. Jobs without a draft are left out.

        Each job has one token that was not fed to the model yet.
        """
        ...

    def resumes_at(self, sequence: Sequence, n_tokens: int, owner: Hashable) -> int:
        """Return from which position on the model should be fed a text of which it holds `n_tokens` tokens.

        It is a position that a rollback reaches: `n_tokens`, or one less if the drafter needs to see the last token.
        """
        ...

    def remember(self, job: Job) -> None:
        """Keep what is remembered of a job's text, because the model's prefix cache keeps a checkpoint of it now."""
        ...

    def forget(self, job: Job) -> None:
        """Free what is kept for a job that has ended."""
        ...


@dataclass
class Follower:
    """Holds a sequence in the draft model's memory that follows the text of a job.

    Attributes:
        base: the tokens that the job's own sequence held before the request.
        n_settled: how many leading tokens were fed from the text. The tokens after them were guesses.
        shift: the sequence's first token is the text's token with this index.
        n_taken_back: how many calls of the reply had been taken back when the sequence was last fed.
    """

    sequence: Sequence
    base: list[int]
    n_settled: int = 0
    shift: int = 0
    n_taken_back: int = 0

    @property
    def n_known(self) -> int:
        """Return how many leading tokens of its sequence are of the text."""
        return min(self.n_settled, self.sequence.length)


@dataclass
class Guess:
    """Holds a draft that grows. `sampler` is None if each token is the likeliest.

    Attributes:
        rows: what a draft head is fed beside `next_ids`, (n, M). None: hidden states of the model.
    """

    most_tokens: int
    sampler: Sampler | None
    rows: Tensor | None = None
    token_ids: list[int] = field(default_factory=list)
    next_ids: list[int] = field(default_factory=list)
    is_ended: bool = False

    def grow(self, token_id: int | StepError, end_ids: Container[int]) -> None:
        """Add a token, unless no token can be chosen. After one of `end_ids`, the draft has ended."""
        if isinstance(token_id, StepError):
            self.is_ended = True
            return
        self.token_ids.append(token_id)
        self.is_ended = token_id in end_ids
        if self.sampler is not None and not self.is_ended:
            self.sampler.add(token_id)
            self.is_ended = self.sampler.is_stopped


class ModelDrafter:
    """Drafts with a smaller model that has the same tokenizer.

    For each job that drafts, its memory has a sequence that follows the job's text. The sequence is rolled back with
    the job's own, forked where choices of one request share their prompt, swapped out while the job is preempted, and
    closed when the job ends. Where this memory has no room, jobs go without drafts.

    Args:
        memory: a memory made from `model.memory_spec`, for this drafter alone. Its rollback window limits drafts.
        tokenizer: the draft model's. The engine compares it with its own. None: the ids are known to be the same.
        prefixes: a cache of prefixes in that memory, so that prompts that begin alike are fed once.
        step_tokens: the most tokens of texts that are fed before one draft. Longer texts take several drafts' time.
    Raises:
        SpecError: parts that do not belong together, or a memory that cannot roll back a draft.
    """

    drafts_at_once = False
    _first_token = 0  # This is the index of the text's token that is the first in its sequences.
    _keeps_guesses = True  # A right guess is remembered as if it had been fed from the text.

    def __init__(
        self, model: LanguageModel, memory: HybridMemory, tokenizer: Tokenizer | None = None, *,
        prefixes: PrefixCache | None = None, step_tokens: int = STEP_TOKENS,
    ) -> None:  # fmt: skip
        check_parts(model, memory, "ModelDrafter(model, memory)")
        check_belonging(model, memory, prefixes)
        read_count("step_tokens", step_tokens, 1)
        if memory.rollback_window < 1:
            raise SpecError(
                "the draft model's memory has rollback_window=0, and cannot take wrong tokens back; give it the window "
                "of the model's memory"
            )
        if memory.spec.of_kind("cross-attention"):
            raise SpecError(f"{memory.spec.model} needs an encoder's output, and cannot draft; choose a decoder")
        self.model, self.memory, self.prefixes = model, memory, prefixes
        self.most_drafted = memory.rollback_window
        self.noted: list[tuple[int, float]] = []
        self.following_seconds = 0.0
        self._tokenizer, self._step_tokens = tokenizer, step_tokens
        self.texts = None if prefixes is None else RememberedTexts(prefixes, self._first_token)
        self._vocab_size = memory.spec.vocab_size
        self._target_size = memory.spec.vocab_size
        self._followers: dict[Job, Follower] = {}
        self._left_out = set[Job]()

    def check(self, memory: HybridMemory, tokenizer: Tokenizer | None) -> None:
        if tokenizer is not None and self._tokenizer is not None:
            check_same_tokens(tokenizer, self._tokenizer, self.memory.spec.model)
        if memory is self.memory:
            raise SpecError("the draft model needs a memory of its own; make one from its memory_spec")
        self._target_size = memory.spec.vocab_size

    def watch(self, model: LanguageModel, running: Callable[[], Iterable[Job]]) -> LanguageModel:
        return model

    def pause(self) -> None:
        """Do nothing, because texts are fed only where they get drafts."""

    def resume(self) -> None:
        """Do nothing, as `pause`."""

    def n_behind(self, job: Job) -> int | None:
        if job in self._left_out:
            return None
        follower, n_text = self._followers.get(job), job.n_base + len(job.tokens)
        return n_text if follower is None else n_text - follower.shift - follower.n_known

    def draft(self, wanted: Mapping[Job, int]) -> Drafts:
        self.noted = []
        self._swap_with_jobs()
        while wanted:
            try:
                return self._draft(wanted)
            except CapacityError:
                wanted = self._make_room(wanted)
        return {}

    def resumes_at(self, sequence: Sequence, n_tokens: int, owner: Hashable) -> int:
        return n_tokens

    def remember(self, job: Job) -> None:
        pass  # The draft model can be fed the text again, so it is enough to remember texts of jobs that have ended.

    def forget(self, job: Job) -> None:
        self._left_out.clear()  # There is more room now.
        with self._following(), uninterrupted():
            follower = self._followers.pop(job, None)
            if follower is None or follower.sequence.closed:
                return
            if self.texts is not None and not follower.sequence.is_swapped:
                self._remember(job, follower, self.texts)
            self.memory.close(follower.sequence)

    @contextmanager
    def _following(self) -> Iterator[None]:
        """Count the time in which texts are followed."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.following_seconds += time.perf_counter() - started

    def _swap_with_jobs(self) -> None:
        """Swap out the sequences of jobs that are preempted. They are swapped in when the job drafts again."""
        for job, follower in [*self._followers.items()]:
            if job.sequence is not None and job.sequence.is_swapped and not follower.sequence.is_swapped:
                try:
                    self.memory.swap_out(follower.sequence)
                except (CapacityError, OSError):
                    self._close(job)  # There is nowhere to swap to. The text is fed again.

    def _close(self, job: Job) -> None:
        with uninterrupted():
            self.memory.close(self._followers.pop(job).sequence)

    def _make_room(self, wanted: Mapping[Job, int]) -> Mapping[Job, int]:
        """Close the sequences of other jobs, or leave out the job with the longest text. Return the jobs that stay."""
        others = [job for job in self._followers if job not in wanted]
        if others:
            for job in others:
                self._close(job)
            return wanted
        longest = max(wanted, key=lambda job: len(job.tokens))
        if longest in self._followers:
            self._close(longest)
        self._left_out.add(longest)
        return {job: n for job, n in wanted.items() if job is not longest}

    # The methods below read the text of a job, and follow it.

    def _follow(self, job: Job, wanted: Mapping[Job, int]) -> Follower | None:
        """Return the sequence that follows a job. None: a later draft forks it from the sequence of another choice."""
        follower = self._followers.get(job)
        if follower is not None:
            if follower.sequence.is_swapped:
                self.memory.swap_in(follower.sequence)
            return follower
        base = [] if not job.n_base else job.live_sequence.tokens[: job.n_base].tolist()
        for other in job.others:
            source = self._followers.get(other)
            if source is None or source.sequence.is_swapped:
                continue
            n_shared = job.n_base + job.generation.n_prompt - source.shift
            if 0 <= n_shared <= source.n_settled:
                with uninterrupted():
                    fork = Follower(self.memory.fork(source.sequence), base, n_shared, source.shift)
                    self._followers[job] = fork
                return fork
            if other in wanted:
                return None
        with uninterrupted():
            follower = self._followers[job] = self._open(job, base)
        return follower

    def _open(self, job: Job, base: list[int]) -> Follower:
        """Return a follower with a new sequence."""
        tokens = [*base, *job.tokens]
        sequence = self.memory.open() if self.texts is None else self.texts.open(tokens, job.request.owner)
        return Follower(sequence, base, sequence.length)

    def _remember(self, job: Job, follower: Follower, texts: RememberedTexts) -> None:
        """Keep what is remembered of a job's text, for texts that begin like it."""
        self._roll_back(job, follower, n_left=0)
        texts.insert(follower.sequence, job.request.owner)

    def _feeds(self, job: Job, follower: Follower) -> list[int]:
        """Roll back what differs from the text. Return the tokens that must still be fed. Empty: there is no draft."""
        return self._roll_back(job, follower)

    def _roll_back(self, job: Job, follower: Follower, *, n_left: int = 1) -> list[int]:
        """Roll back what differs from the text. Return the tokens that must still be fed, at least `n_left`."""
        own, shift = follower.sequence, follower.shift
        n_text = job.n_base + len(job.tokens) - shift
        if follower.n_taken_back != job.generation.n_taken_back:
            follower.n_taken_back = job.generation.n_taken_back
            n_prompt = max(0, job.n_base + job.generation.n_prompt - shift)
            follower.n_settled = min(follower.n_settled, n_prompt)
        start = min(follower.n_known, n_text - n_left)
        held = own.tokens[start:].tolist() if self._keeps_guesses else []
        text = self._text(job, follower, start + shift)
        n_same = next(
            (i for i, (a, b) in enumerate(zip(held, text, strict=False)) if a != b), min(len(held), len(text))
        )
        reached = self.memory.resume_point(own, min(start + n_same, n_text - n_left))
        if reached < own.length:
            self.memory.rollback(own, to=reached)
        follower.n_settled = reached
        return text[reached - start :] if reached >= start else self._text(job, follower, reached + shift)

    @staticmethod
    def _text(job: Job, follower: Follower, start: int) -> list[int]:
        if start >= job.n_base:
            return job.tokens[start - job.n_base :]
        return [*follower.base[start:], *job.tokens]

    # The methods below make the steps of a draft.

    def _draft(self, wanted: Mapping[Job, int]) -> Drafts:
        feeds, left = dict[Job, list[int]](), self._step_tokens
        for job in wanted:
            follower = self._follow(job, wanted)
            if follower is not None:
                tokens = self._feeds(job, follower)
                if not tokens:
                    continue
                if max(tokens) < self._vocab_size:
                    feeds[job] = tokens
                else:  # Rows of pictures, and ids of a larger vocabulary, are unknown here.
                    self._left_out.add(job)
        guesses = dict[Job, Guess]()
        for job in sorted(feeds, key=lambda job: len(feeds[job])):
            tokens = feeds[job][:left]
            left -= len(tokens)
            if tokens:
                is_ready = len(tokens) == len(feeds[job])
                guesses[job] = Guess(wanted[job] if is_ready else 0, _sampler_of(job), next_ids=tokens)
        if not guesses:
            return {}
        self._advance(guesses)
        for job, guess in guesses.items():
            self._followers[job].n_settled += len(guess.next_ids)
        try:
            while going := self._going(guesses):
                self._advance(going)
        except CapacityError:
            pass  # The drafts end here.
        return {job: guess.token_ids for job, guess in guesses.items() if guess.token_ids}

    @staticmethod
    def _going(guesses: dict[Job, Guess]) -> dict[Job, Guess]:
        """Return the drafts that get one more token."""
        going = {
            job: guess
            for job, guess in guesses.items()
            if guess.token_ids and len(guess.token_ids) < guess.most_tokens and not guess.is_ended
        }
        for guess in going.values():
            guess.next_ids = guess.token_ids[-1:]
        return going

    def _advance(self, guesses: dict[Job, Guess]) -> None:
        """Feed the next tokens, and guess one more for each draft that may grow."""
        started = time.perf_counter()
        step = self.memory.step([(self._followers[job].sequence, guess.next_ids) for job, guess in guesses.items()])
        growing = [(i, job, guess) for i, (job, guess) in enumerate(guesses.items()) if guess.most_tokens]

        def choose(logits: Tensor, step: object) -> list[int | StepError]:
            rows_SV = logits if len(growing) == len(logits) else logits[[i for i, _, _ in growing]]
            return guess_tokens(self._fit(rows_SV), [guess.sampler for _, _, guess in growing]) if growing else []

        def keep(chosen: list[int | StepError]) -> None:
            for (_, job, guess), token_id in zip(growing, chosen, strict=True):
                guess.grow(token_id, job.request.output.end_ids)

        take_step(self._model_of(guesses), step, choose, keep, uninterrupted())
        self.noted.append((sum(len(guess.next_ids) for guess in guesses.values()), time.perf_counter() - started))

    def _model_of(self, guesses: dict[Job, Guess]) -> Callable[[Step], Tensor]:
        """Return the model that computes logits in a step that feeds the next tokens of these drafts."""
        return self.model

    def _fit(self, rows_SV: Tensor) -> Tensor:
        """Return the logits of the model's own vocabulary. Ids that the draft model lacks are never drafted."""
        missing = self._target_size - rows_SV.shape[1]
        if missing <= 0:
            return rows_SV[:, : self._target_size]
        return torch.nn.functional.pad(rows_SV, (0, missing), value=-torch.inf)


def check_same_tokens(tokenizer: Tokenizer, drafting: Tokenizer, name: str) -> None:
    """Raise SpecError unless both tokenizers give the same ids to the same texts. `name` is the draft model's."""
    own, other = tokenizer.get_vocab(), drafting.get_vocab()
    if own != other:
        token = min(token for token in {*own, *other} if own.get(token) != other.get(token))
        raise SpecError(
            f"the draft model {name} has another tokenizer: it gives {token!r} the id {other.get(token)}, and the "
            f"model the id {own.get(token)}; choose a draft model of the same family"
        )
    for text in _PROBES:
        ids, others = (each.encode(text, add_special_tokens=False) for each in (tokenizer, drafting))
        if ids != others:
            raise SpecError(
                f"the draft model {name} has another tokenizer: it encodes {text!r} as {others}, and the model as "
                f"{ids}; choose a draft model of the same family"
            )


def _sampler_of(job: Job) -> Sampler | None:
    """Return a copy of the reply's sampler, which can take tokens that may be rejected. None: argmax chooses."""
    assert job.sampler is not None, "made when it was admitted"
    return None if job.sampler.is_plain else copy(job.sampler)


def guess_tokens(rows_SV: Tensor, samplers: list[Sampler | None]) -> list[int | StepError]:
    """Guess a token from each row of logits, with its sampler, or the likeliest without one."""
    guessed: list[int | StepError] = list(rows_SV.max(-1).indices.tolist())
    drawn = [i for i, sampler in enumerate(samplers) if sampler is not None]
    if drawn:
        rows_SV = rows_SV if len(drawn) == len(samplers) else rows_SV[drawn]
        own = [sampler for sampler in samplers if sampler is not None]
        for i, token_id in zip(drawn, choose_rows(rows_SV, own), strict=True):
            guessed[i] = token_id
    return guessed
