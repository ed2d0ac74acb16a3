"""What fits by bytes fits, whatever came before: blocks move together, and nobody sees that they have moved."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridmem.memory import CapacityError, HybridMemory, Sequence
from hybridmem.memory.recorded import run_recorded
from hybridmem.memory.sequences import compactor
from tests.extent import few_cases, only_in_long
from tests.inside import shake
from tests.interrupts import HANDLERS, Outcome, try_places
from tests.memory.test_capacity import SPECS
from tests.subjects import IS_FULL, make_subject
from tests.toy import VOCAB, Toy


def moved_bytes(memory: HybridMemory) -> int:
    return memory.counters.moved_bytes


def run_each(memory: HybridMemory, sequences: list[Sequence], n_tokens: int) -> None:
    memory.run(None, {sequence: np.ones(n_tokens, np.int64) for sequence in sequences})


def decode_until_full(memory: HybridMemory, n_sequences: int) -> list[Sequence]:
    """Decode sequences together until no page is left, and close every other one.

    The free bytes are then single pages.
    """
    live = [memory.open() for _ in range(n_sequences)]
    with pytest.raises(CapacityError):
        while True:
            run_each(memory, live, 1)
    for sequence in live[::2]:
        memory.close(sequence)
    return live[1::2]


@pytest.mark.parametrize("fold", ["keep", "replay", "defer"])
def test_new_sequences_fit_into_what_others_that_decoded_together_have_left(fold: str) -> None:
    spec = SPECS["hybrid on a cpu"]
    one = HybridMemory(spec, "1TiB", device="meta", fold=fold).needed_bytes(1)  # type: ignore[arg-type]
    memory = HybridMemory(spec, 30 * one, device="meta", fold=fold)  # type: ignore[arg-type]
    decode_until_full(memory, 15)
    n_fitting, n_opened, asked_bytes = memory.free_bytes // one, 0, 0
    with pytest.raises(CapacityError, match="bytes more"):
        while True:
            run_each(memory, [memory.open()], 1)
            n_opened, asked_bytes = n_opened + 1, asked_bytes + one
    memory.check()
    assert n_opened == n_fitting > 7
    assert 0 < moved_bytes(memory) < 2 * asked_bytes


MIXED = [name for name in SPECS if name not in ("dense", "latent", "mamba", "mamba on a cpu", "rwkv")]
"""Models with blocks of several sizes, beside a state and a tail."""


class Traffic:
    """Makes sequences that open, decode together, close, fork, keep checkpoints, and are swapped out and in."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.name = self.random.choice(MIXED)
        options = {
            "fold": self.random.choice([None, "keep", "replay"]), "rollback_window": self.random.choice([0, 4, 32, 40]),
            "page_tokens": 4,
        }  # fmt: skip
        roomy = HybridMemory(SPECS[self.name], "1TiB", device="meta", **options)  # type: ignore[arg-type]
        budget = int(roomy.needed_bytes(60) * self.random.uniform(2, 5))
        self.memory = HybridMemory(SPECS[self.name], budget, device="meta", **options)  # type: ignore[arg-type]
        self.refusals: list[CapacityError] = []
        live = [self.memory.open() for _ in range(self.random.randint(2, 8))]
        for _ in range(40):
            if not self.feed(dict.fromkeys(live, 2)):
                break
        for sequence in live[:: self.random.choice([2, 3])]:
            self.memory.close(sequence)

    def act(self) -> None:
        memory, live = self.memory, [s for s in self.memory.sequences if not s.is_checkpoint and not s.is_swapped]
        away = [s for s in memory.sequences if s.is_swapped]
        move = self.random.random()
        if move < 0.25 or not live:
            self.feed({memory.open(): self.random.choice([1, 5, 50])})
        elif move < 0.55:
            n_tokens = self.random.choice([1, 8])
            while n_tokens and self.feed(dict.fromkeys(live, 1)):
                n_tokens -= 1
        elif move < 0.7:
            memory.close(self.random.choice(memory.sequences))
        elif move < 0.8 and len(live) > 1:
            for sequence in live[:: self.random.choice([2, 3])]:
                memory.close(sequence)
        elif move < 0.9:
            self.attempt(self.random.choice([memory.fork, memory.checkpoint]), self.random.choice(live))
        elif move < 0.95 or not away:
            memory.swap_out(self.random.choice(live))
        else:
            self.attempt(memory.swap_in, self.random.choice(away))

    def feed(self, counts: dict[Sequence, int]) -> bool:
        """Feed each sequence so many tokens. Return whether there was room."""
        tokens = {sequence: np.ones(n, np.int64) for sequence, n in counts.items()}
        return self.attempt(partial(self.memory.run, None), tokens)

    def attempt(self, call: Callable[[Any], object], argument: Any) -> bool:
        """Make a call, and keep the error if there is no room. Return whether there was room."""
        try:
            call(argument)
        except CapacityError as error:
            self.refusals.append(error)
            return False
        return True


@only_in_long
def test_nothing_is_refused_whose_bytes_are_free() -> None:
    """Of many histories, most use the whole budget."""
    n_refusals = n_moved = 0
    for seed in range(600 if IS_FULL else 60):
        traffic = Traffic(seed)
        for _ in range(20):
            traffic.act()
        traffic.memory.check()
        for error in traffic.refusals:
            assert error.needed > error.free, (seed, traffic.name, str(error))
        n_refusals, n_moved = n_refusals + len(traffic.refusals), n_moved + (moved_bytes(traffic.memory) > 0)
    assert n_refusals > 200 and n_moved > 10


NAMES = (
    *("toy", "toy replay", "toy-window", "toy-quest", "toy-h2o", "toy-4-bit", "toy-snapkv-8-bit", "toy-quest-4-bit"),
    *("family:gated_delta defer", "family:rg_lru", "model:bamba", "model:bamba defer"),
)  # fmt: skip


@few_cases
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_a_memory_in_which_nothing_moves(name: str, tmp_path: Path) -> None:
    """They are equal bit for bit, in recorded steps too.

    All blocks are moved together after each call, and some pages are in host memory.
    """
    subject, rng, n_moved = make_subject(name, tmp_path), random.Random(name), 0
    has_pages = bool(subject.spec.of_kind("attention"))
    others: dict[str, Any] = {"host_pages": "512KiB"} if has_pages else {}
    quiet, shaken = (subject.memory(8, "1MiB", **others) for _ in range(2))
    twins = [(quiet.open(), shaken.open())]
    for _ in range(60):
        move, (one, two) = rng.random(), rng.choice(twins)
        if move < 0.1:
            twins.append((quiet.open(), shaken.open()))
        elif move < 0.2:
            twins.append((quiet.fork(one), shaken.fork(two)))
        elif move < 0.3 and len(twins) > 1:
            quiet.close(one), shaken.close(two)  # type: ignore[func-returns-value]
            twins.remove((one, two))
        elif move < 0.35 and one.length > 3:
            to = quiet.resume_point(one, one.length - 3)
            quiet.rollback(one, to=to), shaken.rollback(two, to=to)  # type: ignore[func-returns-value]
        elif move < 0.45 and has_pages:
            for memory, sequence in ((quiet, one), (shaken, two)):
                (memory.to_device if sequence.is_on_host else memory.to_host)(sequence)
        else:
            chosen, n = rng.sample(twins, rng.randint(1, len(twins))), rng.choice([1, 1, 1, 9])
            tokens = [[rng.randrange(VOCAB) for _ in range(n)] for _ in chosen]
            logits = []
            for which, memory in enumerate((quiet, shaken)):
                with memory.step({pair[which]: ids for pair, ids in zip(chosen, tokens, strict=True)}) as step:
                    logits.append(run_recorded(subject.model, step) if which else subject.model(step))
            assert torch.isfinite(logits[0]).all() and torch.equal(*logits)
        n_moved = shake(shaken)
        shaken.check()
    assert n_moved > 0


def test_blocks_that_an_open_step_reads_stay_where_they_are() -> None:
    """While one thread is in a step, another one makes room for its own step."""
    model = Toy()
    memory = HybridMemory(model.memory_spec, "64KiB", page_tokens=4, poison=True)
    tokens = [i % VOCAB for i in range(40)]
    pairs = [[memory.open() for _ in range(2)] for _ in range(3)]
    for i in range(20):  # The pages of the sequences alternate.
        for first, second in pairs:
            memory.run(model, {first: tokens[i : i + 1], second: tokens[i : i + 1]})
    for first, _ in pairs:
        memory.close(first)
    read, other = pairs[0][1], pairs[1][1]
    moved_before = shake_in_thread(memory) and moved_bytes(memory)
    assert moved_before
    closed = memory.open()
    memory.run(model, {closed: tokens})
    memory.run(model, {read: tokens[20:22], other: tokens[20:22]})
    with memory.step({read: tokens[22:30]}, outputs="all") as step:
        memory.close(closed)
        shake_in_thread(memory)
        logits = model(step)
    assert moved_bytes(memory) >= moved_before
    fresh = HybridMemory(model.memory_spec, "64KiB", page_tokens=4, poison=True)
    again = fresh.open()
    expected = fresh.run(model, {again: tokens[:30]}, outputs="all")
    assert expected is not None
    torch.testing.assert_close(logits, expected[22:])
    memory.check()


def shake_in_thread(memory: HybridMemory) -> bool:
    """Join all free ranges from another thread. Return whether anything has moved so far."""
    thread = threading.Thread(target=shake, args=(memory,))
    thread.start()
    thread.join()
    return moved_bytes(memory) > 0


@pytest.mark.parametrize("is_cheap", [True, False])
def test_optional_bytes_are_freed_before_more_is_moved_than_is_cheap(
    monkeypatch: pytest.MonkeyPatch, is_cheap: bool
) -> None:
    spec, asked = SPECS["hybrid on a cpu"], list[int]()
    one = HybridMemory(spec, "1TiB", device="meta").needed_bytes(1)
    memory = HybridMemory(spec, 30 * one, device="meta")
    decode_until_full(memory, 15)

    def free_nothing(n_bytes: int) -> bool:
        asked.append(moved_bytes(memory))
        return False

    memory.add_reclaimer(free_nothing)
    if not is_cheap:
        monkeypatch.setattr(compactor, "_MOST_MOVED", 0)
    while not moved_bytes(memory):
        run_each(memory, [memory.open()], 1)
    assert asked == ([] if is_cheap else [0]), "and where nothing can be freed, it is moved all the same"


@only_in_long
@pytest.mark.parametrize("number", HANDLERS)
def test_an_exception_while_blocks_move_spoils_none(number: int) -> None:
    """The step of a new sequence is interrupted anywhere.

    Sequences that decoded together continue as if nothing had moved.
    """
    model = Toy()
    expected: list[torch.Tensor] = []

    def attempt() -> tuple[Callable[[], Any], Callable[[Outcome], None]]:
        memory = HybridMemory(model.memory_spec, "16KiB", rollback_window=4, page_tokens=4, poison=True)
        live = [memory.open() for _ in range(8)]
        with pytest.raises(CapacityError):
            while True:
                memory.run(model, dict.fromkeys(live, 3))
        for sequence in live[::2]:
            memory.close(sequence)
        new, free_bytes = [memory.open() for _ in range(6)], memory.free_bytes
        memory.check()

        def verify(outcome: Outcome) -> None:
            memory.check()
            assert {s.length for s in new} in (({1},) if outcome.has_returned else ({0}, {1}))
            assert moved_bytes(memory) or not outcome.has_returned, "this test tests nothing"
            for sequence in new:
                memory.close(sequence)
            memory.check()
            assert memory.free_bytes == free_bytes
            with memory.step(dict.fromkeys(live[1::2], 2)) as step:
                out = model(step)
            expected[:] = expected or [out]  # Nothing interrupts the first call.
            assert torch.equal(out, expected[0])

        return lambda: memory.run(model, dict.fromkeys(new, 1)), verify

    files = "memory/blocks/compaction.py", "memory/blocks/journal.py", "memory/blocks/ends.py"
    try_places(attempt, 60, edges=files, number=number)
