"""Counts what a piece of Python does, for bounds that hold on any machine, however busy it is."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from hybridmem.memory import CapacityError


class Calls:
    """Counts calls: use it as `with Calls() as calls:`.

    `calls.n` is how often a function, Python's or built in, was called or left so far.
    """

    def __init__(self) -> None:
        self.n = 0

    def __enter__(self) -> Calls:
        self._before = sys.getprofile()
        sys.setprofile(self._see)
        return self

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        self.n += 1

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)


class Allocations:
    """Measures memory: use it as `with Allocations() as allocated:`.

    `allocated.peak_bytes` is the most that Python and numpy held inside of the block.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0

    def __enter__(self) -> Allocations:
        tracemalloc.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


@contextmanager
def refused_by_number(n_tokens: int, most_bytes: int) -> Iterator[pytest.ExceptionInfo[CapacityError]]:
    """Expect that so many tokens are refused before anybody looks at them.

    The refusal takes few calls, and less memory than the tokens.
    """
    match = f"{n_tokens:,} tokens for 1 sequence need .* can never hold them"
    with Allocations() as allocated, Calls() as calls, pytest.raises(CapacityError, match=match) as caught:
        yield caught
    assert calls.n < 5000 and allocated.peak_bytes < most_bytes
