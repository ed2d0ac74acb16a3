"""Guesses the next tokens of a reply: those that followed the same tokens earlier in its text, or in a prediction.

Any guess is allowed, because the model verifies it. Guesses change how fast a reply comes, never what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from hybridmem.memory.sequences import is_soft

N_GRAM = 3
"""This many tokens must agree. A smaller number gives more and worse guesses."""


@dataclass
class NGrams:
    """Maps each n-gram of a growing text to the position after its latest occurrence.

    Cost: one dictionary entry for each token of text, made once.
    """

    text: Sequence[int]
    behind: dict[tuple[int, ...], int] = field(default_factory=dict)
    n_indexed: int = 0

    def find(self, n_gram: tuple[int, ...]) -> int | None:
        """Return the position after the latest occurrence of an n-gram, except at the end of the text.

        None: there is none.
        """
        n, size = len(self.text), len(n_gram)
        for end in range(max(self.n_indexed, size), n):
            self.behind[tuple(self.text[end - size : end])] = end
        self.n_indexed = max(self.n_indexed, n)
        return self.behind.get(n_gram)


class Guesses:
    """Guesses the next tokens of one reply.

    Args:
        text: a list that grows at its end: a prompt of `n_prompt` tokens, then the reply.
        prediction: tokens that most of the reply is expected to repeat. Empty: nothing is expected.
        looks_up: guess from the text, too (prompt lookup, Saxena 2023). This pays if replies repeat their prompt or
            themselves.
    """

    def __init__(self, text: list[int], n_prompt: int, prediction: Sequence[int], *, looks_up: bool) -> None:
        self._text = text
        self._n_prompt = n_prompt
        self._own = NGrams(text) if looks_up else None
        self._prediction = NGrams(prediction) if prediction else None

    def next(self, n_tokens: int) -> list[int]:
        """Return up to `n_tokens` tokens that may come next. The list is empty without a guess."""
        last = tuple(self._text[-N_GRAM:])
        found = self._predicted(last, n_tokens) if self._prediction is not None else []
        return list(takewhile(lambda token: not is_soft(token), found or self._repeated(last, n_tokens)))

    def _predicted(self, last: tuple[int, ...], n_tokens: int) -> list[int]:
        assert self._prediction is not None
        prediction, n_said = self._prediction.text, len(self._text) - self._n_prompt
        if n_said < N_GRAM:  # So early, assume that the reply begins as predicted.
            begins_so = self._text[self._n_prompt :] == list(prediction[:n_said])
            start: int | None = n_said if begins_so else None
        else:
            start = self._prediction.find(last)
        return [] if start is None else list(prediction[start : start + n_tokens])

    def _repeated(self, last: tuple[int, ...], n_tokens: int) -> list[int]:
        start = None if self._own is None else self._own.find(last)
        if start is None:
            return []
        n = len(self._text)
        found = self._text[start : start + n_tokens]
        # The end of the text is reached. Repeat the tokens since `start`, as if the text went on in a loop.
        while len(found) < n_tokens:
            found.append(found[start - n])
        return found
