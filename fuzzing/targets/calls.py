"""Calls a memory's public methods with values that no caller should give, in between valid calls."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from fuzzing.mutation import EDGES
from hybridmem.memory import HybridMemory, HybridMemoryError, Sequence
from tests.toy import VOCAB, Toy

_VERBS = (
    "open", "close", "fork", "checkpoint", "reorder", "rollback", "can_rollback", "resume_point", "drop", "swap_out",
    "swap_in", "to_host", "to_device", "save", "load", "step", "run", "needed_bytes", "private_bytes", "add_reclaimer",
    "remove_reclaimer", "feed", "feed", "feed",
)  # fmt: skip


class PublicCalls:
    """Runs short random histories of calls on a memory with every kind of layer. An input is a history's seed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._toy = folder, Toy(window=9)

    def draw(self, random: Random) -> bytes:
        return str(random.getrandbits(64)).encode()

    def read(self, data: bytes) -> None:
        random = Random(int(data))
        memory = HybridMemory(
            self._toy.memory_spec, "256KiB", rollback_window=5, page_tokens=4, poison=True, swap_dir=self._folder
        )
        stranger = HybridMemory(self._toy.memory_spec, "64KiB").open()
        history = _History(memory, self._toy, [memory.open(), stranger], self._folder, random)
        for _ in range(random.randrange(3, 25)):
            history.call()
        memory.check()
        memory.close_all()


class _History:
    def __init__(self, memory: HybridMemory, toy: Toy, handles: list[Sequence], folder: Path, random: Random) -> None:
        self._memory, self._toy, self._handles, self._random = memory, toy, handles, random
        self._path = folder / "calls.safetensors"

    def call(self) -> None:
        """Call one method. It may raise an error of the library, but the books must be consistent afterwards."""
        verb, random = self._random.choice(_VERBS), self._random
        try:
            if verb == "feed":
                live = [handle for handle in self._handles if not handle.closed]
                tokens = [random.randrange(VOCAB) for _ in range(random.randrange(1, 9))]
                with self._memory.step({random.choice(live or self._handles): tokens}) as step:
                    self._toy(step)
                return
            arguments = [self._value(verb) for _ in range(random.randrange(4))]
            options = {"to": arguments.pop()} if verb == "rollback" and len(arguments) == 2 else {}
            result = getattr(self._memory, verb)(*arguments, **options)
            if isinstance(result, Sequence):
                self._handles.append(result)
        except HybridMemoryError:
            pass
        except TypeError as error:
            # Python and this library use these words for too many or too few arguments.
            if not any(said in str(error) for said in ("positional argument", "() does not take", "() needs")):
                raise
        if random.random() < 0.3:
            self._memory.check()

    def _value(self, verb: str) -> Any:
        """Draw a value: mostly a handle or a small number, and sometimes any other object."""
        random = self._random
        kind = random.random()
        handle = random.choice(self._handles)
        if kind < 0.45:
            return handle
        if kind < 0.6:
            return random.randrange(-2, 40)
        if kind < 0.7:
            return self._path if verb in ("save", "load") else {handle: random.choice(self._handles)}
        if kind < 0.8:
            tokens: Any = random.choice(([1, 2], [VOCAB], [-1], [1.5], [], "ab", np.arange(3), torch.arange(2), [None]))
            return {handle: tokens}
        value = random.choice(EDGES)
        return self._path if isinstance(value, str) and verb in ("save", "load") else value
