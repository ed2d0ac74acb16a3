"""A kernel runs without the interpreter's lock: other threads, those of a server, go on meanwhile."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from numba import prange

from hybridmem.memory.kernels.cpu import threads
from hybridmem.memory.kernels.cpu.compiled import compiled

MOST_TURNS = 1 << 36
"""A kernel makes some billions of turns a second: where the lock is held, it gives up after a minute or so."""


def wait(flag: Any, turns: Any) -> None:
    """Count up until another thread sets the flag, or to `MOST_TURNS`. (To the compiler the arrays may overlap.)"""
    for i in prange(1):
        while flag[i] == 0 and turns[i] < MOST_TURNS:
            turns[i] += 1


@pytest.mark.parametrize("is_parallel", [False, pytest.param(True, marks=pytest.mark.skipif(
    not threads.MAY_OVERLAP, reason="numba has no OpenMP here: parallel kernels run one at a time"
))])  # fmt: skip
def test_another_thread_goes_on_while_a_kernel_runs(is_parallel: bool) -> None:
    kernel = compiled(parallel=is_parallel)(wait)
    flag, turns = np.ones(1, np.int64), np.zeros(1, np.int64)
    kernel(flag, turns)  # compiled or loaded
    flag[0] = 0
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(kernel, flag, turns)
        while not turns[0]:
            time.sleep(0.001)
        flag[0] = 1
        running.result()
    assert 0 < turns[0] < MOST_TURNS
