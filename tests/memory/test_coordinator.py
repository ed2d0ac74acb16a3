"""A step does everything or nothing, whatever a model, a caller or a Ctrl-C does to it."""

from __future__ import annotations

import gc
import signal
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from hybridmem.memory import CapacityError, HybridMemory, Sequence, SpecError, StepError
from hybridmem.memory.attention_cache import AttentionCache
from hybridmem.memory.coordinator import Coordinator
from hybridmem.memory.sequences.ledger import Ledger
from tests.inside import layer_memories
from tests.toy import Toy


@pytest.fixture
def toy() -> Toy:
    return Toy()


@pytest.fixture
def memory(toy: Toy) -> HybridMemory:
    return HybridMemory(toy.memory_spec, "1MiB", rollback_window=8, page_tokens=4, poison=True)


def feed(memory: HybridMemory, model: Toy, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
    with memory.step({sequence: tokens}) as step:
        return model(step)


def test_what_a_model_does_to_the_steps_arrays_stays_there(memory: HybridMemory, toy: Toy) -> None:
    a = memory.open()
    feed(memory, toy, a, [1, 2, 3])
    with memory.step({a: [7]}) as step:
        toy(step)
        step.positions.add_(1)
        step.token_ids.zero_()
        step.cu_seqlens[-1] = 0
    memory.check()
    assert a.tokens.tolist() == [1, 2, 3, 7]


@pytest.mark.parametrize("kind", [np.uint8, np.uint64, np.int16])
def test_numpy_integers_are_integers(memory: HybridMemory, toy: Toy, kind: type) -> None:
    a = memory.open()
    feed(memory, toy, a, [1] * 300)
    with memory.step({a: [1, 2, 3]}) as step:
        toy(step)
        step.accept({a: kind(2)})
    b = memory.open()
    feed(memory, toy, b, [1] * 10)
    memory.rollback(b, to=kind(5))
    memory.check()
    assert (a.length, b.length) == (302, 5)


def test_a_failure_that_the_model_swallows_is_not_committed(memory: HybridMemory, toy: Toy) -> None:
    a = memory.open()
    feed(memory, toy, a, [1, 2, 3])
    with pytest.raises(StepError, match="layer 0"), memory.step({a: [1]}) as step:
        with pytest.raises(StepError):
            step.attend(0, torch.zeros(1, 6, 4), torch.zeros(1, 2, 4), torch.zeros(1, 2, 5))
        real = step.attend
        step.attend = lambda layer, *a, **k: torch.zeros(1, 6, 4) if layer == 0 else real(layer, *a, **k)  # type: ignore[method-assign]
        toy(step)
    memory.check()
    assert a.length == 3


def test_an_exit_stack_leaves_a_step_as_a_with_statement_does(memory: HybridMemory, toy: Toy) -> None:
    a = memory.open()
    with ExitStack() as stack:
        toy(stack.enter_context(memory.step({a: [1, 2]})))
    assert a.length == 2
    with pytest.raises(ZeroDivisionError), ExitStack() as stack:
        toy(stack.enter_context(memory.step({a: [3]})))
        raise ZeroDivisionError
    assert a.length == 2
    memory.check()


def test_a_step_that_is_dropped_lets_go(memory: HybridMemory) -> None:
    a = memory.open()
    step = memory.step({a: [1]})
    step.__enter__()
    del step
    gc.collect()
    memory.close(a)
    memory.check()
    assert memory.usage().used_bytes == 0


@pytest.mark.parametrize(
    "moment", [(AttentionCache, "commit"), (Ledger, "append"), (AttentionCache, "plan"), (Coordinator, "abort")]
)
def test_a_ctrl_c_in_the_books_waits(
    memory: HybridMemory,
    toy: Toy,
    moment: tuple[type, str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The signal arrives inside of a commit, a plan or an abort.

    It is raised, but the books are whole.
    """
    # A test run in the background may have been started with Ctrl-C ignored.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, previous))
    a = memory.open()
    feed(memory, toy, a, [1, 2, 3])
    owner, name = moment
    real = getattr(owner, name)

    def interrupted(*arguments: object) -> object:
        signal.raise_signal(signal.SIGINT)  # The signal goes to this thread, and has arrived when this call returns.
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt), memory.step({a: [4]}) as step:
            toy(step)
            if name == "abort":
                raise ValueError
    memory.check()
    assert a.length in (3, 4)
    feed(memory, toy, a, [5])
    memory.check()


def test_weights_that_want_gradients_do_not_reach_the_store(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are those of plain torch. Compiled ones could pass no gradient on."""
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", "reference")
    memory = HybridMemory(toy.memory_spec, "1MiB")
    a = memory.open()
    toy.require_gradients()
    assert feed(memory, toy, a, [1, 2, 3]).requires_grad
    assert not feed(memory, Toy(), a, [4]).requires_grad


def test_a_memory_made_in_inference_mode_works_outside(toy: Toy) -> None:
    with torch.inference_mode():
        memory = HybridMemory(toy.memory_spec, "1MiB")
    feed(memory, toy, memory.open(), [1, 2, 3])


def test_run_of_one_chunk_needs_no_more_than_a_step(toy: Toy) -> None:
    with pytest.raises(SpecError) as caught:
        HybridMemory(toy.memory_spec, 64)
    needed = int(str(caught.value).rsplit("give it ", 1)[1].split(" ")[0].replace(",", ""))
    memory = HybridMemory(toy.memory_spec, needed)
    a = memory.open()
    for _ in range(3):
        memory.run(toy, {a: [1]})
    assert a.length == 3


def test_a_sequence_that_the_model_closes_does_not_stop_the_others_from_coming_back(
    memory: HybridMemory, toy: Toy
) -> None:
    a, b = memory.open(), memory.open()
    for sequence in (a, b):
        feed(memory, toy, sequence, [1, 2])

    def model(step):
        if b in step.sequences:
            memory.close(a)
            raise ValueError("the model gives up")
        return toy(step)

    with pytest.raises(ValueError, match="gives up"):
        memory.run(model, {a: [1] * 3, b: [1] * 9}, max_tokens=3)
    memory.check()
    assert (a.closed, b.length) == (True, 2)


def test_capacity_counts_all_that_the_step_missed(toy: Toy) -> None:
    memory = HybridMemory(toy.memory_spec, "16KiB", rollback_window=8)
    with pytest.raises(CapacityError) as caught:
        for _ in range(1000):
            feed(memory, toy, memory.open(), [1])
    assert caught.value.needed > caught.value.free == memory.usage().free_bytes


def test_check_notices(memory: HybridMemory, toy: Toy) -> None:
    from hybridmem.memory import IntegrityError

    a = memory.open()
    feed(memory, toy, a, [1] * 20)
    arena = memory.counters.inventory().arena
    arena.free_bytes += 64
    with pytest.raises(IntegrityError, match="free bytes"):
        memory.check()
    arena.free_bytes -= 64
    memory.check()
    layer_memories(memory)["attention"].tables[0].release(a.slot)
    with pytest.raises(IntegrityError):
        memory.check()
