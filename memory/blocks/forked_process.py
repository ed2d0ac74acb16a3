"""Finds out whether a process made by `fork` can compute: it lacks the threads of OpenMP and CUDA.

In such a process, OpenMP would wait for its threads for ever, or end the process. If the parent had computed nothing
before the fork, nothing is missing, and the child computes like any process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from functools import cache
from pathlib import Path

import torch

from hybridmem.memory.errors import SpecError

_TRIAL_SECONDS = 10.0
"""How many seconds a product may take. It takes a millisecond unless it waits for threads that do not exist."""

_FORKED = (
    "this process was made by os.fork (multiprocessing calls it 'fork') after its parent had {done}; threads do not "
    "survive that; start processes by 'spawn' (multiprocessing.get_context('spawn')), or fork before anything is "
    "computed or loaded"
)

_is_forked = False
_missing: str | None = None
"""What the parent process had started and this fork cannot use, as text. None if the fork can compute."""

_for_child: str | None = None
"""The value of `_missing` for a child that is being made now."""

_has_cuda = _for_child_has_cuda = False


def check_process(device: torch.device) -> None:
    """Raise SpecError if this process is a fork that cannot compute on a device. A dry run computes nothing."""
    if not _is_forked or device.type == "meta":
        return
    if device.type == "cuda" and _has_cuda:
        raise SpecError(_FORKED.format(done="started CUDA"))
    if _missing is not None:
        raise SpecError(_FORKED.format(done=_missing))
    if not _torch_works():
        raise SpecError(_FORKED.format(done="started torch's threads"))


def refuse_kernel(*_: object) -> None:
    """Raise SpecError.

    In a fork of a process that has started threads of kernels, this function replaces the first function that kernels
    call.
    """
    raise SpecError(_FORKED.format(done=_missing or "run kernels"))


@cache
def _torch_works() -> bool:
    """Find out by a trial, in a fork of this fork, whether an operation with several threads works.

    There is no other way to find out whether the parent has run such an operation. If this process has threads that are
    not Python's, OpenMP works here already, but its threads would be missing in the trial. On systems other than Linux,
    OpenMP starts new threads in a fork.
    """
    tasks = Path("/proc/self/task")
    if not tasks.exists() or len(list(tasks.iterdir())) > threading.active_count():
        return True
    with warnings.catch_warnings():
        # Python warns of a fork in a process with threads. Here the child runs only torch.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        try:
            torch.set_num_threads(max(2, torch.get_num_threads()))
            torch.ones(1 << 20).exp_()
        finally:
            os._exit(0)
    end = time.monotonic() + _TRIAL_SECONDS
    try:
        while not os.waitpid(child, os.WNOHANG)[0]:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return False
            time.sleep(0.001)
    except ChildProcessError:  # The program has told the system to collect its children, so their exit codes are lost.
        pass
    return True


def _look() -> None:
    """Remember what a child process that is being made will lack."""
    global _for_child, _for_child_has_cuda
    _for_child, _for_child_has_cuda = _missing, _has_cuda or torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if (numba := sys.modules.get("numba")) is not None:
        try:
            numba.threading_layer()
        except (AttributeError, ValueError):  # Kernels have not started their threads, or numba is just being imported.
            return
        _for_child = "run kernels"


def _begin_child() -> None:
    global _is_forked, _missing, _has_cuda
    _is_forked, _missing, _has_cuda = True, _for_child, _for_child_has_cuda
    _torch_works.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_look, after_in_child=_begin_child)
