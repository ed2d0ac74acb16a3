"""Holds the words of a chat that shows how a template writes calls, and which texts it writes around them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridmem.chat.tools.calls import INDEX
from hybridmem.chat.tools.frames import MARK, Frame, pieces

NAME = "fetch_zq7x"
TEXT_KEY, NUMBER_KEY, LIST_KEY = "kaq7x", "kbq7x", "kcq7x"
TEXT, NUMBER, ITEM = "va zq7x", 4821, "vc zq7x"
ARGUMENTS: dict[str, Any] = {TEXT_KEY: TEXT, NUMBER_KEY: NUMBER, LIST_KEY: [ITEM]}
IDS = ("aq7xaq7xa", "bq7xbq7xb")
"""Mistral's templates want nine letters and digits."""


@dataclass(frozen=True)
class Example:
    """Holds the text that a template writes for the calls of a reply, without the text around any reply.

    Attributes:
        text: the calls and the texts around them. The calls' ids are replaced by `ID`.
        n_calls: how many calls there are. Some templates refuse more than one.
    """

    text: str
    n_calls: int

    def frame(self, spans: Sequence[tuple[int, int]]) -> Frame:
        """Return the frame around calls that are at these positions."""
        (start, end), *more = spans
        before, behind = self.text[:start], self.text[spans[-1][1] :]
        if not more:
            return Frame(opening=self._from_last_mark(before), closing=self._to_first_mark(behind), is_single=True)
        between = self.text[end : more[0][0]]
        opening = common_end(before, between)
        begin, between = before.removesuffix(opening), between.removesuffix(opening)
        closing = common_start(between, behind)
        behind = behind.removeprefix(closing)
        join = between.removeprefix(closing)
        if not begin.strip():  # What stands after the last call then belongs to the turn.
            return Frame(begin, opening, closing, join)
        return Frame(self._from_last_mark(begin), opening, closing, join, self._to_first_mark(behind))

    def _from_last_mark(self, text: str) -> str:
        """Drop earlier marks, such as those around empty thoughts."""
        marks = list(MARK.finditer(text))
        return text[marks[-1].start() :] if len(marks) > 1 and self.text.count(marks[-1][0]) == 1 else text

    def _to_first_mark(self, text: str) -> str:
        """Drop later marks, such as the end of the turn."""
        mark = MARK.search(text)
        return text if mark is not None and self.text.count(mark[0]) > self.n_calls else to_first_mark(text)


def spread_index(texts: Sequence[str]) -> str:
    """Return the one text of which all `texts` are copies, except for the numbers of the calls.

    `INDEX` replaces the numbers.
    """
    first, *others = texts
    for number in re.finditer(r"\d+", first):
        general = first[: number.start()] + INDEX + first[number.end() :]
        if others and others[0] == general.replace(INDEX, str(int(number[0]) + 1)):
            return general
    return first


def to_first_mark(text: str) -> str:
    """Return a text up to its first mark, without later ones such as the end of the turn."""
    mark = MARK.search(text)
    return text[: mark.end()] if mark else text


def common_start(text: str, other: str) -> str:
    """Return the beginning that two texts have in common, in whole pieces."""
    return text[: count_common(pieces(text), pieces(other))]


def common_end(text: str, other: str) -> str:
    """Return the end that two texts have in common, in whole pieces."""
    return text[len(text) - count_common(pieces(text)[::-1], pieces(other)[::-1]) :]


def count_common(parts: Sequence[str], others: Sequence[str]) -> int:
    """Count the characters of the leading pieces that two texts have in common."""
    n = 0
    for a, b in zip(parts, others, strict=False):
        if a != b:
            break
        n += len(a)
    return n
