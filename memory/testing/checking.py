"""Checks promises one by one, reduces failing histories, and returns the results."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Literal

from hybridmem.memory.testing.adapter import Adapter, Factory
from hybridmem.memory.testing.histories import History, describe, smaller
from hybridmem.memory.testing.promises import PROMISES, Draw, Promise, Setting
from hybridmem.memory.testing.tally import Tally
from hybridmem.memory.testing.trial import BrokenPromiseError, Oracle, Trial

_MOST_TRIES = 150
"""How many smaller histories are tried to reduce a failing one."""


@dataclass(frozen=True)
class Result:
    """Says whether a promise is kept.

    Attributes:
        verdict: "refused" if the memory refused an operation that the promise requires, or if it did not do in some
            history what the promise is about.
        why: what is broken, with a history that shows it; or the reason for refusals.
        seed: the seed of the failing history before it was reduced.
        n_effective: in how many histories the memory did what the promise is about.
        n_refused: how many operations it refused, without those that it may refuse, such as far rollbacks.
        exercised: operation or event -> how often it happened in the histories, with 0 for those that never did.
    """

    promise: Promise
    verdict: Literal["passed", "failed", "refused"]
    n_histories: int
    n_operations: int
    n_compared: int
    why: str = ""
    seed: int | None = None
    n_effective: int = 0
    n_refused: int = 0
    exercised: Mapping[str, int] = field(default_factory=dict)


def load_factory(name: str) -> Factory:
    """Return the factory that "module:factory" names. The module may be a file in the current folder.

    Raises ValueError if there is no such factory.
    """
    module, _, attribute = name.partition(":")
    if not {"", str(Path.cwd())} & {*sys.path}:  # Unlike python -m, pytest does not search the current folder.
        sys.path.insert(0, str(Path.cwd()))
    try:
        if not attribute:
            raise ValueError("it has no colon")
        found: Factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r} names no adapter ({error}); give module:factory, such as my_tests:make") from error
    if not callable(found) or not isinstance(_made(found), Adapter):
        raise ValueError(f"{name!r} is no function that returns a memory.testing.Adapter; give one")
    return found


def allowed_refusals(names: Iterable[str]) -> frozenset[str]:
    """Return the names of promises that a memory may refuse.

    Raises ValueError if a name is that of no promise.
    """
    allowed = frozenset(names)
    if unknown := sorted(allowed - PROMISES.keys()):
        raise ValueError(f"--allow-refused {unknown[0]!r} is no promise; choose from: {', '.join(PROMISES)}")
    return allowed


def is_good_enough(result: Result, allowed: frozenset[str]) -> bool:
    """True if a promise is kept, or refused where that is allowed."""
    return result.verdict == "passed" or (result.verdict == "refused" and may_refuse(result.promise, allowed))


def may_refuse(promise: Promise, allowed: frozenset[str]) -> bool:
    """True if a promise is optional, or named among those that may be refused."""
    return promise.is_optional or promise.name in allowed


def check(
    factory: Factory,
    promises: Iterable[str] | None = None,
    *,
    seed: int = 0,
    n_examples: int = 20,
    setting: Setting | None = None,
) -> Iterator[Result]:
    """Yield the result of each promise, checked with `n_examples` histories whose seeds begin at `seed`.

    Args:
        promises: their names. The default is all but the optional ones that the adapter does not claim.
        setting: how large histories are. The default has the vocabulary of the factory's model.
    """
    adapter = _made(factory)
    setting = setting or Setting(adapter.vocab_size)
    oracle = Oracle(partial(_made, factory))
    if promises is None:
        claims = adapter.agreement.reproducible
        promises = [name for name, promise in PROMISES.items() if claims or not promise.is_optional]
    for name in promises:
        yield _check_one(factory, oracle, PROMISES[name], setting, range(seed, seed + n_examples))


def check_for(factory: Factory, seconds: float, *, seed: int = 0, n_operations: int = 40) -> Result:
    """Check operations in any order, history after history, for `seconds` or until a promise is broken."""
    promise, vocab_size, oracle = (
        PROMISES["anything, in any order"],
        _made(factory).vocab_size,
        Oracle(partial(_made, factory)),
    )
    end = time.monotonic() + seconds
    seeds = itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(seed))
    return _check_one(factory, oracle, promise, Setting(vocab_size, n_operations=n_operations), seeds)


def _made(factory: Factory) -> Adapter:
    """Return a new adapter.

    Raises RuntimeError if it cannot be made, even if the factory raises an exception that would end this process
    quietly.
    """
    try:
        return factory()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise RuntimeError(f"making the memory raised {type(error).__name__}: {error}") from error


def _check_one(factory: Factory, oracle: Oracle, promise: Promise, setting: Setting, seeds: Iterable[int]) -> Result:
    tally, done = Tally(), list[bool]()

    def result(verdict: Literal["passed", "failed", "refused"], why: str = "", seed: int | None = None) -> Result:
        return Result(
            promise, verdict, len(done), tally.operations, tally.compared, why, seed, sum(done), tally.n_refused,
            tally.exercised,
        )  # fmt: skip

    for seed in seeds:
        history = tuple(promise.make(Draw(setting, seed)))
        n_before = tally.done[promise.needs]
        done.append(False)
        try:
            Trial(factory, oracle, tally, setting.window).run(history)
        except BrokenPromiseError as broken:
            history, broken = _shrunk(factory, oracle, history, broken, setting.window)
            return result("failed", f"{broken}\n  after, and in, the last of\n{describe(history)}", seed)
        done[-1] = tally.done[promise.needs] > n_before
    if tally.n_refused or not done or not all(done):
        return result("refused", tally.first_reason)
    return result("passed")


def _shrunk(
    factory: Factory, oracle: Oracle, history: History, broken: BrokenPromiseError, window_tokens: int
) -> tuple[History, BrokenPromiseError]:
    """Return a smaller history that also breaks a promise, and what it breaks."""
    history, n_tries = history[: broken.at + 1], 0
    while True:
        for less in smaller(history):
            n_tries += 1
            if n_tries > _MOST_TRIES:
                return history, broken
            try:
                Trial(factory, oracle, Tally(), window_tokens).run(less)
            except BrokenPromiseError as found:
                if found.kind != broken.kind:
                    continue
                history, broken = less[: found.at + 1], found
                break
        else:
            return history, broken
