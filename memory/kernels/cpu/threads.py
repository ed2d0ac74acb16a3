"""How many threads a kernel uses, and which liberties the compiler may take."""

from __future__ import annotations

import threading

import torch
from numba import get_num_threads, set_num_threads

# Reassociation lets sums use vector registers; where nothing is reduced it stays off. Together with "nsz" it would let
# LLVM undo the rounding steps of `exp2_f32`. "nnan" and "ninf" stay off: NaN must come through.
REDUCING = {"reassoc", "contract"}
ELEMENTWISE = {"contract", "arcp", "nsz"}

_WORTH_A_THREAD = 1 << 15
"""Multiplications that a second thread must save: waking it costs some microseconds, far more on a busy machine."""


def _launch() -> int:
    """Launch numba's threads and say how many there are.
    They share OpenMP with torch's, whose number that changes: put it back.
    """
    n_threads = torch.get_num_threads()
    n_most = get_num_threads()
    torch.set_num_threads(n_threads)
    return n_most


_MOST_THREADS = _launch()
_last = threading.local()
"""What this thread asked numba for: asking numba itself takes five microseconds, several times a layer."""


def use_threads(n_multiplications: int) -> int:
    """Let the next kernel of this thread use as many threads as torch does, fewer for little work; returns how many."""
    n_threads = min(torch.get_num_threads(), _MOST_THREADS, 1 + n_multiplications // _WORTH_A_THREAD)
    if n_threads != getattr(_last, "n_threads", None):
        set_num_threads(n_threads)
        _last.n_threads = n_threads
    return n_threads
