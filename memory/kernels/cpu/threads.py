"""Sets how many threads a kernel uses."""

from __future__ import annotations

import os
import threading

import torch
from numba import get_num_threads, set_num_threads
from numba.np.ufunc.parallel import threading_layer

from hybridmem.memory.blocks.forked_process import refuse_kernel
from hybridmem.memory.kernels.cpu.launches import note

_WORTH_A_THREAD = 1 << 15
"""How many multiplications a second thread must save. Waking it costs microseconds, far more on a busy machine."""


def _launch() -> int:
    """Start numba's threads and return their number.

    numba and torch share OpenMP, so this changes the number of torch's threads, which is then restored.
    """
    n_threads = torch.get_num_threads()
    n_most = get_num_threads()
    torch.set_num_threads(n_threads)
    return n_most


_MOST_THREADS = _launch()
MAY_OVERLAP = threading_layer() in ("omp", "tbb")
"""True if several parallel kernels may run at once. With numba's own work queue, that would end the process."""
_last = threading.local()
"""The number of threads that this thread has set last. Reading it from numba takes five microseconds."""


def use_threads(n_multiplications: int) -> int:
    """Let the next kernel of this thread use as many threads as torch, or fewer for little work. Return the number."""
    n_threads = 1
    if n_multiplications >= _WORTH_A_THREAD:
        n_threads = min(torch.get_num_threads(), _MOST_THREADS, 1 + n_multiplications // _WORTH_A_THREAD)
    _use(n_threads)
    note(_use, n_threads)
    return n_threads


def _use(n_threads: int) -> None:
    if n_threads != getattr(_last, "n_threads", None):
        _last.n_threads = None  # This comes first, because an interrupt may come before the new number is noted.
        set_num_threads(n_threads)
        _last.n_threads = n_threads


def _refuse() -> None:
    """Let `use_threads` raise in a fork, which lacks the threads. Each kernel with several threads calls it first."""
    global _use
    _use = refuse_kernel  # type: ignore[assignment]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse)
