"""Finds the tests that run each mutant's changed statement, because no other test can detect the change."""

from __future__ import annotations

import ast
import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.mutants.operators import Mutant
from benchmarks.mutants.running import ROOT

Lines = dict[str, dict[str, list[int]]]
"""File -> test -> the lines of it that the test runs."""


@dataclass(frozen=True)
class Reach:
    """Holds which lines each passing test runs, and how many seconds of processor time the test takes."""

    seconds: dict[str, float]
    lines: Lines

    def tests_of(self, mutant: Mutant, source: str, most_seconds: float) -> list[str]:
        """Return tests that run a mutant's statement, and take at most `most_seconds` of processor time together.

        The fastest cases of all test functions come first, so that many functions run before any function runs a second
        case.
        """
        first, last = statement_of(source, mutant.line)
        reaching = self.lines[mutant.path]
        found = [test for test, lines in reaching.items() if any(first <= line <= last for line in lines)]
        rank: dict[str, int] = {}
        order = []
        for test in sorted(found, key=self.seconds.__getitem__):
            function = test.partition("[")[0]
            rank[function] = rank.get(function, 0) + 1
            order.append((rank[function], self.seconds[test], test))
        chosen, spent = [], 0.0
        for _, seconds, test in sorted(order):
            if not chosen or spent + seconds <= most_seconds:
                chosen.append(test)
                spent += seconds
        return chosen


def watch(session: Any, paths: Iterable[str], place: Path) -> int:
    """Run collected tests under coverage, and write the results to a file that keeps unchanged tests. Returns 0."""
    import coverage

    files = {path: str(ROOT / path) for path in paths}
    sources = {path: _digest(Path(file)) for path, file in files.items()}
    tests = {str(item.path): _digest(item.path) for item in session.items}
    known = known_of(place, sources, {item.nodeid: tests[str(item.path)] for item in session.items})
    items = [item for item in session.items if item.nodeid not in known.seconds]
    watching = coverage.Coverage(data_file=None, config_file=False, include=[*files.values()])
    watching.set_option("run:disable_warnings", ["trace-changed", "no-data-collected", "already-imported"])
    for item, following in zip(items, [*items[1:], None], strict=True):
        n_failed, begun = session.testsfailed, time.process_time()
        watching.start()  # Tracing starts again for each test, because some tests set a tracer of their own.
        watching.switch_context(item.nodeid)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        watching.stop()
        if session.testsfailed == n_failed:
            known.seconds[item.nodeid] = time.process_time() - begun
    for path, file in files.items():
        for line, names in watching.get_data().contexts_by_lineno(file).items():
            for name in names:
                if name in known.seconds:
                    known.lines[path].setdefault(name, []).append(line)
    digests = {item.nodeid: tests[str(item.path)] for item in session.items if item.nodeid in known.seconds}
    found = {"sources": sources, "tests": digests, "seconds": known.seconds, "lines": known.lines}
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(found))
    return 0


def known_of(place: Path, sources: dict[str, str], tests: dict[str, str]) -> Reach:
    """Return what an earlier run has written about these tests, unless a test or the sources have changed since.

    Args:
        sources, tests: digests of files, by path and by test name. Other files that tests import are not compared.
    """
    found = json.loads(place.read_text()) if place.exists() else {"sources": {}}
    if any(found["sources"].get(path) != digest for path, digest in sources.items()):
        return Reach({}, {path: {} for path in sources})
    same = {test for test, digest in found["tests"].items() if tests.get(test) == digest}
    lines = {path: {test: own for test, own in found["lines"][path].items() if test in same} for path in sources}
    return Reach({test: seconds for test, seconds in found["seconds"].items() if test in same}, lines)


def read_reach(place: Path) -> Reach:
    """Read the file that `watch` has written."""
    found = json.loads(place.read_text())
    return Reach(found["seconds"], found["lines"])


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def statement_of(source: str, line: int) -> tuple[int, int]:
    """Return the first and last line of the statement at a line.

    Of a compound statement, such as `if`, only the head counts; of a definition, all lines. Code outside of functions
    runs on import, so all tests that run anything in the file are candidates.
    """
    found, depth = (1, len(source.splitlines())), 0
    nodes: list[tuple[ast.AST, bool]] = [(ast.parse(source), False)]
    while nodes:
        node, is_in_function = nodes.pop()
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            defines = isinstance(node, ast.FunctionDef)
            last = body[0].lineno - 1 if body and not defines else node.end_lineno or node.lineno
            last = max(last, node.lineno)
            if node.lineno <= line <= last and (is_in_function or defines) and node.lineno >= depth:
                found, depth = (node.lineno, last), node.lineno
        inside = is_in_function or isinstance(node, ast.FunctionDef)
        nodes += [(child, inside) for child in ast.iter_child_nodes(node)]
    return found
