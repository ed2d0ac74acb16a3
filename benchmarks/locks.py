"""Measures what the lock around each call on a memory costs if no other thread holds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

from benchmarks.books import make_memory
from benchmarks.harness import Report, interleave
from hybridmem.memory import Sequence
from hybridmem.memory.coordinator import Coordinator
from hybridmem.memory.sequences.locking import locked

_N_CALLS, _N_STEPS = 20_000, 100


class _Books:
    """Has the same method with a lock and without one."""

    def __init__(self) -> None:
        self.lock = RLock()

    def read(self) -> None:
        """Do nothing."""

    locked_read = locked(read)


@contextmanager
def without_locks() -> Iterator[int]:
    """Remove the locks from the coordinator's methods inside a `with` block; yields how many methods have a lock."""
    wrapped = {name: method for name, method in vars(Coordinator).items() if hasattr(method, "__wrapped__")}
    for name, method in wrapped.items():
        setattr(Coordinator, name, method.__wrapped__)
    try:
        yield len(wrapped)
    finally:
        for name, method in wrapped.items():
            setattr(Coordinator, name, method)


def locks(*, quick: bool) -> Report:
    """Measure a call with and without the lock, and decode steps without a model with and without it."""
    report, books = Report("locks"), _Books()

    def many(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(_N_CALLS):
                call()

        return run

    n_rounds = 10 if quick else 60
    calls = interleave({"plain": many(books.read), "locked": many(books.locked_read)}, n_rounds)
    plain, held = (calls[name].median_ms * 1e6 / _N_CALLS for name in ("plain", "locked"))
    report.add("a call that does nothing, ns", {"plain": plain, "locked": held, "the lock costs": held - plain})
    for n in (1, 8, 64):
        step = _step(n)

        def bare(step: Callable[[], None] = step) -> None:
            with without_locks():
                step()

        steps = interleave({"locked": step, "without": bare}, 3 * n_rounds, n_warm_up=5)
        with_us, without_us = (steps[name].median_ms * 1e3 / _N_STEPS for name in ("locked", "without"))
        cost = {"with locks": with_us, "without": without_us, "locks, %": 100 * (with_us - without_us) / with_us}
        report.add("a decode step without a model, µs", {"sequences": n, **cost})
    return report


def _step(n: int) -> Callable[[], None]:
    memory = make_memory(12)
    sequences: list[Sequence] = [memory.open() for _ in range(n)]
    memory.run(None, {sequence: [1] * 100 for sequence in sequences})
    requests = dict.fromkeys(sequences, 5)

    def decode() -> None:
        for _ in range(_N_STEPS):
            with memory.step(requests):
                pass

    return decode
