"""Guesses the next tokens of a reply: those that followed the same tokens earlier in its text, or in a prediction.

Any guess is allowed, because the model verifies it. Guesses change how fast a reply comes, never what it says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from hybridmem.memory.sequences import is_soft

N_GRAM = 3
"""This many tokens must agree. A smaller number gives more and worse guesses."""
_MOST_PLACES = 8
"""So many of the latest occurrences are compared."""
MOST_SAME = 16
"""It is not counted whether more tokens than these agree."""
_NEAR, _LONGEST_CHANGE = 8, 48
"""After a change, a copied text is expected to go on at most so many tokens away from where it would have, and only
until so many tokens have followed without another guess.
"""
_SHIFTS = sorted(range(-_NEAR, _NEAR), key=abs)


@dataclass(frozen=True)
class Guess:
    """Holds tokens that may come next.

    Attributes:
        n_same: how many tokens before them agree, at most `MOST_SAME`. 0: the text was copied up to a change, and the
            guess is where the copy goes on.
        is_predicted: whether they are from a prediction.
    """

    token_ids: list[int]
    n_same: int = 0
    is_predicted: bool = False


NO_GUESS = Guess([])


class NGrams:
    """Maps each n-gram of a growing text to the positions after its occurrences, from the latest back.

    Cost: for each token of text, one look-up in a dictionary, one entry and one integer. With these it is known at once
    whether the newest n-gram occurred before.
    """

    def __init__(self, text: Sequence[int]) -> None:
        self.text = text
        self._latest = dict[tuple[int, ...], int]()  # This maps an n-gram to the position after its latest occurrence.
        # For each n-gram of the text, this is the position after its previous occurrence, or -1 if it is the first.
        self._earlier = list[int]()

    def grow(self) -> bool:
        """Index the newest tokens. Return whether the n-gram at the text's end occurred before.

        A text that has become shorter is indexed again.
        """
        text, latest, earlier = self.text, self._latest, self._earlier
        n, end = len(text), len(earlier) + N_GRAM
        if n < end - 1 and earlier:
            latest.clear()
            earlier.clear()
            end = N_GRAM
        while end <= n:
            key = tuple(text[end - N_GRAM : end])
            earlier.append(latest.get(key, -1))
            latest[key] = end
            end += 1
        return bool(earlier) and earlier[-1] >= 0

    def find(self, n_gram: tuple[int, ...]) -> list[int]:
        """Return the positions after the latest occurrences of an n-gram, except at the end of the text."""
        self.grow()
        found, at = list[int](), self._latest.get(n_gram, -1)
        if at == len(self.text):
            at = self._earlier[-1]
        while at >= 0 and len(found) < _MOST_PLACES:
            found.append(at)
            at = self._earlier[at - N_GRAM]
        return found


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
        # These are the source and start of the latest guess, and the length that the text had then.
        self._copied: tuple[Sequence[int], int, int] | None = None

    def grow(self) -> bool:
        """Index the newest tokens. Return whether there may be a guess. In ordinary text there is mostly none."""
        is_again = self._own is not None and self._own.grow()
        return is_again or self._copied is not None or self._prediction is not None

    def leave_copy(self) -> None:
        """Expect that the text does not go on with its latest copy, until it agrees with some place again."""
        self._copied = None

    def next(self, n_tokens: int) -> Guess:
        """Return up to `n_tokens` tokens that may come next, or `NO_GUESS`."""
        found = self.several(n_tokens, 1)
        return found[0] if found else NO_GUESS

    def several(self, n_tokens: int, most: int) -> list[Guess]:
        """Return up to `most` guesses that begin differently. The first is where the most tokens before agree."""
        places = sorted(self._places(), key=lambda place: -place[0])
        guesses = dict[int, Guess]()
        for n_same, source, start in places:
            guess = self._from(source, start, n_same, n_tokens)
            if guess.token_ids and guess.token_ids[0] not in guesses:
                if not guesses and n_same:
                    self._copied = source, start, len(self._text)
                guesses[guess.token_ids[0]] = guess
                if len(guesses) == most:
                    break
        return [*guesses.values()]

    def _places(self) -> Iterator[tuple[int, Sequence[int], int]]:
        """Yield places where the text may go on: how many tokens before agree, the source, and the position there.

        The first is where the latest guess goes on. After a copy, it may be the only place.
        """
        last, n_found = tuple(self._text[-N_GRAM:]), 0
        copied = self._copy_goes_on()
        if copied is not None and (n_same := self._n_same(*copied)) >= N_GRAM:
            yield n_same, *copied
            if n_same == MOST_SAME:
                return
        if self._prediction is not None:
            for start in self._predicted(last):
                n_found += 1
                yield max(1, self._n_same(self._prediction.text, start)), self._prediction.text, start
        if self._own is not None:
            for start in self._own.find(last):
                n_found += 1
                yield self._n_same(self._text, start), self._text, start
        if not n_found and copied is not None:
            yield 0, *copied

    def _n_same(self, source: Sequence[int], start: int) -> int:
        """Return how many tokens of the text's end are those before this position, at most `MOST_SAME`."""
        text, n_same = self._text, 0
        end, most = len(text), min(MOST_SAME, start, len(text))
        while n_same < most and source[start - 1 - n_same] == text[end - 1 - n_same]:
            n_same += 1
        return n_same

    def _predicted(self, last: tuple[int, ...]) -> list[int]:
        """Return where a prediction goes on as the reply does."""
        assert self._prediction is not None
        n_said = len(self._text) - self._n_prompt
        if n_said >= N_GRAM:
            return self._prediction.find(last)
        # The reply is too short for n-grams, so assume that it begins as predicted.
        begins_so = self._text[self._n_prompt :] == list(self._prediction.text[:n_said])
        return [n_said] if begins_so else []

    def _from(self, source: Sequence[int], start: int, n_same: int, n_tokens: int) -> Guess:
        n, is_own = len(self._text), source is self._text
        found = list(source[start : start + n_tokens])
        while is_own and len(found) < n_tokens:
            # The end of the text is reached. Repeat the tokens since `start`, as if the text went on in a loop.
            found.append(found[start - n])
        if found and is_soft(max(found)):  # Replies never have a picture, so guesses end before its tokens.
            found = list(takewhile(lambda token: not is_soft(token), found))
        return Guess(found, n_same, not is_own)

    def _copy_goes_on(self) -> tuple[Sequence[int], int] | None:
        """Return where the latest guess goes on in its source, after a change of a few tokens as well.

        The newest token is looked for near the place where the copy would be; the nearest occurrence counts. Without
        one, the change is expected to have as many tokens as it had in the source.
        """
        if self._copied is None:
            return None
        source, start_then, n_then = self._copied
        n = len(self._text)
        if n - n_then > _LONGEST_CHANGE:
            self._copied = None
            return None
        place, end = start_then + n - n_then, n if source is self._text else len(source)
        if not (0 < place < end and source[place - 1] == self._text[-1]):
            newest, near = self._text[-1], (place + shift for shift in _SHIFTS)
            place = next((at for at in near if 0 < at < end and source[at - 1] == newest), place)
        return (source, place) if 0 < place < end else None
