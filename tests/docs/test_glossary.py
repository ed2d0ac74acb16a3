"""The glossary says where each word is in the code. These classes and functions exist."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

import pytest

from tests.docs.pages import ROOT

GLOSSARY = ROOT / "docs" / "glossary.md"


def read_rows() -> list[list[str]]:
    """Return the cells of each word's row, without the tables' headings."""
    lines = [line for line in GLOSSARY.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [line.strip("| ").split(" | ") for line in lines if not line.startswith("| word |")]


def find(name: str) -> Any:
    """Return the object of a dotted name. For a field without a default, return its type."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            found = getattr(found, part, None) or found.__annotations__[part]
        return found
    raise ModuleNotFoundError(name)


def test_every_word_has_a_row_of_its_own() -> None:
    rows = read_rows()
    words = [word for row in rows for word in row[0].split(", ")]
    assert len(words) == len(set(words)) >= 48
    assert all(len(row) == 4 and row[1].endswith(".") for row in rows), [row for row in rows if len(row) != 4]


def test_the_classes_and_functions_of_the_glossary_exist() -> None:
    named = [re.fullmatch(r"`([\w.]+)`|–", row[3]) for row in read_rows()]
    assert all(named), "one name in backticks, or a dash"
    for match in named:
        assert match is not None and (match[1] is None or find(match[1]) is not None)


@pytest.mark.parametrize("name", ["memory.Slab", "memory.blocks.slab.Slab", "memory.Sequence.marks"])
def test_names_that_do_not_exist_are_found_out(name: str) -> None:
    with pytest.raises((AttributeError, KeyError, ModuleNotFoundError)):
        find(f"hybridmem.{name}")
