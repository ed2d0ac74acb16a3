"""Others use the memory of a simulated engine, and take what is free of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

from torch import Tensor

from hybridmem.memory import CapacityError, HybridMemory, Sequence, Step


class Strangers:
    """Opens sequences of up to `most_tokens` tokens beside an engine's, and closes them again."""

    def __init__(
        self, memory: HybridMemory, model: Callable[[Step], Tensor], random: Random, most_tokens: int,
        events: Counter[str],
    ) -> None:  # fmt: skip
        self._memory, self._model, self._random, self._most_tokens = memory, model, random, most_tokens
        self._events, self._sequences = events, list[Sequence]()

    def take_room(self) -> None:
        sequence = self._memory.open()
        tokens = [1] * self._random.randrange(1, self._most_tokens)
        try:
            self._memory.run(self._model, {sequence: tokens}, max_tokens=32)
            self._sequences.append(sequence)
            self._events["room taken"] += 1
        except CapacityError:
            self._memory.close(sequence)

    def give_room(self) -> None:
        while self._sequences:
            self._memory.close(self._sequences.pop())
