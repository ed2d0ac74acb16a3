"""Runs targets in processes that may die: a crash, a hang, too much memory or an odd error is a finding.

A worker counts its inputs in shared memory. If it dies or stops counting, the count says which input was the cause, the
input is drawn again by its number, and a new worker continues after it.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from random import Random
from typing import Any

from fuzzing.targets import Target, make_target
from hybridmem.chat.server.errors import ApiError
from hybridmem.memory import HybridMemoryError

MOST_SECONDS = 20.0
"""In which an input must have been read."""
_POLL_SECONDS = 0.2

MOST_MEMORY_BYTES = 1 << 30
"""Address space that reading may take beside what a worker has when it begins."""

_ALLOWED = (HybridMemoryError, ApiError)
_FORBIDDEN = (
    "os.system",
    "subprocess.Popen",
    "os.exec",
    "os.posix_spawn",
    "socket.connect",
    "os.fork",
    "ctypes.dlopen",
)
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


@dataclass(frozen=True)
class Finding:
    """Describes an input that a reader handled badly.

    Attributes:
        place: where in the code it happened. Findings with the same place probably have the same cause.
    """

    target: str
    seed: int
    number: int
    place: str
    text: str

    @property
    def data(self) -> bytes:
        """Draw the input again."""
        with tempfile.TemporaryDirectory() as folder:
            return draw(make_target(self.target, Path(folder)), self.target, self.seed, self.number)


def draw(target: Target, name: str, seed: int, number: int) -> bytes:
    """Return an input. It depends on target, seed and number alone."""
    return target.draw(Random(f"{name} {seed} {number}"))


def judge(target: Target, data: bytes) -> tuple[str, str] | None:
    """Read an input; return None if it was read or properly refused, else the place and the text of the exception."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.read(data)
    except _ALLOWED as error:
        if type(error).__name__ == "IntegrityError":
            return _describe(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A panic of Rust code is not a subclass of Exception.
        return _describe(error)
    return None


def _describe(error: BaseException) -> tuple[str, str]:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or frames
    place = f"{type(error).__name__} at {Path(own[-1].filename).name}:{own[-1].lineno}"
    return place, "".join(traceback.format_exception(error))[-4000:]


def run(name: str, seed: int, n_inputs: int) -> list[Finding]:
    """Feed inputs 0 to n_inputs - 1 to a target; return one finding for each place."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, Finding] = {}
    at = 0
    while at < n_inputs:
        results, done = context.SimpleQueue(), context.Value("q", -1)
        worker = context.Process(target=_work, args=(name, seed, at, n_inputs, done, results), daemon=True)
        worker.start()
        for place, number, text in _follow(worker, done, n_inputs, results):
            found.setdefault(place, Finding(name, seed, number, place, text))
        if done.value < 0:
            raise RuntimeError(f"the target {name} cannot be made: {worker.exitcode=}")
        at = done.value + 1
    return list(found.values())


def _follow(worker: Any, done: Synchronized[int], n_inputs: int, results: Any) -> Iterator[tuple[str, int, str]]:
    """Generate a worker's findings. If the worker dies, generate how, for the input whose number is in `done`.

    The time limit counts only time in which this process ran too, so that suspending the system is no hang.
    """
    seen, waited_seconds = -1, 0.0
    is_hanging = False
    while worker.is_alive() or not results.empty():
        while not results.empty():
            yield results.get()
        if done.value != seen:
            seen, waited_seconds = done.value, 0.0
        # Before the first input and after the last one, a worker imports, compiles and cleans up.
        patience = MOST_SECONDS if 0 <= seen < n_inputs else 120.0
        if waited_seconds > patience:
            is_hanging = True
            worker.kill()
        worker.join(_POLL_SECONDS)
        waited_seconds += _POLL_SECONDS
    if is_hanging:
        yield f"hang at input {done.value}", done.value, f"no end within {MOST_SECONDS} s"
    elif worker.exitcode:
        yield f"exit code {worker.exitcode}", done.value, f"the process ended with {worker.exitcode}"


def _work(name: str, seed: int, first: int, n_inputs: int, done: Synchronized[int], results: Any) -> None:
    """Read inputs in a process of its own."""
    sys.stdout = sys.stderr = Path(os.devnull).open("w")
    with tempfile.TemporaryDirectory() as folder:
        target = make_target(name, Path(folder))
        # Imports and compilation on first use take memory, so they happen before the limit of memory is set.
        for number in range(-20, 0):
            judge(target, draw(target, name, seed, number))
        # numba loads libraries on first use, which no input has caused. They are loaded here, before the watch begins.
        import_module("hybridmem.memory.kernels.cpu.threads")
        _limit_memory()
        _watch(folder, results, done)
        for number in range(first, n_inputs):
            done.value = number
            problem = judge(target, draw(target, name, seed, number))
            if problem is not None:
                results.put((problem[0], number, problem[1]))
        done.value = n_inputs


def _limit_memory() -> None:
    n_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = n_pages * resource.getpagesize() + MOST_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _watch(folder: str, results: Any, done: Synchronized[int]) -> None:
    """Report if reading an input runs programs, opens connections, or writes outside of the folder."""

    def hear(event: str, args: tuple[Any, ...]) -> None:
        # This program may run, because it compiles the grammars of clients.
        if event in _FORBIDDEN and "grammar_worker.py" not in repr(args):
            results.put((f"{event} {args[:1]!r:.80}", done.value, repr(args)[:500]))
        elif event == "open" and isinstance(args[2], int) and args[2] & _WRITES and isinstance(args[0], str):
            path = Path(args[0]).resolve()
            if not path.is_relative_to(Path(folder).resolve()) and not path.is_relative_to("/dev"):
                results.put((f"writes {path}", done.value, repr(args)[:500]))

    sys.addaudithook(hear)
