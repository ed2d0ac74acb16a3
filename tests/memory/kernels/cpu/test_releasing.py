"""A kernel runs without the interpreter's lock, so other threads, such as those of a server, continue meanwhile."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numba import prange

from hybridmem.memory.kernels.cpu import threads
from hybridmem.memory.kernels.cpu.compiled import compiled
from tests.extent import only_in_long

TURNS = 1 << 29
"""About a second of work for one thread."""


def stir(number: Any, turns: int) -> None:
    """Apply Marsaglia's xorshift to a number so often. No compiler replaces it by a formula."""
    for i in prange(1):
        x = number[i]
        for _ in range(turns):
            x ^= x << np.uint64(13)
            x ^= x >> np.uint64(7)
            x ^= x << np.uint64(17)
        number[i] = x


@only_in_long
@pytest.mark.parametrize("is_parallel", [False, pytest.param(True, marks=pytest.mark.skipif(
    not threads.MAY_OVERLAP, reason="numba has no OpenMP here: parallel kernels run one at a time"
))])  # fmt: skip
def test_another_thread_goes_on_while_a_kernel_runs(is_parallel: bool) -> None:
    kernel = compiled(parallel=is_parallel)(stir)
    number = np.ones(1, np.uint64)
    kernel(number, 1)  # This call compiles the kernel, or loads it.
    waits = 0
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(kernel, number, TURNS)
        while not running.done():
            time.sleep(0.001)
            waits += 1
        running.result()
    assert waits > 10  # If a kernel held the lock, there would be one or two.
