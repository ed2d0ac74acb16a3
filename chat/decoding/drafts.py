"""Makes drafts for speculative decoding. A drafter guesses the next tokens from the text itself, or by a smaller model.

A drafter may guess anything: drafts change how fast a text is decoded, never which text
(`chat.decoding.speculative`).
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hybridmem.chat.engine.arguments import check_parts
from hybridmem.chat.engine.loop import decode
from hybridmem.chat.sampling.sampler import Sampler
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.memory import CapacityError, HybridMemory, Sequence, SpecError, Step, StepError
from hybridmem.memory.blocks import read_count
from hybridmem.memory.sequences import is_soft, uninterrupted
from hybridmem.memory.step import Outputs
from hybridmem.models import LanguageModel


@dataclass(frozen=True)
class Draws:
    """Draws the tokens of one text. Its random numbers are independent of those of `Sampler.draw`.

    A drafted token, its acceptance and the token that replaces a rejected one must not depend on the same number.
    """

    sampler: Sampler
    random: np.random.Generator

    @staticmethod
    def of(sampling: Sampling, text: list[int], stop_ids: tuple[int, ...] = ()) -> Draws:
        return Draws(
            Sampler(sampling, text, stop_ids=stop_ids),
            np.random.default_rng(None if sampling.seed is None else sampling.seed % 2**64),
        )

    def ahead(self) -> Draws:
        """Return a copy with its own sampler. The copy can count tokens that may still be rejected."""
        return Draws(copy(self.sampler), self.random)

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Return the probability of each token to be next, (V,). Raises StepError for logits that are not finite."""
        p_V = self.sampler.probabilities(logits_V)
        if not bool(torch.isfinite(p_V.sum())):
            raise StepError("the model's logits are not finite; give it a wider dtype, such as float32 or bfloat16")
        return p_V

    def draw(self, weights_V: Tensor) -> int:
        """Draw a token with probabilities in proportion to `weights_V`, which are >= 0 and not all 0."""
        cumulative_V = weights_V.double().cumsum(-1)
        point = cumulative_V.new_tensor([self.random.random()]) * cumulative_V[-1]
        # If rounding moved the point up to the total, it would lie after the last possible token.
        return min(int(torch.searchsorted(cumulative_V, point, right=True)), int(weights_V.nonzero()[-1]))


@dataclass(frozen=True)
class DraftRequest:
    """Requests a draft for one text.

    Attributes:
        text: the prompt and all generated tokens. While it is the same list object, it only grows at its end.
        most_tokens: the most tokens of the draft, at least 1.
        draws: draws the tokens. None: each is the likeliest.
    """

    text: list[int]
    most_tokens: int
    draws: Draws | None = None


@dataclass(frozen=True)
class Draft:
    """Proposes tokens that may come next.

    Attributes:
        chances: for each token, the probabilities (V,) from which it was drawn. None: the drafter chose its tokens
            without drawing, so each had probability 1.
    """

    token_ids: list[int]
    chances: list[Tensor] | None = None


class Drafter(Protocol):
    """Makes drafts for any number of sequences at once.

    Attributes:
        n_draft: the most tokens that a draft may have.
        vocab_size: the vocabulary size of the ids in its drafts. None: it only repeats ids of the text.
    """

    n_draft: int
    vocab_size: int | None

    def draft(self, requests: Mapping[Sequence, DraftRequest]) -> dict[Sequence, Draft]:
        """Return drafts of at least one token. Sequences without a guess are left out.

        Sequences that are not in `requests` have no reply under way. `requests` is empty when the last reply has ended.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Free what is kept for a sequence. It need not have had a draft."""
        ...


def check_counts(**counts: int) -> None:
    """Raise SpecError unless all are positive integers."""
    for name, value in counts.items():
        read_count(name, value, 1)


# What follows takes drafts from the text.


@dataclass
class _Index:
    """Maps each n-gram of a text to the position after its latest occurrence.

    The n-gram at the very end is left out.
    """

    text: list[int]
    behind: dict[tuple[int, ...], int] = field(default_factory=dict)
    n_indexed: int = 0

    def continuation(self, n_gram: int, n_tokens: int) -> list[int]:
        """Return the tokens that followed the previous occurrence of the text's last n-gram.

        The list is empty if there is none.
        """
        text, n = self.text, len(self.text)
        for end in range(max(self.n_indexed, n_gram), n):
            self.behind[tuple(text[end - n_gram : end])] = end
        self.n_indexed = max(self.n_indexed, n)
        start = self.behind.get(tuple(text[-n_gram:]))
        if start is None:
            return []
        found = text[start : start + n_tokens]
        # This is the end of the text. Repeat the tokens since `start`, as if the text went on in a loop.
        while len(found) < n_tokens:
            found.append(found[start - n])
        # Replies never have a picture, so drafts end before its tokens.
        return list(takewhile(lambda token: not is_soft(token), found))


class PromptLookup:
    """Looks up drafts in the text itself: the tokens that followed the last `n_gram` tokens earlier (Saxena 2023).

    It needs no model and no state. It pays where replies repeat their prompt or themselves: summaries, edits, code,
    loops.

    Args:
        n_gram: how many tokens must agree. A smaller number gives more drafts, but worse ones.
        n_draft: the most tokens of a draft.
    Raises:
        SpecError: a number that is not positive.
    Cost: one dictionary entry for each token of text, made once, and one look-up for each draft.
    """

    vocab_size = None

    def __init__(self, n_gram: int = 3, n_draft: int = 8) -> None:
        check_counts(n_gram=n_gram, n_draft=n_draft)
        self.n_gram = n_gram
        self.n_draft = n_draft
        self._indices: dict[Sequence, _Index] = {}

    def draft(self, requests: Mapping[Sequence, DraftRequest]) -> dict[Sequence, Draft]:
        drafts, before = {}, self._indices
        self._indices = {}  # Texts that are not requested any more have ended.
        for sequence, request in requests.items():
            index = before.get(sequence)
            if index is None or index.text is not request.text:
                index = _Index(request.text)
            self._indices[sequence] = index
            if found := index.continuation(self.n_gram, min(request.most_tokens, self.n_draft)):
                drafts[sequence] = Draft(found)
        return drafts

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence, None)


# What follows takes drafts from a smaller model.


@dataclass
class _Follower:
    """Holds a sequence in the draft model's memory that follows a text.

    Attributes:
        n_settled: how many leading tokens were fed from the text. The tokens after them were guesses.
    """

    sequence: Sequence
    text: list[int]
    n_settled: int = 0


@dataclass
class _Guess:
    """Holds a draft that grows.

    Attributes:
        next_ids: the tokens to feed before the next token is guessed.
    """

    next_ids: list[int]
    draft: Draft
    most_tokens: int
    draws: Draws | None

    def extend(self, logits_V: Tensor) -> None:
        """Guess the next token: the likeliest, or a drawn one."""
        draft, draws = self.draft, self.draws
        if draws is None or draft.chances is None:
            draft.token_ids.append(int(logits_V.argmax()))
        else:
            chances_V = draws.probabilities(logits_V)
            draft.chances.append(chances_V)
            draft.token_ids.append(draws.draw(chances_V))
            draws.sampler.add(draft.token_ids[-1])
        self.next_ids = draft.token_ids[-1:] if len(draft.token_ids) < self.most_tokens else []


class _Guessing:
    """Generates drafts with a draft model, as a mode of the generation loop.

    In each step, every draft gets one more token.
    """

    outputs: Outputs = "last"

    def __init__(self, guesses: dict[Sequence, _Guess]) -> None:
        self._guesses = guesses

    def requests(self) -> dict[Sequence, list[int]]:
        self._guesses = {s: guess for s, guess in self._guesses.items() if guess.next_ids}
        return {s: guess.next_ids for s, guess in self._guesses.items()}

    def choose(self, logits: Tensor, step: Step | None) -> Tensor:
        return logits

    def keep(self, chosen: Tensor) -> None:
        for guess, row_V in zip(self._guesses.values(), chosen, strict=True):
            guess.extend(row_V)


class DraftModel:
    """Decodes drafts with a smaller model of the same vocabulary, which has a memory of its own.

    Each token takes a step.

    Its sequences follow the texts. Wrong guesses, and tokens that were edited since, are rolled back within the
    memory's window. If they are older than the window, the text is fed again from the nearest reachable position.

    Args:
        memory: a memory made from `model.memory_spec`. Nothing else may advance the sequences that are opened here.
        n_draft: the most tokens of a draft. It may not exceed the memory's `rollback_window`.
        step_tokens: a longer text is fed in steps of this many tokens.
    Raises:
        SpecError: an impossible number.
    """

    def __init__(self, model: LanguageModel, memory: HybridMemory, n_draft: int = 4, *, step_tokens: int = 512) -> None:
        check_parts(model, memory, "DraftModel(model, memory)")
        check_counts(n_draft=n_draft, step_tokens=step_tokens)
        check_window(n_draft, memory)
        self.model = model
        self.memory = memory
        self.n_draft = n_draft
        self.vocab_size: int | None = memory.spec.vocab_size
        self._step_tokens = step_tokens
        self._followers: dict[Sequence, _Follower] = {}

    def draft(self, requests: Mapping[Sequence, DraftRequest]) -> dict[Sequence, Draft]:
        """Return drafts as `Drafter.draft`.

        If this memory has no room left, drafts are shorter or missing, without an error.
        """
        for sequence in [s for s in self._followers if s.closed]:
            self.forget(sequence)
        drafts = {s: Draft([], None if r.draws is None else []) for s, r in requests.items()}
        draws = {s: None if r.draws is None else r.draws.ahead() for s, r in requests.items()}
        try:
            feeds = {s: self._catch_up(s, request.text) for s, request in requests.items()}
            guesses = {
                self._followers[s].sequence: _Guess(
                    tokens, drafts[s], min(requests[s].most_tokens, self.n_draft), draws[s]
                )
                for s, tokens in feeds.items()
            }
            decode(self.model, self.memory, _Guessing(guesses), step_tokens=self._step_tokens)
        except CapacityError:
            pass
        return {s: draft for s, draft in drafts.items() if draft.token_ids}

    def _catch_up(self, sequence: Sequence, text: list[int]) -> list[int]:
        """Roll back what differs from the text. Return the tokens that must still be fed, at least one."""
        follower = self._followers.get(sequence)
        if follower is None:
            with uninterrupted():
                follower = self._followers[sequence] = _Follower(self.memory.open(), text)
        elif follower.text is not text:
            follower.text, follower.n_settled = text, 0
        own = follower.sequence
        start = min(follower.n_settled, own.length)
        held = own.tokens[start:].tolist()
        n_same = next(
            (i for i, (a, b) in enumerate(zip(held, text[start:], strict=False)) if a != b),
            min(len(held), len(text) - start),
        )
        reached = self.memory.resume_point(own, min(start + n_same, len(text) - 1))
        if reached < own.length:
            self.memory.rollback(own, to=reached)
        follower.n_settled = len(text)
        return text[reached:]

    def forget(self, sequence: Sequence) -> None:
        with uninterrupted():
            if follower := self._followers.pop(sequence, None):
                self.memory.close(follower.sequence)


def check_window(n_draft: int, memory: HybridMemory) -> None:
    """Raise SpecError unless drafts of this many tokens can always be rolled back.

    A step feeds 1 + n_draft tokens, of which only the first may be kept. So up to n_draft tokens are rolled back from
    the furthest position that was ever fed. The memory guarantees rollback_window tokens from there.
    """
    if n_draft > memory.rollback_window:
        raise SpecError(
            f"drafts of {n_draft} tokens cannot be taken back by a memory with "
            f"rollback_window={memory.rollback_window}; choose n_draft of at most that, or give the memory a window of "
            f"{n_draft} tokens"
        )
