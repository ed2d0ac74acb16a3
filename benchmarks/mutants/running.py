"""Runs tasks in forked processes, and tests in a session of pytest that has already collected them.

So a mutant takes only the time of its tests, without loading torch, importing the library or collecting tests.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
_AHEAD = ("torch", "numba", "numpy", "einops", "fsspec", "pytest", "hypothesis", "hypothesis.stateful", "rich")
OPTIONS = (
    "-q", "-s", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0", "--assert=plain",
    "-W", "ignore::pytest.PytestAssertRewriteWarning",
)  # fmt: skip
"""pytest would load what it rewrites from its file, the library too where it counts as a plugin, and no mutant then."""
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Run:
    """Holds the exit status of a task (0 if all tests passed), and the seconds of processor time that it took."""

    status: int
    seconds: float


@dataclass(frozen=True)
class Task:
    """Describes a task for a fork: its name, the processor time it may take, and `run`, which returns a status."""

    name: str
    run: Callable[[], int]
    most_seconds: float


class Collected:
    """Plugs into pytest: after the tests are collected, `then` is called instead of running the tests."""

    def __init__(self, then: Callable[[Any], None]) -> None:
        self._then = then

    def pytest_runtestloop(self, session: Any) -> bool:
        self._then(session)
        return True


def import_ahead() -> None:
    """Import the other packages that tests need, but nothing of the library, before the first fork."""
    assert not any(name == "hybridmem.memory" for name in sys.modules), "the library is imported already"
    for name in _AHEAD:
        __import__(name)


def run_items(session: Any, items: Seq[Any]) -> int:
    """Run collected tests in this order until one fails; return 1 if one has."""
    for i, item in enumerate(items):
        following = items[i + 1] if i + 1 < len(items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            return 1
    return 0


def in_forks(tasks: Iterator[Task], n_jobs: int) -> Iterator[tuple[str, Run]]:
    """Run each task in a fork, at most `n_jobs` at a time; generate each task's name and result when it ends."""
    running: dict[int, tuple[Task, int]] = {}
    while True:
        while len(running) < n_jobs and (task := next(tasks, None)) is not None:
            running[_fork(task)] = task, 0
        if not running:
            return
        for child, (task, n_polls) in [*running.items()]:
            ended, status, used = os.wait4(child, os.WNOHANG)
            if ended:
                del running[child]
                yield task.name, Run(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime)
            # Polls are counted instead of seconds, so that time in which this process was stopped does not count.
            else:
                running[child] = task, n_polls + 1
                # The task waits for something and computes nothing.
                if n_polls * _POLL_SECONDS > 20 * task.most_seconds + 60:
                    os.kill(child, 9)
        time.sleep(_POLL_SECONDS)


def _fork(task: Task) -> int:
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        seconds = int(task.most_seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        status = task.run()
    finally:
        os._exit(status)
