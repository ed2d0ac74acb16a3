"""Says how many of endlessly many cases are tried: places of interrupts, random prompts, examples, parameters.

By default there are few, so that all tests together take six minutes on two cores. `TESTS=long` tries more; `.ci/run`
runs the files that import this module once more in this way, after the default run. `TESTS=rest` is `TESTS=long`
without those configs and subjects that the default run has tried. `CONFORMANCE=full`, which takes hours, tries these
and more.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

IS_REST = os.environ.get("TESTS") == "rest"
IS_LONG = IS_REST or os.environ.get("TESTS") == "long" or os.environ.get("CONFORMANCE") == "full"

only_in_long = pytest.mark.skipif(not IS_LONG, reason="TESTS=long runs it")
"""For tests that start processes or compile for seconds, beside others that show most of what these show."""


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
