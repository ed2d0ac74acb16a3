"""Each mutant is a program that differs in one place. Code without behaviour has no mutants."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mutants import patching
from benchmarks.mutants.operators import Mutant, mutants_of, mutated
from benchmarks.mutants.reaching import Reach, known_of, statement_of
from benchmarks.mutants.running import Task, in_forks

SOURCE = '''
"""A text with 7 and not."""
from __future__ import annotations
LIMIT: int | None = 3

def choose(items: list[int | str], n: int) -> int:
    """Return 5 or more."""
    if not items or n < 2:
        raise ValueError(f"{n + 1} is none, at least 2")
    total = 0
    for item in items:
        total += item * 2
        items[0] = total
        items.append(4)
    return total

def __repr__(self):
    return 1 + 2
'''


def test_one_change_at_a_time() -> None:
    mutants = mutants_of("a.py", SOURCE)
    texts = [ast.unparse(mutated(SOURCE, mutant.number)) for mutant in mutants]
    assert len({*texts, ast.unparse(ast.parse(SOURCE))}) == len(mutants) + 1
    for text in texts:
        compile(text, "a.py", "exec")
        assert ("'A text with 7 and not.'" in text.replace('"""', "'") and "raise ValueError" in text) or "pass" in text


def test_what_is_changed() -> None:
    found = {mutant.what for mutant in mutants_of("a.py", SOURCE)}
    assert found >= {
        "3 becomes 4", "n < 2", "not items: without not", "not items or n < 2", "not (not items or n < 2)",
        "2 becomes 3", "item * 2", "total += item * 2", "deleted: total += item * 2", "deleted: items[0] = total",
        "deleted: items.append(4)", "0 becomes 1", "4 becomes 5",
    }  # fmt: skip
    assert not any("5 becomes" in what or "1 + 2" in what or what == "1 becomes 2" for what in found)


LIVE = """
LIMIT = 3

class Counter:
    step = 1

    def __init__(self, start=2):
        self.at = start

    @property
    def next(self):
        return self.at + self.step

def above(n):
    def test(x):
        return x > n
    return test

is_high = above(LIMIT)

def summary():
    counter = Counter()
    return counter.next, [is_high(x) for x in (3, 4, 5)], [above(1)(x) for x in (1, 2)], LIMIT
"""


def outcome(module: dict[str, Any]) -> Any:
    try:
        return module["summary"]()
    except Exception as error:
        return type(error)


def test_a_mutant_that_is_put_in_place_does_what_one_does_that_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds for methods, properties and functions within functions, even those that were made before.

    Mutants of defaults are refused.
    """
    monkeypatch.setattr(patching, "ROOT", tmp_path)
    path = tmp_path / "sample.py"
    path.write_text(LIVE)
    placed = list[str]()
    for mutant in mutants_of("sample.py", LIVE):
        module, imported = dict[str, Any](), dict[str, Any]()
        exec(compile(LIVE, str(path), "exec"), module)
        exec(compile(mutated(LIVE, mutant.number), "mutant", "exec"), imported)
        unchanged = outcome(module)
        if patching.replace(mutant):
            placed.append(mutant.what)
            assert outcome(module) == outcome(imported), mutant
        else:
            assert outcome(module) == unchanged, mutant
    assert {"self.at + self.step", "x > n", "1 becomes 2", "deleted: self.at = start"} - {*placed} == set()
    assert "2 becomes 3" not in placed[:2]  # A default is evaluated on import.


def test_statements_are_found_by_a_line_of_them() -> None:
    source = "A = 1\n\ndef f(x, y=2):\n    if x > (\n        3\n    ):\n        return x\n    return y\n"
    found = [statement_of(source, line) for line in range(1, 9)]
    assert found == [(1, 8), (1, 8), (3, 8), (4, 6), (4, 6), (4, 6), (7, 7), (8, 8)]


def test_each_function_looks_at_a_mutant_before_one_looks_twice() -> None:
    seconds = {"a[1]": 1.0, "a[2]": 2.0, "b": 3.0, "c": 50.0, "d": 0.1}
    reach = Reach(seconds, {"m.py": {"a[1]": [2], "a[2]": [2], "b": [2, 3], "c": [2], "d": [3]}})
    mutant = Mutant("m.py", 0, 2, "x + 1")
    source = "def f(x):\n    return x + 1\n"
    assert reach.tests_of(mutant, source, 5.0) == ["a[1]", "b"]
    assert reach.tests_of(mutant, source, 7.0) == ["a[1]", "b", "a[2]"]
    assert reach.tests_of(mutant, source, 0.5) == ["a[1]"]


def test_what_tests_run_is_known_until_they_or_the_sources_change(tmp_path: Path) -> None:
    place, sources = tmp_path / "tests_that_run.json", {"m.py": "one", "n.py": "two"}
    tests = {"a[1]": "first", "a[2]": "first", "b": "second"}
    nothing = Reach({}, {"m.py": {}, "n.py": {}})
    assert known_of(place, sources, tests) == nothing
    seconds, lines = {"a[1]": 1.0, "b": 2.0}, {"m.py": {"a[1]": [2], "b": [3]}, "n.py": {"b": [1]}}
    place.write_text(json.dumps({"sources": sources, "tests": tests, "seconds": seconds, "lines": lines}))
    assert known_of(place, sources, tests) == Reach(seconds, lines)
    assert known_of(place, {"m.py": "one"}, tests) == Reach(seconds, {"m.py": lines["m.py"]})
    changed = tests | {"b": "third"}
    assert known_of(place, sources, changed) == Reach({"a[1]": 1.0}, {"m.py": {"a[1]": [2]}, "n.py": {}})
    assert known_of(place, sources | {"n.py": "three"}, tests) == nothing


def test_forks_say_how_they_ended() -> None:
    tasks = [Task("good", lambda: 0, 5), Task("bad", lambda: 1, 5), Task("raises", lambda: 1 // 0, 5)]
    assert {name: run.status for name, run in in_forks(iter(tasks), 2)} == {"good": 0, "bad": 1, "raises": 70}
