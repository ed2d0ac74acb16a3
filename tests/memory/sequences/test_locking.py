"""Several threads and processes may use what is made for it.

Each gets what it would get alone.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any

import pytest
import torch

from hybridmem.memory import HybridMemory, Sequence, SequenceError
from hybridmem.memory.sequences.ledger import Ledger
from hybridmem.memory.testing.toys import Toy
from tests.extent import only_in_long
from tests.inside import lock_of

MODEL = Toy()
N_THREADS, N_ROUNDS = 4, 3


@contextmanager
def often_switched() -> Iterator[None]:
    """Let threads alternate every few bytecodes."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def at_once(call: Callable[[int], Any]) -> list[Any]:
    with often_switched(), ThreadPoolExecutor(N_THREADS) as pool:
        return list(pool.map(call, range(N_THREADS)))


def make(budget: str = "8MiB") -> HybridMemory:
    return HybridMemory(MODEL.memory_spec, budget, rollback_window=4, page_tokens=4, poison=True)


def talk(memory: HybridMemory, seed: int) -> torch.Tensor:
    """Do everything that a sequence may do, with tokens of its own."""
    found, sequence = list[torch.Tensor](), memory.open()

    def feed(sequence: Sequence, *tokens: int) -> None:
        with memory.step({sequence: list(tokens)}, outputs="all") as step:
            found.append(MODEL(step))

    for n in range(N_ROUNDS):
        feed(sequence, *((seed + n + i) % 19 for i in range(5)))
        mark, fork = memory.checkpoint(sequence), memory.fork(sequence)
        feed(fork, (seed + n) % 19)
        feed(sequence, 1, 2)
        memory.rollback(sequence, n_tokens=1)
        memory.reorder({fork: sequence, sequence: fork})
        memory.swap_out(fork)
        memory.swap_in(fork)
        memory.rollback(sequence, to=mark)
        memory.close(fork)
        memory.close(mark)
    memory.close(sequence)
    return torch.cat(found)


def test_threads_with_a_memory_each_share_a_model() -> None:
    expected = [talk(make(), seed) for seed in range(N_THREADS)]
    assert all(map(torch.equal, at_once(lambda seed: talk(make(), seed)), expected))


def test_threads_share_a_memory() -> None:
    """Each thread has sequences of its own.

    Another one looks, saves, loads and checks all the time.
    """
    expected = [talk(make(), seed) for seed in range(N_THREADS)]
    memory = make()

    def call(seed: int) -> torch.Tensor | None:
        if seed < N_THREADS - 1:
            return talk(memory, seed)
        sequence = memory.open()
        for _ in range(3 * N_ROUNDS):
            with memory.step({sequence: [3]}) as step:
                MODEL(step)
            memory.save(sequence, "memory://threads/saved")
            memory.close(memory.load("memory://threads/saved"))
            assert memory.usage().used_bytes > 0 and repr(memory)
            memory.check()
        memory.close(sequence)
        return None

    found = at_once(call)
    assert all(map(torch.equal, found[:-1], expected))
    memory.check()
    assert memory.usage().used_bytes == 0


CALLS: dict[str, Callable[[HybridMemory, Sequence], object]] = {
    "fork": lambda memory, sequence: memory.fork(sequence),
    "can_rollback": lambda memory, sequence: memory.can_rollback(sequence, 0),
    "resume_point": lambda memory, sequence: memory.resume_point(sequence, 0),
    "usage": lambda memory, _: memory.usage(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_waits_for_that_of_another_thread(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One thread commits while another calls.

    That call is answered when the commit is over.
    """
    memory, is_answered, append = make(), Event(), Ledger.append
    sequence, other = memory.open(), memory.open()

    def call() -> None:
        CALLS[name](memory, other)
        is_answered.set()

    def slow(self: Ledger, *arguments: Any) -> None:
        pool.submit(call)
        assert not is_answered.wait(0.1)
        append(self, *arguments)

    monkeypatch.setattr(Ledger, "append", slow)
    with ThreadPoolExecutor(1) as pool, memory.step({sequence: [1, 2]}) as step:
        MODEL(step)
    assert is_answered.is_set()
    memory.check()


def test_a_sequence_in_another_threads_step_is_refused() -> None:
    memory = make()
    sequence = memory.open()
    with memory.step({sequence: [1, 2]}) as step, ThreadPoolExecutor(1) as pool:
        for call in (memory.fork, memory.close, lambda s: memory.step({s: [1]})):
            with pytest.raises(SequenceError, match="open step"):
                pool.submit(call, sequence).result()
        with pytest.raises(SequenceError, match="open step"):
            pool.submit(memory.close_all).result()
        MODEL(step)
    ThreadPoolExecutor(1).submit(memory.close_all).result()
    with pytest.raises(SequenceError, match="closed"):
        memory.open()


def test_a_step_that_begins_while_another_is_checked_is_seen() -> None:
    """For each n, the other thread enters its step at the n-th line of the check."""
    for n in count(1):
        memory, n_lines = make(), 0
        sequence, steps = memory.open(), ExitStack()
        first = memory.step({sequence: [5]})
        memory.step({memory.open(): [1]})  # This keeps the check from finding the earlier answer.

        def trace(frame: FrameType, event: str, _: object, n: int = n) -> Any:
            nonlocal n_lines
            if frame.f_code is not Ledger.check_all_usable.__code__:
                return None
            n_lines += event == "line"
            if n_lines == n and event == "line":
                steps.enter_context(first)  # noqa: B023
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            later = memory.step({sequence: [4]})
        except SequenceError:
            later = None
        finally:
            sys.settrace(before)
        if n_lines < n:  # There is no such line.
            return
        with steps:
            if later is not None:
                with pytest.raises(SequenceError, match="open step"), later:
                    raise AssertionError("both steps are open")
            MODEL(first)
        assert sequence.tokens.tolist() == [5]
        memory.check()


def load_and_go_on(path: str) -> list[float]:
    torch.set_num_threads(1)
    memory = make()
    sequence = memory.load(path)
    with memory.step({sequence: [5]}) as step:
        return MODEL(step)[0].tolist()


@only_in_long
def test_two_processes_load_one_file(tmp_path: Path) -> None:
    memory = make()
    sequence = memory.open()
    memory.run(MODEL, {sequence: [1, 2, 3, 4, 5, 6, 7]})
    memory.save(sequence, tmp_path / "saved")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.map(load_and_go_on, [str(tmp_path / "saved")] * 2)
    with memory.step({sequence: [5]}) as step:
        assert found == [MODEL(step)[0].tolist()] * 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_forked_while_another_thread_holds_the_lock_is_refused_and_does_not_wait() -> None:
    memory = make()
    sequence = memory.open()
    with lock_of(memory):
        child = os.fork()
        if not child:
            try:
                memory.fork(sequence)
            except SequenceError:
                os._exit(0)
            os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
