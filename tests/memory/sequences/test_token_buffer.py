"""All sequences that share token ids hold them once.

The way back to a position looks at few checkpoints.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hybridmem.memory import (
    CapacityError,
    HybridMemory,
    IntegrityError,
    MemorySpec,
    RecurrentSpec,
    Sequence,
    StateTensor,
)
from hybridmem.memory.sequences import ledger as ledger_module
from hybridmem.memory.sequences.token_buffer import common_prefix
from tests.counting import Calls
from tests.inside import books, drops_of, token_bytes

WINDOW = 4
STATE = RecurrentSpec("mean", (4,), (StateTensor("mean", (4,)),))


def make(budget: str = "1GiB", window: int = WINDOW) -> HybridMemory:
    """Return a dry memory, so that only the books are counted."""
    spec = MemorySpec(((STATE,),), 1000, model="books", device=torch.device("meta"))
    return HybridMemory(spec, budget, rollback_window=window)


def feed(memory: HybridMemory, sequence: Sequence, tokens: list[int]) -> None:
    with memory.step({sequence: tokens}):
        pass


def test_checkpoints_hold_token_ids_once() -> None:
    """Copies would take 8 bytes for each of 256 + 512 + ... + 16,384 tokens.

    That is 4 MiB instead of 128 KiB.
    """
    memory = make()
    sequence = memory.open()
    import numpy.ma  # noqa: F401 - numpy does so when it must, and it is large

    marks = []
    tracemalloc.start()
    for i in range(64):
        feed(memory, sequence, [i] * 256)
        marks.append(memory.checkpoint(sequence))
    n_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert sequence.length == 16_384 and token_bytes(memory) <= 3 * 8 * 16_384
    assert n_bytes < 1 << 20
    assert all(mark.tokens.tolist() == np.repeat(range(i + 1), 256).tolist() for i, mark in enumerate(marks))
    memory.check()


def test_a_fork_that_goes_on_copies_only_what_others_would_lose() -> None:
    memory = make()
    alice = memory.open()
    feed(memory, alice, list(range(100)))
    bob, before = memory.fork(alice), token_bytes(memory)
    feed(memory, alice, [100])
    assert token_bytes(memory) == before, "in place: nobody holds more"
    feed(memory, bob, [200])
    assert (both := token_bytes(memory)) > before + 8 * 100
    memory.rollback(alice, to=100)
    feed(memory, alice, [101])
    assert token_bytes(memory) == both, "what it alone held it may overwrite"
    mark = memory.checkpoint(alice)
    memory.rollback(alice, to=99)
    feed(memory, alice, [9])
    assert mark.tokens.tolist() == [*range(100), 101]
    assert (alice.tokens.tolist(), bob.tokens.tolist()) == ([*range(99), 9], [*range(100), 200])
    memory.check()


def test_several_that_share_go_on_in_one_step() -> None:
    memory = make()
    alice = memory.open()
    feed(memory, alice, [1, 2, 3])
    twins = [memory.fork(alice) for _ in range(3)]
    for sequences in (twins, [alice, *twins]):
        with memory.step({sequence: 10 + i for i, sequence in enumerate(sequences)}):
            pass
    assert [s.tokens.tolist() for s in (alice, *twins)] == [
        [1, 2, 3, 10],
        *([1, 2, 3, 10 + i, 11 + i] for i in range(3)),
    ]
    memory.check()


def test_steps_that_are_open_at_once_do_not_write_over_each_other() -> None:
    memory = make()
    alice = memory.open()
    feed(memory, alice, [1, 2, 3])
    bob = memory.fork(alice)
    with memory.step({bob: [5, 6]}), memory.step({alice: [4]}):
        pass
    assert (alice.tokens.tolist(), bob.tokens.tolist()) == ([1, 2, 3, 4], [1, 2, 3, 5, 6])
    memory.check()


def test_what_the_longest_held_goes_with_it() -> None:
    """A checkpoint at the beginning of a long conversation does not keep all of its tokens."""
    memory = make()
    sequence = memory.open()
    feed(memory, sequence, [1] * 16)
    early = memory.checkpoint(sequence)
    memory.run(None, {sequence: [2] * 50_000})
    late = memory.checkpoint(sequence)
    memory.close(sequence)
    memory.close(late)
    assert token_bytes(memory) == 16 * 8 and early.tokens.tolist() == [1] * 16
    memory.check()


@pytest.mark.parametrize("refuse", ["begin", "abort", "none kept"])
def test_a_step_that_does_not_count_leaves_no_buffer_behind(refuse: str) -> None:
    memory = make("2KiB" if refuse == "begin" else "1GiB", window=0)
    sequence = memory.open()
    n_tokens, before = 100_000, token_bytes(memory)
    if refuse == "begin":
        others = [memory.open() for _ in range(100)]
        with pytest.raises(CapacityError), memory.step({sequence: [1] * n_tokens} | dict.fromkeys(others, 1)):
            pass
    elif refuse == "abort":
        with pytest.raises(KeyError), memory.step({sequence: [1] * n_tokens}):
            raise KeyError
    else:
        with memory.step({sequence: [1] * n_tokens}) as step:
            step.accept({sequence: 0})
    assert token_bytes(memory) == before
    memory.check()


def test_random_histories_against_lists() -> None:
    """Sequences are fed, rolled back, forked, marked, reordered and closed, and tokens are dropped, in any order.

    Each sequence has its own tokens.
    """
    rng, memory = random.Random(0), make(window=8)
    held: dict[Sequence, list[int]] = {memory.open(): []}
    for _ in range(500):
        live = [s for s in held if not s.is_checkpoint]
        name, sequence = (
            rng.choice(["feed"] * 4 + ["back"] * 3 + ["fork", "mark", "reorder", "close", "drop", "open"]),
            rng.choice(live),
        )
        if name == "feed":
            chosen = rng.sample(live, rng.randint(1, len(live)))
            requests = {s: [rng.randrange(3) for _ in range(rng.choice([1, 1, 1, 7, 40]))] for s in chosen}
            with memory.step(requests):
                pass
            for s, tokens in requests.items():
                held[s] = held[s] + tokens
        elif name == "back":
            to = rng.randint(0, len(held[sequence]))
            if memory.can_rollback(sequence, to):
                memory.rollback(sequence, to=to)
                held[sequence] = held[sequence][:to]
        elif name in ("fork", "mark") and len(held) < 12:
            source = rng.choice(list(held))
            held[memory.fork(source) if name == "fork" else memory.checkpoint(source)] = held[source]
        elif name == "reorder":
            moves = {s: rng.choice(list(held)) for s in rng.sample(live, rng.randint(1, len(live)))}
            memory.reorder(moves)
            held |= {target: held[source] for target, source in moves.items()}
        elif name == "drop":
            start = rng.randint(0, len(held[sequence]))
            end = rng.randint(start, len(held[sequence]))
            memory.drop(sequence, start, end, approximate=True)
            held[sequence] = held[sequence][:start] + held[sequence][end:]
        elif name == "close" and (len(live) > 1 or not live):
            del held[sequence]
            memory.close(sequence)
        elif name == "open" and len(held) < 12:
            held[memory.open()] = []
        memory.check()
        assert all(s.tokens.tolist() == tokens for s, tokens in held.items())
        assert token_bytes(memory) <= 8 * sum(4 * len(tokens) + 1100 for tokens in held.values())


# The tests below are about the way back to a position.


@pytest.fixture(scope="module")
def grove() -> Iterator[tuple[HybridMemory, Sequence, list[Sequence]]]:
    """Return a sequence of 700 checkpoints, and 20 forks at some of them that went on.

    Each fork has checkpoints of its own.
    """
    memory = make()
    sequence = memory.open()
    marks = []
    for i in range(700):
        feed(memory, sequence, [i % 1000] * 3)
        marks.append(memory.checkpoint(sequence, holds_tail=True))
    feed(memory, sequence, [1] * 100)
    for mark in marks[::35]:
        fork = memory.fork(mark)
        for _ in range(3):
            feed(memory, fork, [7] * 20)
            memory.checkpoint(fork)
    yield memory, sequence, marks


@pytest.mark.parametrize("to", [1, 300, 1400, 2000, 2100])
def test_a_position_is_found_among_many_checkpoints(
    grove: tuple[HybridMemory, Sequence, list[Sequence]], to: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, sequence, _ = grove
    compared = []

    def count(a: np.ndarray, b: np.ndarray) -> int:
        compared.append(min(len(a), len(b)))
        return common_prefix(a, b)

    monkeypatch.setattr(ledger_module, "common_prefix", count)
    for asked in (memory.can_rollback, memory.resume_point):
        with Calls() as calls:
            assert asked(sequence, to) in (True, to)  # Checkpoints are 3 tokens apart, and the window has 4.
        assert calls.n < 300, "one call for each checkpoint would be 700"
    assert not compared, "its own buffer answers"
    fork = memory.fork(sequence)
    feed(memory, fork, [2] * 200)
    del compared[:]
    with Calls() as calls:
        assert memory.can_rollback(fork, to)
    memory.close(fork)
    assert len(compared) <= 2 and calls.n < 500, "one token tells most buffers apart"


def test_the_nearest_position_is_that_of_a_search_through_all() -> None:
    """Random families have drops, swaps and closed checkpoints. The result is compared with the definition."""
    for seed in range(30):
        rng, memory = random.Random(seed), make(window=3)
        live, marks = [memory.open()], list[Sequence]()
        for _ in range(60):
            sequence, name = rng.choice(live), rng.choice(["feed", "mark", "mark", "fork", "back", "drop"])
            if name == "feed":
                feed(memory, sequence, [rng.randrange(2) for _ in range(rng.choice([1, 2, 9]))])
            elif name == "mark":
                marks.append(memory.checkpoint(sequence))
            elif name == "fork" and len(live) < 5:
                live.append(memory.fork(rng.choice([*live, *marks])))
            elif name == "back":
                memory.rollback(sequence, to=memory.resume_point(sequence, rng.randint(0, sequence.length)))
            elif name == "drop" and sequence.length:
                memory.drop(sequence, sequence.length // 2, sequence.length // 2 + 1, approximate=True)
        for mark in rng.sample(marks, len(marks) // 4):
            memory.swap_out(mark)
        memory.check()
        for sequence in live:
            for to in range(sequence.length + 1):
                found = memory.resume_point(sequence, to)
                assert found == nearest_of_all(memory, sequence, to, marks), (seed, to)


def nearest_of_all(memory: HybridMemory, sequence: Sequence, to: int, marks: list[Sequence]) -> int:
    if to >= sequence.horizon:
        return to
    best = 0
    for mark in marks:
        if mark.is_swapped or mark.lineage != sequence.lineage:
            continue
        foreign = drops_of(memory, mark) - drops_of(memory, sequence)
        same = next(
            (i for i, (a, b) in enumerate(zip(sequence.tokens, mark.tokens, strict=False)) if a != b), mark.length
        )
        reach = min([to, sequence.length, same, *(position - 1 for position, _ in foreign)])
        if reach >= mark.horizon:
            best = max(best, reach)
    return best


def test_common_prefix() -> None:
    rng = random.Random(0)
    for n in (0, 1, 63, 64, 65, 191, 192, 193, 5000):
        a = np.arange(n)
        for at in {0, n - 1, n // 2, rng.randrange(n)} if n else ():
            b = a.copy()
            b[at] = -1
            assert common_prefix(a, b) == common_prefix(b, np.concatenate([a, a])) == at
        assert common_prefix(a, np.concatenate([a, a])) == n


def test_check_finds_tokens_that_two_would_write() -> None:
    memory = make()
    alice = memory.open()
    feed(memory, alice, [1, 2, 3])
    bob = memory.fork(alice)
    memory.check()
    writable, buffers = books(memory)["writable"], books(memory)["buffers"]
    writable[bob.slot] = writable[alice.slot]
    with pytest.raises(IntegrityError, match="may write"):
        memory.check()
    writable[bob.slot] = 0
    buffers[alice.slot].writer = None
    with pytest.raises(IntegrityError):
        memory.check()
