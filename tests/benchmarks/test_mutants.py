"""Each mutant is a program that differs in one place, and what says nothing about behaviour has none."""

from __future__ import annotations

import ast

from benchmarks.mutants.operators import mutants_of, mutated

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
