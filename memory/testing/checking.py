"""Checks promises one by one, makes failing histories smaller, and says what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal

from memory.testing.adapter import Adapter, Factory
from memory.testing.histories import History, describe, smaller
from memory.testing.promises import PROMISES, Draw, Promise, Setting
from memory.testing.trial import BrokenPromiseError, Oracle, Tally, Trial

_MOST_TRIES = 150
"""Histories that are tried to make a failing one smaller."""


@dataclass(frozen=True)
class Result:
    """Says what came of a promise.

    Attributes:
        verdict: "refused" if in no history the memory did what the promise is about.
        why: what is broken, and a history that shows it; or the reason for refusals.
        seed: makes the history that broke it, before it was made smaller.
    """

    promise: Promise
    verdict: Literal["passed", "failed", "refused"]
    n_histories: int
    n_operations: int
    n_compared: int
    why: str = ""
    seed: int | None = None


def load_factory(name: str) -> Factory:
    """Return the factory that "module:factory" names, also of a file in the current folder.

    Raises ValueError: there is none.
    """
    module, _, attribute = name.partition(":")
    if not {"", str(Path.cwd())} & {*sys.path}:  # pytest, unlike python -m, does not look there
        sys.path.insert(0, str(Path.cwd()))
    try:
        if not attribute:
            raise ValueError("it has no colon")
        found: Factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} names no adapter ({error}); give module:factory, such as my_tests:make") from error
    if not callable(found) or not isinstance(found(), Adapter):
        raise ValueError(f"{name!r} is no function that returns a memory.testing.Adapter; give one")
    return found


def check(
    factory: Factory,
    promises: Iterable[str] = PROMISES,
    *,
    seed: int = 0,
    n_examples: int = 20,
    setting: Setting | None = None,
) -> Iterator[Result]:
    """Yield the result of each promise, checked with `n_examples` histories of seeds from `seed` on.

    Args:
        setting: how large histories are; unless given, with the vocabulary of the factory's model.
    """
    setting = setting or Setting(factory().vocab_size)
    oracle = Oracle(factory)
    for name in promises:
        yield _check_one(factory, oracle, PROMISES[name], setting, range(seed, seed + n_examples))


def check_for(factory: Factory, seconds: float, *, seed: int = 0, n_operations: int = 40) -> Result:
    """Do anything in any order, history after history, for so many seconds or until something is broken."""
    promise, setting, oracle = PROMISES["anything, in any order"], Setting(factory().vocab_size), Oracle(factory)
    setting = Setting(setting.vocab_size, n_operations=n_operations)
    end, total = time.monotonic() + seconds, Result(promise, "refused", 0, 0, 0)
    while time.monotonic() < end and total.verdict != "failed":
        found = _check_one(
            factory, oracle, promise, setting, range(seed + total.n_histories, seed + total.n_histories + 8)
        )
        total = Result(
            promise, found.verdict, total.n_histories + found.n_histories, total.n_operations + found.n_operations,
            total.n_compared + found.n_compared, found.why, found.seed,
        )  # fmt: skip
    return total


def _check_one(factory: Factory, oracle: Oracle, promise: Promise, setting: Setting, seeds: range) -> Result:
    tally, n_done = Tally(), 0
    for n, seed in enumerate(seeds):
        history = tuple(promise.make(Draw(setting, seed)))
        before = tally.done[promise.needs]
        try:
            Trial(factory, oracle, tally).run(history)
        except BrokenPromiseError as broken:
            history, broken = _shrunk(factory, oracle, history, broken)
            why = f"{broken}\n  after, and in, the last of\n{describe(history)}"
            return Result(promise, "failed", n + 1, tally.operations, tally.compared, why, seed)
        n_done += tally.done[promise.needs] > before
    verdict: Literal["passed", "refused"] = "passed" if n_done else "refused"
    why = "" if n_done else tally.why or "it does not say, or has nothing that could fail"
    return Result(promise, verdict, len(seeds), tally.operations, tally.compared, why)


def _shrunk(
    factory: Factory, oracle: Oracle, history: History, broken: BrokenPromiseError
) -> tuple[History, BrokenPromiseError]:
    """Return a smaller history that breaks something as well, and what."""
    history, n_tries = history[: broken.at + 1], 0
    while True:
        for less in smaller(history):
            n_tries += 1
            if n_tries > _MOST_TRIES:
                return history, broken
            try:
                Trial(factory, oracle, Tally()).run(less)
            except BrokenPromiseError as found:
                if found.kind != broken.kind:
                    continue
                history, broken = less[: found.at + 1], found
                break
        else:
            return history, broken
