"""Says how many of endlessly many cases are tried: places of interrupts, random prompts, examples, parameters.

By default there are few, so that all tests together take six minutes on two cores. `TESTS=long` tries more, and so does
`TESTS=rest`, which leaves out what the default run has tried; `.ci/run` runs it after the default run.
`CONFORMANCE=full` and `MUTATIONS=full`, which take hours, try these and more.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

IS_REST = os.environ.get("TESTS") == "rest"
_ASKED_FOR = {os.environ.get("TESTS"), os.environ.get("CONFORMANCE"), os.environ.get("MUTATIONS")}
IS_LONG = bool(_ASKED_FOR & {"rest", "long", "full"})

only_in_long = pytest.mark.skipif(not IS_LONG, reason="TESTS=long runs it")
"""For tests that start processes or compile for seconds, beside others that show most of what these show."""

few_cases = pytest.mark.few_cases
"""For tests with many cases that take long: the default run tries two of them, other ones in each test."""
N_FEW = 2
_LONG_FORMS = re.compile(
    r"\b(pick|one_in|named|only_in_long|IS_LONG)\b|tests\.(interrupts|failure\.survive)|hypothesis"
)
"""What files import that try more in the long form: other values, places, prompts or examples."""


def pick(by_default: int, in_long_form: int) -> int:
    return in_long_form if IS_LONG else by_default


def one_in(n: int, values: Iterable[Any]) -> list[Any]:
    """Take all values in the long form, and by default every n-th of them, beginning with the first."""
    return list(values)[:: pick(n, 1)]


def named(by_default: Iterable[str], in_long_form: Iterable[str]) -> list[str]:
    """Take the first names by default, and the second in the long form, or the rest of them if `TESTS=rest`."""
    if not IS_LONG:
        return list(by_default)
    tried = set(by_default) if IS_REST else set[str]()
    return [name for name in in_long_form if name not in tried]


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Return the tests that this run leaves to the other one: the default run to `TESTS=rest`, or the reverse.

    The few cases of a test are those whose names have the smallest checksums. They are the same in every run, and other
    ones for a test of another name. Files with a long form are repeated whole.
    """
    if IS_LONG and not IS_REST:
        return set()
    by_test = defaultdict[tuple[Path, str], list[pytest.Item]](list)
    for item in items:
        by_test[item.path, item.originalname].append(item)  # type: ignore[attr-defined]
    out = set[pytest.Item]()
    for (path, _), cases in by_test.items():
        few = cases
        if cases[0].get_closest_marker("few_cases"):
            few = sorted(cases, key=lambda case: crc32(case.name.encode()))[:N_FEW]
        if not IS_REST:
            out |= set(cases) - set(few)
        elif not _has_long_form(path):
            out |= set(few)
    return out


@cache
def _has_long_form(path: Path) -> bool:
    """Return whether the file tries more in the long form, by itself or by the `conftest.py` of its folder."""
    files = [path, *(file for file in [path.with_name("conftest.py")] if file.exists())]
    return any(_LONG_FORMS.search(file.read_text()) for file in files)
