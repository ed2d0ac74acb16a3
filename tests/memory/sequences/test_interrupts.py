"""After an exception anywhere, a call has done everything or nothing.

What a Ctrl-C kept from returning has not happened.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridmem.memory import (
    AttentionSpec,
    CrossAttentionSpec,
    HybridMemory,
    MemorySpec,
    RecurrentSpec,
    Sequence,
    StateTensor,
    hybrid,
)
from hybridmem.memory.eviction import H2O
from hybridmem.memory.quantization import Quantized
from hybridmem.memory.rotary import UNROTATED
from hybridmem.memory.sequences import interrupts
from hybridmem.memory.sequences.interrupts import Lease, uninterrupted, uninterrupted_call
from tests.extent import few_cases
from tests.interrupts import HANDLERS, Outcome, by_handlers, try_places
from tests.toy import VOCAB, Toy

RECURRENT = RecurrentSpec("average", (5,), (StateTensor("mean", (5,)),))
DRY = MemorySpec(
    (
        (AttentionSpec(2, 1, 4, rotation=UNROTATED),), (RECURRENT,),
        (AttentionSpec(2, 1, 4, window=5, rotation=UNROTATED),),
    ),
    VOCAB, model="dry", device=torch.device("meta"),
)  # fmt: skip
OPTIONS: dict[str, Any] = {"rollback_window": 4, "page_tokens": 4}


def books(memory: HybridMemory) -> list[tuple[Any, ...]]:
    """Return what can be seen of all sequences."""
    handles = sorted(memory.sequences, key=lambda handle: handle.id)
    return [(h.id, h.is_checkpoint, h.tokens.tolist(), h.horizon, h.is_swapped, h.is_on_host) for h in handles]


def feed(memory: HybridMemory, sequence: Sequence, n_tokens: int) -> None:
    with memory.step({sequence: [1] * n_tokens}):
        pass


class Scene:
    """Holds a dry memory with two sequences and a checkpoint."""

    def __init__(self, spec: MemorySpec = DRY) -> None:
        self.memory = HybridMemory(spec, "1MiB", host_pages="1MiB", **OPTIONS)
        self.a, self.b, self.away = (self.memory.open() for _ in range(3))
        for sequence in (self.a, self.b, self.away):
            for n_tokens in (7, 3):
                feed(self.memory, sequence, n_tokens)
        self.mark = self.memory.checkpoint(self.a)
        feed(self.memory, self.a, 3)
        self.memory.swap_out(self.away)
        self.kept: list[Any] = []
        self.before = books(self.memory)

    def end(self) -> None:
        """Check that everything can still be used and given back."""
        memory = self.memory
        memory.check()
        for handle in memory.sequences:
            if handle.is_swapped:
                memory.swap_in(handle)
            if not handle.is_checkpoint:
                feed(memory, handle, 1)
        memory.check()
        for handle in memory.sequences:
            memory.close(handle)
        memory.check()
        assert memory.usage().used_bytes == 0 and memory.counters.swapped_bytes == (0, 0)


def step_and_accept(scene: Scene) -> None:
    with scene.memory.step({scene.a: [1] * 3, scene.b: [2]}) as step:
        step.accept({scene.a: 1})


def step_that_fails(scene: Scene) -> None:
    try:
        with scene.memory.step({scene.a: [1] * 9, scene.b: [2]}):
            raise ValueError
    except ValueError:
        pass


def step_in_a_variable(scene: Scene) -> None:
    """A variable that holds the step, or the traceback, keeps the sequences no longer."""
    step = scene.memory.step({scene.a: [1]})
    scene.kept.append(step)
    with step:
        pass


OPERATIONS: dict[str, Callable[[Scene], Any]] = {
    "step": step_and_accept,
    "step that fails": step_that_fails,
    "step in a variable": step_in_a_variable,
    "run of one step": lambda s: s.memory.run(None, {s.a: [1] * 3, s.b: [2]}),
    "run in chunks": lambda s: s.memory.run(None, {s.a: [1] * 9, s.b: [2]}, max_tokens=4),
    "open": lambda s: s.memory.open(),
    "fork": lambda s: s.memory.fork(s.a),
    "checkpoint": lambda s: s.memory.checkpoint(s.a),
    "checkpoint with its tail": lambda s: s.memory.checkpoint(s.a, holds_tail=True),
    "reorder": lambda s: s.memory.reorder({s.a: s.b, s.b: s.a}),
    "rollback": lambda s: s.memory.rollback(s.a, to=12),
    "rollback to a mark": lambda s: s.memory.rollback(s.a, to=s.mark),
    "rollback to where a mark reaches": lambda s: s.memory.rollback(s.a, to=s.mark.horizon),
    "rollback to nothing": lambda s: s.memory.rollback(s.a, to=0),
    "drop": lambda s: s.memory.drop(s.a, 11, 12, approximate=True),
    "close": lambda s: s.memory.close(s.a),
    "close what is away": lambda s: s.memory.close(s.away),
    "swap out": lambda s: s.memory.swap_out(s.a),
    "swap in": lambda s: s.memory.swap_in(s.away),
    "to host": lambda s: s.memory.to_host(s.a),
}
ALL_OR_NOTHING = ("run of one step", "run in chunks", "open", "fork", "checkpoint", "checkpoint with its tail")
"""What promises to have done nothing if it raises."""


def is_on_the_way(name: str, outcome: Outcome) -> bool:
    """True if the call may have done everything before the exception came. Only Ctrl-C waits for the caller."""
    way = (hybrid.__file__, interrupts.__file__)
    return name.startswith("run") or (outcome.place is not None and outcome.place[0].co_filename in way)


def try_operation(name: str, number: int, spec: MemorySpec = DRY, n_places: int = 12) -> int:
    done: list[Any] = []

    def attempt() -> tuple[Callable[[], Any], Callable[[Outcome], None]]:
        scene = Scene(spec)

        def verify(outcome: Outcome) -> None:
            scene.memory.check()
            after = books(scene.memory)
            done[:] = done or [after]  # Nothing interrupts the first call.
            is_undone = name in ALL_OR_NOTHING and (number == signal.SIGINT or not is_on_the_way(name, outcome))
            allowed = done if outcome.has_returned else [scene.before] if is_undone else [scene.before, *done]
            assert after in allowed
            scene.end()

        return lambda: OPERATIONS[name](scene), verify

    files = "memory/step.py", "memory/chunked_prefill.py", "memory/blocks/journal.py", "memory/blocks/ends.py"
    return try_places(attempt, n_places, edges=files, number=number)


@few_cases
@pytest.mark.parametrize(("name", "number"), by_handlers(OPERATIONS))
def test_an_exception_anywhere_leaves_all_or_nothing(name: str, number: int) -> None:
    try_operation(name, number)


@few_cases
@pytest.mark.parametrize("name", ["step", "run in chunks"])
@pytest.mark.parametrize("kind", ["h2o", "4 bit"])
def test_so_it_does_in_other_kinds_of_attention(kind: str, name: str) -> None:
    policy, storage = (H2O(9, recent=2, every=4), None) if kind == "h2o" else (None, Quantized(4, group=8))
    try_operation(name, signal.SIGALRM, DRY.with_policy(policy).with_storage(storage), 8)


def test_a_file_is_loaded_or_not(tmp_path: Path) -> None:
    model, path = Toy(), tmp_path / "a.safetensors"
    source = HybridMemory(model.memory_spec, "1MiB", **OPTIONS)
    saved = source.open()
    source.run(model, {saved: [1, 2, 3, 4, 5, 6]})
    source.save(saved, path)

    def attempt() -> tuple[Callable[[], Any], Callable[[Outcome], None]]:
        memory = HybridMemory(model.memory_spec, "1MiB", **OPTIONS)

        def verify(outcome: Outcome) -> None:
            assert len(memory.usage().by_sequence) == outcome.has_returned
            if outcome.has_returned:
                assert outcome.result.tokens.tolist() == saved.tokens.tolist()
                memory.close(outcome.result)
            memory.check()
            assert memory.usage().used_bytes == 0

        return lambda: memory.load(path), verify

    try_places(attempt, 25)


def test_a_family_is_loaded_or_not(tmp_path: Path) -> None:
    model, path = Toy(), tmp_path / "a.safetensors"
    source = HybridMemory(model.memory_spec, "1MiB", **OPTIONS)
    saved = source.open()
    for tokens in ([1, 2, 3, 4, 5, 6], [7, 8]):
        source.run(model, {saved: tokens})
        source.checkpoint(saved)
    source.save(saved, path, checkpoints=True, forks={"fork": source.fork(saved)})

    def attempt() -> tuple[Callable[[], Any], Callable[[Outcome], None]]:
        memory = HybridMemory(model.memory_spec, "1MiB", **OPTIONS)

        def verify(outcome: Outcome) -> None:
            assert len(memory.usage().by_sequence) == 4 * outcome.has_returned
            memory.check()
            for sequence in memory.sequences:
                memory.close(sequence)
            memory.check()
            assert memory.usage().used_bytes == 0

        return lambda: memory.load(path, family=True), verify

    try_places(attempt, 25)


def test_what_an_encoder_said_is_kept_or_not() -> None:
    spec = MemorySpec(((CrossAttentionSpec(2, 1, 4), AttentionSpec(2, 1, 4)),), VOCAB, model="decoder")

    def attempt() -> tuple[Callable[[], Any], Callable[[Outcome], None]]:
        memory = HybridMemory(spec, "1MiB", **OPTIONS)

        def verify(outcome: Outcome) -> None:
            assert len(memory.usage().by_sequence) == outcome.has_returned
            if outcome.has_returned:
                memory.close(outcome.result)
            memory.check()
            assert memory.usage().used_bytes == 0

        return lambda: memory.open(encoder=((torch.zeros(5, 1, 4), torch.zeros(5, 1, 4)),)), verify

    try_places(attempt, 25)


def test_two_steps_at_a_time_and_one_that_nobody_leaves() -> None:
    """A step is given up when its block is gone, and not before.

    It does not matter who asks, and how often.
    """
    scene = Scene()
    memory, step = scene.memory, scene.memory.step({scene.a: [1] * 9})
    with memory.step({scene.b: [1]}):
        used_bytes = memory.usage().used_bytes
        step.__enter__()
        held_bytes = memory.usage().used_bytes
        memory.check()
        assert memory.usage().used_bytes == held_bytes > used_bytes
        with pytest.raises(Exception, match="in an open step"):
            memory.close(scene.a)
        del step
        assert memory.usage().used_bytes == used_bytes
        memory.close(scene.a)
        with pytest.raises(Exception, match="in an open step"):
            memory.close(scene.b)
    assert scene.b.length == 11
    memory.check()


def test_a_handler_that_does_not_raise_ends_nothing() -> None:
    """A program may count its interrupts and continue. Then everything is done."""
    scene, heard = Scene(), list[int]()
    previous = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with uninterrupted_call() as held:
            signal.raise_signal(signal.SIGINT)
            fork = scene.memory.fork(scene.a)
            assert not heard
            held.deliver()
            assert heard == [signal.SIGINT]
        del held
        assert fork.length == scene.a.length
    finally:
        signal.signal(signal.SIGINT, previous)
    scene.end()


def test_a_lease_ends_with_its_block() -> None:
    lease = Lease()
    with pytest.raises(ValueError, match="why"), lease:
        assert lease.is_taken
        raise ValueError("why")
    assert not lease.is_taken


def test_a_call_inside_of_a_block_puts_the_handler_back() -> None:
    """The block keeps nothing alive that the call would have ended."""

    def call() -> None:
        with uninterrupted_call() as held:
            signal.raise_signal(signal.SIGINT)
            held.deliver()

    def hold_twice() -> None:
        with uninterrupted_call() as _until_return, uninterrupted():
            call()

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            hold_twice()
            time.sleep(0)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize("number", HANDLERS)
@pytest.mark.parametrize("block", [uninterrupted, uninterrupted_call, lambda: uninterrupted_call(holds_all=True)])
def test_a_signal_at_any_bytecode_of_a_block_leaves_every_handler_as_it_was(
    block: Callable[[], AbstractContextManager[Any]], number: int
) -> None:
    """This holds for the handlers of other signals too.

    The block may have begun to hold these back, or may not have restored them yet.
    """
    kept = {each: signal.signal(each, handler) for each, handler in HANDLERS.items()}

    def call() -> None:
        with block() as held:
            del held

    def verify(_: Outcome) -> None:
        assert {each: signal.getsignal(each) for each in HANDLERS} == HANDLERS

    try:
        try_places(lambda: (call, verify), 1000, number=number)
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)


def test_a_kept_error_holds_no_ctrl_c_back() -> None:
    """A function has returned, but its frame lives on in the traceback of an earlier error."""
    kept: list[Exception] = []

    def fail() -> None:
        raise ZeroDivisionError

    def call() -> bool:
        try:
            fail()
        except ZeroDivisionError as error:
            kept.append(error)
        with uninterrupted_call() as _until_return:
            return True

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert call()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        kept.clear()
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_block_that_died_in_another_thread_holds_no_ctrl_c_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python collects garbage in any thread.

    Only the main thread can restore a handler.
    """
    kept, unraisable = list[uninterrupted_call](), list[Any]()
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with uninterrupted_call() as held:
            kept.append(held)
        del held
        thread = threading.Thread(target=kept.clear)
        thread.start()
        thread.join()
        assert ["main thread" in str(each.exc_value) for each in unraisable] == [True]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_ctrl_c_during_a_block_that_fails_is_raised_at_its_end() -> None:
    def fails() -> None:
        with uninterrupted_call() as _held:
            signal.raise_signal(signal.SIGINT)
            raise ZeroDivisionError

    # Tests that run unattended may ignore this signal.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as caught:
            fails()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, previous)
    assert isinstance(caught.value.__context__, ZeroDivisionError)
