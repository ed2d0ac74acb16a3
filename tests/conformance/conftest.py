"""A part of every product of a test's parameters with the subjects, unless CONFORMANCE=full."""

from __future__ import annotations

from math import ceil
from pathlib import Path

import pytest

from tests.subjects import IS_FULL, SUBJECTS

_MOST = 3
"""Combinations of a test's own parameters that a subject meets."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what `is_chosen` does not choose."""
    if IS_FULL:
        return
    tests = list(dict.fromkeys(item.function for item in items if is_ours(item)))  # type: ignore[attr-defined]
    dropped = {item for item in items if is_ours(item) and not is_chosen(item, tests.index(item.function))}  # type: ignore[attr-defined]
    config.hook.pytest_deselected(items=list(dropped))
    items[:] = [item for item in items if item not in dropped]


def is_ours(item: pytest.Item) -> bool:
    return item.path.parent == Path(__file__).parent and "subject" in getattr(item, "fixturenames", ())


def is_chosen(item: pytest.Item, n_test: int) -> bool:
    """Every third or so, starting elsewhere for each test and each subject: so a value meets every test, and every subject somewhere."""
    lists = [(name, list(values)) for name, values in (mark.args for mark in item.iter_markers("parametrize"))]
    nth, n = 0, 1
    for name, values in lists:
        nth += n * values.index(item.callspec.params[name])  # type: ignore[attr-defined]
        n *= len(values)
    return (nth + n_test + SUBJECTS.index(item.callspec.params["subject"])) % ceil(n / _MOST) == 0  # type: ignore[attr-defined]
