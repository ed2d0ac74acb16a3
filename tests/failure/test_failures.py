"""A failure in the middle of a call changes nothing, loses nothing, and is not noticed by others.

By default the tests try some points of each call. `FAILURES=all` takes all of them, as `python -m benchmarks failures`
does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extent import IS_LONG, few_cases, pick
from tests.failure.killed import NEW, OLD, make_memory
from tests.failure.points import ROOT
from tests.failure.scenes import SET_UPS
from tests.failure.survive import EVERYTHING, interrupt, survey
from tests.interrupts import TRIES_ALL, by_handlers

IS_ALL = os.environ.get("FAILURES") == "all"
in_long_forms = pytest.mark.skipif(not (IS_LONG or IS_ALL or TRIES_ALL), reason="TESTS=long runs it")
SAMPLE = [
    ("attention", "step, prompt", 17), ("attention", "run", 23), ("attention", "save", 5),
    ("deferred delta rule", "step, decode", 37), ("swapped to files", "swap_out", 9), ("attention", "load a family", 9),
    ("H2O", "step, accept", 43), ("full budget", "step, prompt", 71), ("engine, full budget", "engine step, ends", 47),
    ("chat", "chat save", 31), ("4 bits", "step, reclaim", 65),
]  # fmt: skip
INTERRUPTED = [
    ("hybrid", "step, decode"), ("hybrid", "step, prompt"), ("deferred delta rule", "step, accept"), ("H2O", "run"),
    ("4 bits", "rollback"), ("hybrid, window", "fork"), ("hybrid", "reorder"), ("hybrid", "swap_out"),
    ("swapped to files", "swap_in"), ("hybrid, replay", "save"), ("full budget", "step, prompt"),
]  # fmt: skip
ALL_INTERRUPTS = [(name, call) for name, set_up in SET_UPS.items() for call in set_up.calls]
ALL = [(name, call, 1) for name, set_up in EVERYTHING.items() for call in set_up.calls]


@few_cases
@pytest.mark.parametrize(("set_up", "call", "every"), ALL if IS_ALL else SAMPLE)
def test_a_call_happens_whole_or_not_at_all(set_up: str, call: str, every: int) -> None:
    found = survey([set_up], [call], every=every)
    assert found.faults == []
    assert IS_ALL or found.survived == sum(found.points.values()) > 0


@few_cases
@pytest.mark.parametrize(("where", "number"), by_handlers(ALL_INTERRUPTS if TRIES_ALL else INTERRUPTED))
def test_an_exception_at_any_bytecode_leaves_all_or_nothing(where: tuple[str, str], number: int) -> None:
    """The handlers of Ctrl-C and of a timer raise the exceptions. Others continue as if nothing had happened."""
    set_up, call = where
    assert interrupt(EVERYTHING[set_up], call, number, n_places=6) > 3


@in_long_forms
def test_exceptions_of_another_thread_leave_all_or_nothing() -> None:
    """`PyThreadState_SetAsyncExc` raises them in a process of its own. They may come anywhere."""
    call = [sys.executable, "-m", "tests.failure.thrown", "60" if TRIES_ALL else "1"]
    subprocess.run(call, check=True, cwd=ROOT)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_that_is_killed_at_any_file_call_leaves_the_old_file_or_the_new(tmp_path: Path) -> None:
    """Nothing else is left once another process has used the folders."""
    call = [sys.executable, "-m", "tests.failure.killed", str(tmp_path), "1" if IS_ALL else str(pick(21, 7))]
    subprocess.run(call, check=True, cwd=ROOT, env=os.environ | {"HYBRID_MEMORY_KERNELS": "reference"})
    found = []
    for folder in sorted(tmp_path.iterdir(), key=lambda folder: int(folder.name)):
        with make_memory(folder) as memory:
            sequence = memory.load(folder / "saved")
            found.append(sequence.tokens.tolist())
            memory.save(sequence, folder / "saved")
            memory.swap_out(sequence)
            memory.swap_in(sequence)
        assert sorted(path.name for path in folder.iterdir()) == ["saved", "swap"]
        assert list((folder / "swap").iterdir()) == []
    n_old = found.count(OLD)
    assert 0 < n_old < len(found) and found == [OLD] * n_old + [NEW] * (len(found) - n_old)


@in_long_forms
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_that_is_killed_while_it_keeps_a_kernel_leaves_none_or_a_whole_one(tmp_path: Path) -> None:
    """The next process compiles it, keeps it, and removes what was left half-written."""
    call = [sys.executable, "-m", "tests.failure.killed_cache", str(tmp_path), "1" if IS_ALL else "12"]
    subprocess.run(call, check=True, cwd=ROOT)
    ends = [tuple(map(int, line.split())) for line in (tmp_path / "ends").read_text().split("\n")]
    killed, was_kept, *others = zip(*ends, strict=True)
    assert killed[:-1] == (-signal.SIGKILL,) * (len(ends) - 1) and killed[-1] == 0
    assert sorted(was_kept) == list(was_kept) and 0 < sum(was_kept) < len(ends)
    assert {*zip(*others, strict=True)} == {(0, 0, 1)}, "compiled again, read, one file"
