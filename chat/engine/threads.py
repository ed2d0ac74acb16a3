"""Chooses the number of threads for a model on the CPU, by measuring steps.

Threads wait for each other at every matrix product, by spinning. While other work runs, one of them often has no
processor, and all others wait for it: a step can take ten times as long as with one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from hybridmem.memory import HybridMemory
from hybridmem.models import LanguageModel

_GAIN = 1.5
"""Doubling the threads must make a step at least this many times faster. Measured with real requests, a smaller gain is
a loss: a server's own threads then take processors from the model's threads, and these wait for each other.
"""
_LARGE_SECONDS = 0.2
"""A step that takes longer than this many seconds with one thread gains from each thread. So all are tried at once."""
_N_SEQUENCES, _N_PROMPT, _N_STEPS = 4, 16, 5


def set_threads(
    model: LanguageModel, memory: HybridMemory, n_threads: int | None = None, *,
    clock: Callable[[], float] = time.perf_counter,
) -> int:  # fmt: skip
    """Set the number of threads of the model's steps in this process, on the CPU; return it.

    Args:
        n_threads: the number. None: measure steps of a few sequences, and take the smallest number of threads that is
            hardly slower than the fastest, at most torch's number. The measurement includes the effect of other work on
            the machine at that moment.
        clock: returns seconds. Tests replace it.
    Cost: about twenty steps. They leave nothing in the memory.
    """
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    elif memory.spec.device.type == "cpu":
        torch.set_num_threads(_find_number(model, memory, torch.get_num_threads(), clock))
    return torch.get_num_threads()


def _find_number(model: LanguageModel, memory: HybridMemory, most: int, clock: Callable[[], float]) -> int:
    n_threads = 1
    torch.set_num_threads(1)
    if most == 1:
        return 1  # There is nothing to compare.
    seconds = _step_seconds(model, memory, clock)
    if seconds > _LARGE_SECONDS:
        torch.set_num_threads(most)
        return most if _step_seconds(model, memory, clock) <= seconds else 1
    while n_threads < most:
        n_more = min(2 * n_threads, most)
        torch.set_num_threads(n_more)
        with_more = _step_seconds(model, memory, clock)
        if seconds < _GAIN * with_more:
            break
        n_threads, seconds = n_more, with_more
    return n_threads


def _step_seconds(model: LanguageModel, memory: HybridMemory, clock: Callable[[], float]) -> float:
    """Return the seconds of a step in which some sequences decode and one prompt begins. A first step warms up."""
    sequences, seconds = [memory.open() for _ in range(_N_SEQUENCES)], list[float]()
    opened = [*sequences]
    try:
        for _ in range(1 + _N_STEPS):
            opened.append(prompt := memory.open())
            started = clock()
            with memory.step({**{sequence: [0] for sequence in sequences}, prompt: [0] * _N_PROMPT}) as step:
                model(step)
            seconds.append(clock() - started)
            if seconds[-1] > _LARGE_SECONDS:
                break
    finally:
        for sequence in opened:
            memory.close(sequence)
    return statistics.median(seconds[1:] or seconds)
