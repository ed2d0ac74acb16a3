"""Uses a memory while another thread raises exceptions in this one, and compares it with a memory without exceptions.

`python -m tests.failure.thrown SECONDS` exits with 1 if a sequence differs from what it reports.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from random import Random

import torch

from hybridmem.memory import HybridMemory, Sequence
from tests.interrupts import TimedOutError
from tests.toy import VOCAB, Toy


class Play:
    """Steps, checkpoints and rollbacks of one sequence, until the time is over."""

    def __init__(self, seconds: float) -> None:
        self.toy = Toy()
        self.memory = HybridMemory(self.toy.memory_spec, "1MiB", rollback_window=4, poison=True)
        self.live = self.memory.open()
        self.n_rounds = self.n_begun = 0
        self._random, self._until = Random(0), time.monotonic() + seconds

    def feed(self, memory: HybridMemory, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
        with memory.step({sequence: tokens}) as step:
            return self.toy(step)

    def go_on(self) -> None:
        """Play until the time is over, or an exception comes."""
        self.n_begun += 1
        while time.monotonic() < self._until or self.n_begun < 30:
            live, draw = self.live, self._random.randrange
            self.feed(self.memory, live, [draw(VOCAB) for _ in range(draw(1, 4))])
            mark = self.memory.checkpoint(live)
            self.memory.rollback(live, to=max(live.horizon, live.length - 2))
            self.memory.rollback(live, to=mark)
            if live.length > 60:
                self.memory.rollback(live, to=0)
            for sequence in self.memory.sequences:
                if sequence is not live:
                    self.memory.close(sequence)
            self.n_rounds += 1

    def go_on_whatever_comes(self) -> None:
        """Play until the time is over."""
        while True:
            try:
                self.go_on()
                return
            except TimedOutError:
                continue

    def verify(self) -> None:
        """Raise unless books and outputs are those of the tokens that each sequence reports."""
        self.memory.check()
        other = HybridMemory(self.toy.memory_spec, "1MiB", rollback_window=4)
        same = other.open()
        other.run(self.toy, {same: [*self.live.tokens, 1, 2]}, outputs="all")
        expected = self.feed(other, same, [3])
        self.feed(self.memory, self.live, [1, 2])
        found = self.feed(self.memory, self.live, [3])
        assert torch.allclose(found, expected, atol=1e-4 * float(expected.std())), "outputs differ"


def main(seconds: float) -> None:
    play, state, thread = Play(seconds), {"throws": True}, threading.get_ident()

    def throw() -> None:
        random = Random(1)
        while play.n_begun == 0:  # Nobody expects an exception while this thread is being started.
            time.sleep(0.001)
        while state["throws"]:
            time.sleep(random.expovariate(500))
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimedOutError))

    thrower = threading.Thread(target=throw, daemon=True)
    thrower.start()
    # This goes on in a loop, because an exception may come between the blocks that expect it.
    while thrower.is_alive():
        try:
            play.go_on_whatever_comes()
            state["throws"] = False
            time.sleep(0.01)
        except TimedOutError:
            continue
    play.verify()
    sys.stdout.write(f"{play.n_begun - 1} exceptions, {play.n_rounds} rounds\n")


if __name__ == "__main__":
    main(float(sys.argv[1]))
