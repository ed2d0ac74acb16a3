"""Which cached checkpoint is worth least, found without looking into each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from memory.interface import Sequence


class Ranking:
    """Checkpoints by what they are worth: tokens that they save, by the byte that closing them frees, less the longer they were not used.

    What a checkpoint shares changes whenever anybody else moves on, so that its private bytes must be asked for. But they are never more
    than all that it holds, which is known for good: a bound on its worth, and only those that it does not rule out are asked.
    """

    def __init__(self) -> None:
        self._marks: list[Sequence | None] = []  # in the order in which they came, with gaps
        self._places: dict[Sequence, int] = {}
        self._saved = np.zeros(64)  # infinite in a gap
        self._held_bytes = np.ones(64, np.int64)
        self._used_at = np.zeros(64, np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def add(self, mark: Sequence, saved: int, held_bytes: int) -> None:
        """A checkpoint that saves so many tokens, and refers to so many bytes."""
        if len(self._marks) == len(self._saved):
            self._tidy()
        place = self._places[mark] = len(self._marks)
        self._marks.append(mark)
        self._saved[place], self._held_bytes[place] = saved, max(held_bytes, 1)

    def _tidy(self) -> None:
        """Close the gaps, and leave room for as many again."""
        kept = np.array(list(self._places.values()), np.int64)
        self._marks = list(self._places)
        self._places = {mark: place for place, mark in enumerate(self._places)}
        self._saved, self._held_bytes, self._used_at = (
            np.concatenate([column[kept], np.ones(max(64, len(kept)), column.dtype)])
            for column in (self._saved, self._held_bytes, self._used_at)
        )

    def remove(self, mark: Sequence) -> None:
        place = self._places.pop(mark)
        self._marks[place], self._saved[place] = None, np.inf

    def use(self, mark: Sequence, clock: int) -> None:
        self._used_at[self._places[mark]] = clock

    def saves(self, mark: Sequence, saved: int) -> None:
        """From now on it saves so many tokens."""
        self._saved[self._places[mark]] = saved

    def ascending(self, clock: int, private_bytes: Callable[[Sequence], int]) -> Iterator[tuple[Sequence, int]]:
        """Those of least worth first, the older ones of equals, each with its private bytes. Nothing may change meanwhile."""
        n = len(self._marks)
        ages = 1 + clock - self._used_at[:n]
        least = self._saved[:n] / self._held_bytes[:n] / ages
        private: dict[int, int] = {}
        while n:
            place = int(least.argmin())
            mark = self._marks[place]
            if mark is None or least[place] == np.inf:
                return
            if place not in private:
                private[place] = private_bytes(mark)
                least[place] = self._saved[place] / max(private[place], 1) / ages[place]
            else:
                least[place] = np.inf
                yield mark, private[place]
