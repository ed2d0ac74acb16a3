"""A memory is freed with its last reference, and can be closed.

In another process, or as a copy, it means nothing.
"""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.multiprocessing.reductions import StorageWeakRef

from hybridmem.chat.engine.engine import Engine
from hybridmem.memory import BatchError, CapacityError, HybridMemory, RollbackError, Sequence, SequenceError, StepError
from hybridmem.memory.prefix.cache import PrefixCache
from tests.inside import arena_bytes
from tests.toy import Toy

ROOT = Path(__file__).parent.parent.parent.parent
TOY = Toy()


def make(**options: Any) -> HybridMemory:
    return HybridMemory(TOY.memory_spec, **({"budget": "1MiB", "rollback_window": 4} | options))


def opened(memory: HybridMemory, n_tokens: int = 20) -> Sequence:
    sequence = memory.open()
    memory.run(TOY, {sequence: [1] * n_tokens})
    return sequence


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Pause garbage collection, so that reference counts alone free what the test deletes."""
    gc.disable()
    yield
    gc.enable()


def is_freed(held: list[HybridMemory]) -> bool:
    """Return whether a memory and its arena are freed when their only reference is deleted."""
    memory, arena = weakref.ref(held[0]), StorageWeakRef(arena_bytes(held[0]).untyped_storage())
    held.clear()
    return memory() is None and arena.expired()


def assert_refuses(memory: HybridMemory) -> None:
    """Assert that a full memory asks nobody for room.

    A cache that is gone or closed would answer with an error of its own.
    """
    with pytest.raises(CapacityError):
        while True:
            opened(memory, 200)


# The tests below delete a memory.


def step_of(memory: HybridMemory, sequence: Sequence) -> object:
    with memory.step({sequence: [1, 2]}) as step:
        TOY(step)
    return step


def tree_step_of(memory: HybridMemory, sequence: Sequence) -> object:
    with memory.step({sequence: [1, 2, 3]}, parents={sequence: [-1, 0, 0]}) as step:
        TOY(step)
        step.accept({sequence: [0, 2]})
    return step


def failed_step(memory: HybridMemory, sequence: Sequence) -> object:
    step = memory.step({sequence: [1]})
    with pytest.raises(KeyError), step:
        raise KeyError
    return step


def copies(memory: HybridMemory, sequence: Sequence) -> object:
    fork, mark = memory.fork(sequence), memory.checkpoint(sequence)
    memory.run(TOY, {fork: [1, 2]})
    memory.rollback(fork, to=mark)
    memory.reorder({sequence: fork})
    return fork, mark


def refused(memory: HybridMemory, sequence: Sequence) -> object:
    try:
        memory.step({sequence: [1] * 50_000}).__enter__()
    except CapacityError as error:
        return str(error)
    raise AssertionError


def cached(memory: HybridMemory, sequence: Sequence) -> object:
    cache = PrefixCache(memory)
    cache.insert(sequence)
    return cache.open([1] * 30)


def swapped(memory: HybridMemory, sequence: Sequence) -> object:
    memory.swap_out(sequence)
    return sequence


@pytest.mark.parametrize(
    "use",
    [
        step_of, tree_step_of, failed_step, copies, refused, cached, swapped, lambda m, s: m.step({s: [1]}),
        lambda m, s: (m.usage(), repr(m), m._repr_html_(), s._repr_html_()),
    ],
)  # fmt: skip
def test_the_last_reference_frees_it_at_once(
    use: Callable[[HybridMemory, Sequence], object], uncollected: None
) -> None:
    """Handles, steps and views of the memory may still be kept."""
    held = [make()]
    sequence = opened(held[0])
    kept = use(held[0], sequence)
    assert is_freed(held)
    assert kept is not None and repr(sequence) == "<sequence 0, of a memory that is gone>"


def test_used_bytes_of_a_dropped_memory_go_back_to_the_system(uncollected: None) -> None:
    def resident_bytes() -> int:
        """Count this process's own bytes, swapped ones too.

        Pages of files are left out, because other processes may need their memory.
        """
        held = {name: value for name, _, value in (line.partition(":") for line in status.read_text().splitlines())}
        return sum(int(held[name].split()[0]) << 10 for name in ("RssAnon", "VmSwap"))

    status = Path("/proc/self/status")
    if not status.exists() or "RssAnon" not in status.read_text():
        pytest.skip("this system does not say what a process holds")

    def close(held: list[HybridMemory]) -> None:
        with pytest.raises(CapacityError) as caught:
            held[0].step({held[0].open(): [1] * 400_000}).__enter__()
        kept.append(caught.value)  # A notebook keeps the error too, with everything to which its frames refer.
        held[0].close_all()

    kept: list[Exception] = []
    drops: list[Callable[[list[HybridMemory]], None]] = [list.clear, close]
    for drop in drops:
        held = [make(budget="32MiB")]
        before = resident_bytes()
        arena_bytes(held[0]).fill_(1)
        assert resident_bytes() - before > 25 << 20
        drop(held)
        assert resident_bytes() - before < 20 << 20


def test_a_handle_that_outlives_its_memory_says_so(uncollected: None) -> None:
    memory = make()
    sequence, mark = opened(memory), memory.checkpoint(memory.open())
    step = memory.step({sequence: [1]})
    entered = memory.step({memory.open(): [1]})
    entered.__enter__()
    del memory
    for ask in (lambda: sequence.length, lambda: sequence.tokens, lambda: mark.horizon, lambda: sequence.is_swapped):
        with pytest.raises(SequenceError, match=r"memory of sequence \d is gone; keep"):
            ask()
    assert "gone" in sequence._repr_html_()
    with pytest.raises(SequenceError, match="another memory"):
        make().rollback(sequence, to=0)
    with pytest.raises(StepError, match="gone"), step:
        pass
    with pytest.raises(StepError, match="gone"):
        entered.__exit__(None, None, None)


def test_a_cache_may_be_all_that_keeps_a_memory(uncollected: None) -> None:
    cache = PrefixCache(make())
    cache.insert(opened(cache.memory))
    assert cache.find([1] * 30).reused == 20
    held = [cache.memory]
    del cache
    assert is_freed(held)


def test_checkpoints_of_a_dropped_cache_make_room(uncollected: None) -> None:
    memory = make(budget="64KiB")
    cache = PrefixCache(memory)
    for i in range(6):
        sequence = memory.open()
        memory.run(TOY, {sequence: [i + 1] * 16})
        cache.insert(sequence)
        memory.close(sequence)
    assert (n_open := len(memory.sequences)) == 6
    del cache
    assert len(memory.sequences) == n_open, "nothing happens behind anyone's back"
    live = [opened(memory, 16) for _ in range(int(64 * 1024 / memory.counters.held_bytes(opened(memory, 16))) - 2)]
    assert all(not s.is_checkpoint for s in memory.sequences) and live
    assert_refuses(memory)
    memory.check()


# The tests below close a memory.


def test_a_closed_memory_refuses_everything() -> None:
    memory = make(host_pages="1MiB")
    sequence = opened(memory)
    cache = PrefixCache(memory)
    cache.insert(sequence)
    arena = StorageWeakRef(arena_bytes(memory).untyped_storage())
    memory.close_all()
    assert arena.expired() and sequence.closed
    uses: list[Callable[[], object]] = [
        memory.open, memory.usage, memory.check, lambda: memory.step({sequence: [1]}),
        lambda: memory.run(TOY, {sequence: [1]}), lambda: memory.fork(sequence), lambda: memory.checkpoint(sequence),
        lambda: memory.rollback(sequence, to=0), lambda: memory.reorder({sequence: sequence}),
        lambda: memory.close(sequence), lambda: memory.swap_out(sequence), lambda: memory.swap_in(sequence),
        lambda: memory.save(sequence, "x"), lambda: memory.drop(sequence, 0, 1), lambda: memory.to_host(sequence),
        lambda: memory.sequences, lambda: memory.budget, lambda: memory.free_bytes, lambda: memory.counters.inventory(),
        lambda: memory.private_bytes(sequence), lambda: memory.add_reclaimer(lambda n: False), memory.__enter__,
        lambda: cache.insert(sequence), cache.memory.open,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(SequenceError, match="this memory is closed; make another one"):
            use()
    with pytest.raises(SequenceError, match="sequence 0 is closed"):
        sequence.length  # noqa: B018
    with pytest.raises(SequenceError, match="closed"):
        cache.open([1] * 30)
    assert "closed" in repr(memory) and "closed" in memory._repr_html_() and "closed" in repr(sequence)
    memory.close_all()
    cache.close()


def test_with_a_memory(tmp_path: Path) -> None:
    with make(host_budget=1, swap_dir=tmp_path) as memory:
        memory.swap_out(opened(memory))
        assert list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError), make() as memory, memory.step({memory.open(): [1]}):
        raise KeyError
    with pytest.raises(SequenceError, match="closed"):
        memory.open()


def test_a_memory_in_a_step_is_not_closed() -> None:
    memory = make()
    sequence = opened(memory)
    with memory.step({sequence: [1]}) as step:
        with pytest.raises(SequenceError, match="open step"):
            memory.close_all()
        TOY(step)
    assert sequence.length == 21 and not sequence.closed
    memory.check()


def test_a_cache_lets_go_of_its_memory() -> None:
    memory = make(budget="64KiB")
    sequence = opened(memory)
    with PrefixCache(memory) as cache:
        cache.insert(sequence)
        assert len(memory.sequences) == 2
    assert memory.sequences == [sequence]
    assert_refuses(memory)
    for use in (
        lambda: cache.open([1]),
        lambda: cache.insert(sequence),
        cache.stats,
        lambda: cache.memory,
        cache.__enter__,
    ):
        with pytest.raises(SequenceError, match="prefix cache is closed"):
            use()
    assert "closed" in repr(cache)
    cache.close()
    memory.check()


def test_a_reclaimer_may_be_removed() -> None:
    memory, asked = make(budget="64KiB"), list[int]()

    def reclaim(missing_bytes: int) -> bool:
        asked.append(missing_bytes)
        return False

    memory.add_reclaimer(reclaim)
    memory.remove_reclaimer(reclaim)
    memory.remove_reclaimer(reclaim)
    with pytest.raises(CapacityError):
        opened(memory, 5000)
    assert not asked


# The tests below are about what a closed memory still answers.


def test_open_sequences_and_the_budget() -> None:
    memory = make(budget=100_000)
    assert memory.sequences == [] and memory.budget == 99_968 == memory.usage().budget_bytes
    a, b = memory.open(), memory.open()
    mark = memory.checkpoint(b)
    memory.close(a)
    c = memory.open()
    assert memory.sequences == [b, mark, c]
    memory.sequences.clear()
    assert memory.sequences == [b, mark, c]


def test_the_newest_tokens_are_taken_back() -> None:
    memory = make()
    sequence = opened(memory)
    memory.rollback(sequence, n_tokens=3)
    memory.rollback(sequence, n_tokens=0)
    assert sequence.length == 17
    wrong: list[dict[str, Any]] = [
        {"to": 3, "n_tokens": 3},
        {"n_tokens": -1},
        {"n_tokens": 18},
        {"n_tokens": True},
        {"n_tokens": 1.0},
        {},
    ]
    for options in wrong:
        with pytest.raises(RollbackError, match="give"):
            memory.rollback(sequence, **options)
    memory.rollback(sequence, n_tokens=17)
    assert sequence.length == 0


@pytest.mark.parametrize("to", [-1, True, 1.5, "end", None])
def test_no_position_is_no_answer(to: Any) -> None:
    """The three ways to ask agree."""
    memory = make()
    sequence = opened(memory)
    for ask in (memory.can_rollback, memory.resume_point, lambda s, to: memory.rollback(s, to=to)):
        with pytest.raises(RollbackError, match="is no position"):
            ask(sequence, to)


def test_messages_stay_short() -> None:
    memory = make(budget="1GiB")
    sequence = memory.open()
    tokens = [0.5] * 200_000
    for requests in ({sequence: tokens}, {sequence: [tokens, [1]]}, [tokens], "x" * 100_000):
        with pytest.raises(BatchError) as caught:
            memory.step(requests)  # type: ignore[arg-type]
        assert (0 < len(str(caught.value)) < 3000 and "give" in str(caught.value)) or "encode" in str(caught.value)
    with pytest.raises(RollbackError) as refused:
        memory.rollback(sequence, to="y" * 10_000)  # type: ignore[arg-type]
    assert len(str(refused.value)) < 3000 and refused.value.to == "y" * 10_000


# The tests below are about copies and other processes.


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_nothing_is_copied(duplicate: Callable[[object], object]) -> None:
    memory = make()
    sequence = opened(memory)
    things = {
        "memory.save": memory, "memory.fork": sequence, "where the memory is": memory.step({sequence: [1]}),
        "beside each memory": PrefixCache(memory), "in each process": Engine(TOY, memory, None, stop_ids=()),
    }  # fmt: skip
    for remedy, thing in things.items():
        with pytest.raises(SequenceError, match=remedy):
            duplicate(thing)
    memory.check()


def test_nothing_is_sent_to_a_process() -> None:
    memory = make()
    process = multiprocessing.get_context("spawn").Process(target=print, args=(memory,))
    with pytest.raises(SequenceError, match="cannot be copied, pickled or sent to another process"):
        process.start()


FORKED = """
    import os, sys, threading
    from pathlib import Path
    from hybridmem.memory import HybridMemory, SequenceError
    from hybridmem.memory.prefix import PrefixCache
    from tests.toy import Toy

    folder, toy = Path(sys.argv[1]), Toy()
    memory = HybridMemory(toy.memory_spec, "1MiB", host_budget=1, swap_dir=folder)
    alice, bob = memory.open(), memory.open()
    memory.run(toy, {alice: [1] * 20, bob: [2] * 20})
    cache = PrefixCache(memory)
    cache.insert(bob)
    memory.swap_out(alice)
    files = sorted(folder.iterdir())
    assert len(files) == 1

    def fails(use):
        try:
            use()
        except SequenceError as error:
            assert "made in another process" in str(error), error
            return True

    carol = memory.open()
    trees = {"requests": {carol: [1, 2, 3]}, "parents": {carol: [-1, 0, 0]}}
    with memory, memory.step({bob: [5]}) as step, memory.step(**trees) as tree:
        child = os.fork()
        if not child:
            uses = [
                memory.open, memory.usage, lambda: memory.run(toy, {bob: [1]}),
                lambda: memory.swap_in(alice), lambda: bob.length,
                lambda: memory.close(bob), lambda: memory.fork(bob), lambda: cache.open([1, 2]),
                lambda: cache.insert(bob), memory.check,
                lambda: step.__exit__(None, None, None), lambda: tree.__exit__(None, None, None),
            ]
            failed = [fails(use) for use in uses]
            repr(memory), repr(bob)
            cache.close(), memory.close_all()
            sys.exit(0 if all(failed) else 1)  # runs everything that a process runs when it ends
        assert os.waitpid(child, 0)[1] == 0
        toy(step), toy(tree)
        tree.accept({carol: [0, 2]})
        assert sorted(folder.iterdir()) == files
    assert bob.closed and not list(folder.iterdir())
    print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_touches_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "HYBRID_MEMORY_KERNELS": "reference"}
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(FORKED), str(tmp_path)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr
    assert "Exception ignored" not in found.stderr
