"""Runs the tests of a file against each mutant of it, in forks of a process that has imported all but the library.

So a mutant costs what its tests cost, and no start of torch. A fork that fails, does not end in time or cannot import
the mutant has killed it.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import os
import resource
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.mutants.operators import Mutant, mutated

ROOT = Path(__file__).parent.parent.parent
_AHEAD = ("torch", "numba", "numpy", "einops", "fsspec", "pytest", "hypothesis", "hypothesis.stateful", "rich")
_QUIETLY = ("--assert=plain", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""pytest would load what it rewrites from its file, the library too where it counts as a plugin, and no mutant then."""
_POLL_SECONDS = 0.1


class _Loader(importlib.abc.Loader):
    def __init__(self, tree: ast.Module, path: str) -> None:
        self._code = compile(tree, path, "exec")

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, vars(module))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, whose code is another one."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self._name, self._path, self._tree = name, path, tree

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, _Loader(self._tree, str(self._path)), origin=str(self._path))
        spec.has_location = True
        return spec


@dataclass(frozen=True)
class Run:
    """Says how the tests ended: 0 if all have passed; and the processor's seconds that they took."""

    status: int
    seconds: float


def import_ahead() -> None:
    """Import what the tests need and what is no part of the library, before the first fork."""
    assert not any(name.partition(".")[0] == "memory" for name in sys.modules), "the library is imported already"
    for name in _AHEAD:
        __import__(name)


def run_tests(tests: Seq[str], mutant: Mutant | None, most_seconds: float) -> Run:
    """Run tests in a fork, until the first one fails, within so many seconds of the processor."""
    child = os.fork()
    if not child:
        _run_in_child(tests, mutant, most_seconds)
    n_polls = 0  # a process that was stopped for a while must not count the time
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        time.sleep(_POLL_SECONDS)
        n_polls += 1
        if n_polls * _POLL_SECONDS > 10 * most_seconds:  # it waits, and computes nothing
            os.kill(child, 9)
    _, status, used = ended
    return Run(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime)


def _run_in_child(tests: Seq[str], mutant: Mutant | None, most_seconds: float) -> None:
    status = 70
    try:
        seconds = int(most_seconds) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nowhere, descriptor)
        if mutant is not None:
            path = ROOT / mutant.path
            name = mutant.path.removesuffix(".py").replace("/", ".")
            sys.meta_path.insert(0, _Finder(name, path, mutated(path.read_text(), mutant.number)))
        import pytest

        options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0", *_QUIETLY]
        status = int(pytest.main([*options, *tests]))
    finally:
        os._exit(status)
