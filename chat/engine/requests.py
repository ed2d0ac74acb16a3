"""Holds a request to the engine, the generation that results, and the job between the two."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from torch import Tensor

from hybridmem.chat.engine.output import PLAIN, Output
from hybridmem.chat.engine.streaming import TextStream
from hybridmem.chat.engine.taking_back import FollowedCalls
from hybridmem.chat.sampling.logprobs import Chosen
from hybridmem.chat.sampling.sampler import Sampler
from hybridmem.chat.sampling.sampling import Sampling, check_sampling
from hybridmem.memory import BatchError, Passage, Sequence, SoftTokens
from hybridmem.memory.blocks import is_integer
from hybridmem.memory.prefix import Lookup
from hybridmem.memory.sequences import is_soft, why_no_ids

LEAST_CHUNK_TOKENS = 16
"""A shared step takes at least this many tokens of a prompt, unless fewer are left. Smaller chunks cost more than they
bring.
"""
EXPECTED_REPLY_TOKENS = 512
"""The engine keeps room for at most this many tokens of a reply. A large max_tokens allows a long reply, but most are
short.
"""

GREEDY = Sampling()

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]


@dataclass(eq=False)
class Generation:
    """Holds the result of a request so far. The engine writes it; callers only read it.

    Attributes:
        n_prompt: the number of tokens in the prompt. n_base: the number of tokens that the given sequence held before.
        n_prefilled: how many tokens of the prompt the sequence holds so far, reused or computed.
        token_ids: all chosen tokens, including the one that ended the reply.
        logprobs: the same tokens with their log probabilities, if these were asked for. A token of `stop_ids` at the
            end is left out, unless `Output.reports_end` is set.
        prompt_logprobs: the scored tokens of the prompt so far, if it is scored; see `Output.prompt_logprobs`.
        text: the text of the chosen tokens, up to a stop string. A token of `stop_ids` at the end is left out. While
            the reply is running, incomplete characters and a possible start of a stop string are left out, too.
        finish_reason: "stop" (an end token, a stop string, or the end of its grammar), "length" (max_tokens, or a stop
            where its grammar goes on), "cancelled", "deadline" or "error". None while it is running.
        stopped_by: the stop string that ended the reply, if one did.
        error: the exception, if the reply ended with "error".
        sequence: the live sequence, if it was to be kept and the reply has ended. It stays swapped out if it was so at
            that moment.
        lookup: the prefix cache's lookup of the prompt, if there was one. A forked choice has the lookup of its source.
        choice: the generation's number among the choices of its request, from 0.
        n_drafts: how many drafts were verified. n_drafted, n_accepted: how many tokens were drafted, and how many of
            them were right. saved_seconds: the time that drafts have saved; negative if they lost time.
        n_taken_back: how many calls of tools broke their schemas and were drawn again. n_discarded: how many tokens
            these calls had.
        submitted_at, admitted_at, first_token_at, finished_at: seconds on the engine's clock. None: it has not happened
            yet.
    """

    id: int
    n_prompt: int
    submitted_at: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Chosen] = field(default_factory=list)
    prompt_logprobs: list[Chosen] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stopped_by: str | None = None
    error: Exception | None = None
    sequence: Sequence | None = None
    lookup: Lookup | None = None
    n_base: int = 0
    n_prefilled: int = 0
    admitted_at: float | None = None
    first_token_at: float | None = None
    finished_at: float | None = None
    n_drafts: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    saved_seconds: float = 0.0
    choice: int = 0
    n_taken_back: int = 0
    n_discarded: int = 0

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None


OnToken = Callable[[Generation, str], None]
"""The engine calls this after each token, with the text that became visible ("" if none). Exactly one call comes when
finish_reason is set. With `reports_prefill`, it is also called with "" after each part of the prompt.
"""


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """Holds the options of `Engine.submit` that all choices of a request share. Callbacks are not among them."""

    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    output: Output = PLAIN
    deadline_s: float | None = None
    marks: tuple[int, ...] = ()
    priority: int = 0
    owner: Hashable = None
    reports_prefill: bool = False
    prediction: tuple[int, ...] = ()
    passages: tuple[Passage, ...] = ()

    def options(self) -> dict[str, Any]:
        """Return these options by their names."""
        return {each.name: getattr(self, each.name) for each in fields(RequestOptions)}


@dataclass(frozen=True)
class Request(RequestOptions):
    """Holds the arguments of `Engine.submit`. Raises BatchError; the message names the argument and its value."""

    token_ids: list[int]
    sequence: Sequence | None = None
    sampling: Sampling = GREEDY
    keeps_sequence: bool = False
    remembers_end: bool = False
    on_token: OnToken | None = None

    @classmethod
    def read(
        cls, token_ids: object, options: Mapping[str, Any], stop_ids: tuple[int, ...], vocab_size: int,
        soft: SoftTokens | None = None,
    ) -> Request:  # fmt: skip
        """Make a request from the arguments of `Engine.submit`. Raises BatchError.

        Args:
            stop_ids: the engine's stop ids, for an output that names none.
            soft: finds the rows of pictures, which the request then holds. None: the model takes no pictures.
        """
        if unknown := options.keys() - {each.name for each in fields(cls)}:
            raise BatchError(f"{min(unknown)}=... is no option of a request; see Engine.submit")
        ids, prediction = read_token_ids(token_ids, vocab_size, soft), options.get("prediction", ())
        read = {
            "stop": read_stop(options.get("stop", ())),
            "marks": read_marks(options.get("marks", ())),
            "output": options.get("output", PLAIN).read(stop_ids, vocab_size),
            "prediction": tuple(read_token_ids(prediction, vocab_size)) if len(prediction) else (),
            "passages": () if soft is None else soft.held(np.array(ids, np.int64)),
        }
        if read["passages"] and read["output"].prompt_logprobs is not None:
            raise BatchError("output.prompt_logprobs: rows of pictures cannot be scored; leave it out")
        return cls(ids, **{**options, **read})

    def __post_init__(self) -> None:
        check_max_tokens(self.max_tokens)
        check_sampling(self.sampling)
        deadline_s = self.deadline_s
        if deadline_s is not None and not (
            isinstance(deadline_s, int | float) and deadline_s > 0 and not math.isnan(deadline_s)
        ):
            raise BatchError(f"deadline_s={deadline_s!r}; give seconds from now, above 0, or None")
        for mark in self.marks:
            if not is_integer(mark) or not 0 < mark <= len(self.token_ids):
                raise BatchError(f"marks={self.marks!r}; give positions 1 ... {len(self.token_ids)} in token_ids")
        if self.on_token is not None and not callable(self.on_token):
            raise BatchError(f"on_token={self.on_token!r}; give a function of (generation, text)")
        if self.sequence is not None and self.output.follow_calls is not None:
            raise BatchError(
                "output.follow_calls is for new sequences; leave it out with sequence=..., which continues one"
            )
        if not is_integer(self.priority):
            raise BatchError(f"priority={self.priority!r}; give an integer, larger for more important")
        if not isinstance(self.owner, Hashable):
            raise BatchError(f"owner={self.owner!r}; give something hashable, such as a user's name, or None")


def read_token_ids(token_ids: object, vocab_size: int, soft: SoftTokens | None = None) -> list[int]:
    """Return a request's tokens as a list.

    Raises BatchError unless they are one or more integers with 0 <= id < vocab_size, or `soft` tokens.
    """
    if isinstance(token_ids, Tensor | np.ndarray):
        if token_ids.ndim > 1:
            raise BatchError(f"token_ids have shape {tuple(token_ids.shape)}; give one axis, one request at a time")
        token_ids = token_ids.tolist()
    if isinstance(token_ids, str | bytes | Mapping | Set):
        raise BatchError(f"token_ids={reprlib.repr(token_ids)}: {why_no_ids(token_ids, vocab_size)}")
    if not isinstance(token_ids, Iterable):
        raise BatchError(f"token_ids={token_ids!r}; give a list of token ids")
    ids = list(token_ids)
    for token in ids:
        if isinstance(token, list | tuple):
            raise BatchError(f"token_ids hold {reprlib.repr(token)}; give one axis, one request at a time")
        if not is_integer(token):
            raise BatchError(f"token_ids hold {reprlib.repr(token)}: {why_no_ids(token, vocab_size)}")
        if not 0 <= token < vocab_size and (soft is None or not is_soft(token)):
            raise BatchError(f"token {token} is outside the vocabulary: 0 <= id < {vocab_size}")
    if not ids:
        raise BatchError("token_ids are empty; there must be a token to go on from")
    return [int(token) for token in ids]


def check_max_tokens(max_tokens: object) -> None:
    """Raise BatchError unless this is a possible length of a reply."""
    if not is_integer(max_tokens, 0):
        raise BatchError(
            f"max_tokens={max_tokens!r}; give an integer of at least 0 (0 feeds the tokens and chooses none)"
        )


def read_stop(stop: object) -> tuple[str, ...]:
    """Return stop strings, given as several or as one. Raises BatchError."""
    if not isinstance(stop, Iterable):
        raise BatchError(f"stop={stop!r}; give a string or several")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(each, str) and each for each in stops):
        raise BatchError(f"stop={stop!r}; give strings of at least one character")
    return stops


def read_marks(marks: object) -> tuple[Any, ...]:
    """Return positions in a prompt, which `Request` compares with its length. Raises BatchError."""
    if not isinstance(marks, Iterable):
        raise BatchError(f"marks={marks!r}; give a list of positions in token_ids")
    return tuple(marks)


@dataclass(eq=False)
class Job:
    """Holds the state of a request on its way through the engine.

    Attributes:
        tokens: all tokens to feed, in order: the prompt, the chosen tokens, and the end of the reply if it is to be
            remembered.
        n_fed: how many of `tokens` the sequence holds. At an index i of `tokens`, the sequence's length is n_base + i.
        n_reused: how many of `tokens` came from the prefix cache.
        lookup: the cache's lookup of `tokens`, until the first step with this sequence is counted.
        others: the jobs of the other choices of the same request. Their prompts are the same.
        is_forked: whether the job's prompt came by a fork from one of the others.
        cuts: indices into `tokens`, ascending, where a chunk of the prompt ends because the prefix cache wants to
            remember it.
        arriving: while the job waits, the cached checkpoint whose files are read for it. Empty if there is none.
        leader: while the job waits, the running job whose prompt begins with the same tokens, and how many of its
            tokens must be fed before this job starts.
        calls: holds back the text of calls until it is clear that they keep to their schemas. None: no text is held
            back.
        ending: why the reply is complete. Only its last tokens are still to be fed.
        outcome: why the job ends now, and the error if it is one. The job is released between steps.
        has_failing_callback: whether its on_token has raised. It is not called again then.
        served: the number of the step in which it last got tokens.
        admitted: the job's number among all admissions. The latest is preempted first.
    """

    request: Request
    generation: Generation
    stream: TextStream
    deadline: float
    sequence: Sequence | None
    tokens: list[int]
    n_fed: int = 0
    n_base: int = 0
    n_reused: int = 0
    lookup: Lookup | None = None
    cuts: list[int] = field(default_factory=list)
    arriving: list[Sequence] | None = None
    leader: tuple[Job, int] | None = None
    others: list[Job] = field(default_factory=list)
    is_forked: bool = False
    sampler: Sampler | None = None
    calls: FollowedCalls | None = None
    ending: FinishReason | None = None
    outcome: tuple[FinishReason, Exception | None] | None = None
    is_cancelled: bool = False
    has_failing_callback: bool = False
    served: int = 0
    admitted: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        """Return the job's rank in a queue. The lowest comes first: the more important job, then the older one."""
        return -self.request.priority, self.generation.id

    @property
    def live_sequence(self) -> Sequence:
        """Return the sequence of a running job."""
        assert self.sequence is not None, "opened when it was admitted"
        return self.sequence

    @property
    def is_prefilling(self) -> bool:
        """Return whether the job has more tokens to be fed than the one that was chosen last."""
        return self.n_fed < max(self.generation.n_prompt, len(self.tokens) - 1)

    @property
    def has_prompt(self) -> bool:
        """Return whether the job's sequence has already held the whole prompt.

        Only when it first does are other choices forked.
        """
        return self.n_fed >= self.generation.n_prompt or bool(self.generation.token_ids)

    @property
    def is_untouched(self) -> bool:
        """Return whether closing the sequence loses nothing that was computed for it."""
        return self.request.sequence is None and self.n_fed == self.n_reused and not self.is_forked

    @property
    def is_new(self) -> bool:
        """Return whether nothing has been computed for the job yet, and no token was chosen."""
        return self.sequence is None and not self.admitted and self.outcome is None

    @property
    def n_unfed(self) -> int:
        """Return how many tokens of the prompt are left to be fed."""
        return max(self.generation.n_prompt, len(self.tokens) - 1) - self.n_fed

    @property
    def next_stop(self) -> int:
        """Return the index into `tokens` that the next chunk may reach."""
        if not self.is_prefilling:
            return self.n_fed + 1
        ends = (*self.cuts, self.generation.n_prompt, len(self.tokens))
        return min(end for end in ends if end > self.n_fed)

    @property
    def expected_tokens(self) -> int:
        """Return the expected length of the sequence.

        The reply counts with half of max_tokens, at most EXPECTED_REPLY_TOKENS, because most replies end before they
        are cut.
        """
        n_reply = min(self.request.max_tokens // 2, EXPECTED_REPLY_TOKENS)
        return self.n_base + max(len(self.tokens), self.generation.n_prompt + n_reply)

    @property
    def next_scored(self) -> int:
        """Return the index in the prompt of the next token to be scored."""
        return self.request.output.scored_from + len(self.generation.prompt_logprobs)

    @property
    def is_scored(self) -> bool:
        """Return whether tokens of the prompt are still to be scored."""
        return self.request.output.prompt_logprobs is not None and self.next_scored < self.generation.n_prompt

    @property
    def most_reused(self) -> int:
        """Return the greatest number of tokens that may come from a cached prefix.

        The token before a scored one must be fed.
        """
        return self.next_scored - 1 if self.is_scored else len(self.tokens)

    def ahead(self) -> Job:
        """Return a copy that can take tokens while this job stays as it is.

        The copy is for tokens that may be taken back.
        """
        job = copy(self)
        job.tokens, job.sampler, job.stream = [*self.tokens], copy(self.sampler), self.stream.ahead()
        job.calls = None
        job.generation = copy(self.generation)
        job.generation.token_ids = [*self.generation.token_ids]
        job.generation.logprobs = [*self.generation.logprobs]
        return job

    def wants_choice(self, n_tokens: int) -> bool:
        """Return whether a token is to be chosen once the next `n_tokens` are fed."""
        is_last = self.n_fed + n_tokens == len(self.tokens)
        return is_last and self.ending is None and len(self.generation.token_ids) < self.request.max_tokens

    def begin_reply(self, known: Iterable[int]) -> None:
        """Make the sampler of the reply after these known tokens.

        The sampler stays the same when the job starts again.
        """
        if self.sampler is None:
            self.sampler, follow = self._make_sampler(known), self.request.output.follow_calls
            self.calls = None if follow is None else FollowedCalls(follow, self.sampler, self.stream)

    def _make_sampler(self, known: Iterable[int]) -> Sampler:
        request = self.request
        grammar, calls = request.output.grammar, request.output.calls
        matcher = None if grammar is None else grammar.matcher()
        trigger = None if calls is None or grammar is not None else calls.watch()
        return Sampler(request.sampling, known, stop_ids=request.output.end_ids, matcher=matcher, trigger=trigger)

    def take(self, choice: Chosen, end_ids: tuple[int, ...], now: float) -> str:
        """Add the token that was chosen, and return the text that it makes visible.

        Args:
            end_ids: the engine's end tokens. The first is written after a reply that is cut and to be remembered.
        """
        generation, request, token_id = self.generation, self.request, choice.token_id
        assert self.sampler is not None, "a token was chosen by it"
        was_free = self.sampler.matcher is None
        self.sampler.add(token_id)
        generation.token_ids.append(token_id)
        if generation.first_token_at is None:
            generation.first_token_at = now
        is_end = token_id in request.output.end_ids
        may_stop = len(generation.token_ids) >= request.sampling.min_tokens
        if request.output.logprobs is not None and (request.output.reports_end or not is_end):
            generation.logprobs.append(choice)
        piece = "" if is_end else self.stream.add(token_id, may_stop=may_stop)
        if is_end or self.stream.stopped_by is not None or self.sampler.is_stopped:
            self.ending = "stop"
        elif len(generation.token_ids) == request.max_tokens:
            self.ending = "length"
        else:
            self.tokens.append(token_id)
        if self.ending is not None:
            piece += self.stream.flush()
            if self.stream.stopped_by is not None:
                self.ending, generation.stopped_by = "stop", self.stream.stopped_by
            if self.ending == "stop" and not self.sampler.may_end:
                self.ending = "length"
            if request.remembers_end:
                self.tokens += [token_id] if is_end else [token_id, *end_ids[:1]]
        generation.text = self.stream.text
        if self.calls is not None:
            is_free = was_free and self.sampler.matcher is None
            return self.calls.pass_on(piece, generation, self.sampler, self.stream, self.ending, is_free=is_free)
        return piece

    def take_back(self) -> None:
        """Forget the tokens of a call that breaks its schema. The sampler then draws another call.

        `n_fed` is lowered to the number of leading tokens that have not changed. At least one token stays to be fed.
        """
        grammar = self.request.output.calls
        assert self.calls is not None and grammar is not None, "they have found the call"
        n_same, self.sampler, self.stream = self.calls.take_back(self.generation, grammar.grammar.tokenize)
        self.tokens[self.generation.n_prompt :] = self.generation.token_ids
        self.n_fed = min(self.n_fed, self.generation.n_prompt + n_same, len(self.tokens) - 1)
        self.ending = None
