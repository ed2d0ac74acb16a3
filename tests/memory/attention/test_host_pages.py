"""Sequences whose keys and values are in host memory are compared with a memory in which they never move."""

from __future__ import annotations

import gc
import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridmem.memory import (
    UNROTATED,
    CapacityError,
    HybridMemory,
    IntegrityError,
    RollbackError,
    Sequence,
    SequenceError,
    SpecError,
)
from hybridmem.memory.attention.offload import HostedAttention
from hybridmem.memory.blocks.journal import Journal
from hybridmem.memory.blocks.layout import Field
from hybridmem.memory.blocks.pinned import host_store
from hybridmem.memory.errors import BUDGET_UNIT, HOST_UNIT
from hybridmem.memory.kernels import Scoring
from hybridmem.memory.prefix.cache import PrefixCache
from hybridmem.memory.sequences.batch import TokenLists, pack
from hybridmem.memory.specs import AttentionSpec
from tests.extent import few_cases, only_in_long
from tests.inside import arena_bytes, host_arena, host_bytes, layer_memories
from tests.memory.sequences.test_drop import Table
from tests.subjects import Subject, make_subject
from tests.toy import Toy

KINDS = (
    *("toy", "toy-window", "toy replay", "toy-attention", "toy-h2o", "toy-attention-recent-2-bit", "toy-knorm-float8"),
    *("toy-quest", "toy-4-bit", "toy-quest-4-bit", "jamba", "model:deepseek-v3", "model:gemma3"),
)


class Pair:
    """Does everything in two memories. In one of them sequences move, in the other they stay on the device."""

    def __init__(self, subject: Subject, seed: int) -> None:
        options: dict[str, Any] = {"rollback_window": 8, "page_tokens": 4, "fold": subject.fold, "poison": True}
        self.subject, self.random = subject, random.Random(seed)
        self.moving = HybridMemory(
            subject.spec, "2MiB", **options, host_pages="2MiB", host_attention=("stream", "compute")[seed % 2]
        )
        self.staying = HybridMemory(subject.spec, "2MiB", **options)
        self.pairs: list[tuple[Sequence, Sequence]] = []
        self.hosted: set[Sequence] = set()
        self.n_mixed = 0

    def pick(self, *, live: bool = True) -> tuple[Sequence, Sequence]:
        return self.random.choice([p for p in self.pairs if not (live and p[0].is_checkpoint)])

    def add(self, moving: Sequence, staying: Sequence, *, is_hosted: bool) -> None:
        self.pairs.append((moving, staying))
        if is_hosted:
            self.hosted.add(moving)

    def open(self) -> None:
        self.add(self.moving.open(), self.staying.open(), is_hosted=False)

    def step(self) -> None:
        """Take a step of prompts, single tokens and drafts, of which some are kept."""
        live = [p for p in self.pairs if not p[0].is_checkpoint]
        chosen = self.random.sample(live, self.random.randint(1, len(live)))
        self.n_mixed += len({p[0] in self.hosted for p in chosen}) > 1
        tokens = [
            self.subject.tokens(self.random.choice([1, 1, 3, 21]), seed=self.random.randrange(10**6)) for _ in chosen
        ]
        kept = [self.random.randint(max(0, len(own) - 4), len(own)) for own in tokens]
        found = []
        for side, memory in enumerate((self.moving, self.staying)):
            with memory.step([(p[side], own) for p, own in zip(chosen, tokens, strict=True)], outputs="all") as step:
                found.append(self.subject.model(step))
                try:
                    step.accept({p[side]: n for p, n in zip(chosen, kept, strict=True)})
                except RollbackError:  # Both memories refuse or neither does, as the lengths show.
                    found.append(torch.zeros(0))
        assert len(found) in (2, 4) and torch.isfinite(found[0]).all()
        assert torch.equal(found[0], found[len(found) // 2]), "what was remembered depends on where it is"

    def rollback(self) -> None:
        moving, staying = self.pick()
        wanted = max(0, moving.length - self.random.randint(1, 9))
        to = self.staying.resume_point(staying, wanted)
        assert self.moving.resume_point(moving, wanted) == to
        self.moving.rollback(moving, to=to)
        self.staying.rollback(staying, to=to)
        # By a return to a checkpoint, a sequence may have changed its place.
        self.hosted = {p[0] for p in self.pairs if p[0].is_on_host}

    def fork(self) -> None:
        (moving, staying), mark = self.pick(live=False), self.random.random() < 0.4
        copies = (m.checkpoint(s) if mark else m.fork(s) for m, s in ((self.moving, moving), (self.staying, staying)))
        self.add(*copies, is_hosted=moving in self.hosted)

    def reorder(self) -> None:
        moves = {self.pick(): self.pick(live=False) for _ in range(3)}
        for side, memory in enumerate((self.moving, self.staying)):
            memory.reorder({target[side]: source[side] for target, source in moves.items()})
        were = self.hosted.copy()
        for target, source in moves.items():
            (self.hosted.add if source[0] in were else self.hosted.discard)(target[0])

    def move(self) -> None:
        sequence = self.pick(live=False)[0]
        n_bytes = self.held_bytes(sequence)
        if sequence in self.hosted:
            self.moving.to_device(sequence)
            self.hosted.remove(sequence)
        else:
            self.moving.to_host(sequence)
            self.hosted.add(sequence)
        assert self.held_bytes(sequence) == n_bytes

    def held_bytes(self, sequence: Sequence) -> int:
        """Return the bytes held in both places together."""
        usage = self.moving.usage()
        assert usage.on_host is not None and usage.on_host.by_sequence.keys() == {s.id for s in self.hosted}
        on_host = usage.on_host.by_sequence[sequence.id].total_bytes if sequence in self.hosted else 0
        assert usage.by_sequence[sequence.id].total_bytes == self.moving.counters.held_bytes(sequence)
        return on_host + self.moving.counters.held_bytes(sequence)

    def swap(self) -> None:
        for side, memory in zip(self.pick(live=False), (self.moving, self.staying), strict=True):
            memory.swap_out(side)
            memory.check()
            assert not side.is_on_host
            memory.swap_in(side)
            self.hosted.discard(side)

    def save(self) -> None:
        copies = []
        for side, memory in zip(self.pick(live=False), (self.moving, self.staying), strict=True):
            memory.save(side, "memory://host-pages/saved")
            copies.append(memory.load("memory://host-pages/saved"))
        self.add(*copies, is_hosted=False)

    def close(self) -> None:
        pair = self.pick(live=False)
        if len(self.pairs) > 2:
            self.pairs.remove(pair)
            self.hosted.discard(pair[0])
            self.moving.close(pair[0])
            self.staying.close(pair[1])

    def check(self) -> None:
        self.moving.check()
        assert {p[0] for p in self.pairs if p[0].is_on_host} == self.hosted
        for moving, staying in self.pairs:
            assert moving.tokens.tolist() == staying.tokens.tolist() and moving.horizon == staying.horizon
            assert self.held_bytes(moving) == self.staying.counters.held_bytes(staying)


@few_cases
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_goes_on_bit_for_bit_wherever_it_is(kind: str, tmp_path: Path) -> None:
    pair = Pair(make_subject(kind, tmp_path), seed=KINDS.index(kind))
    for _ in range(3):
        pair.open()
    pair.moving.to_host(pair.pairs[0][0])  # The sequence is empty, so it begins in host memory.
    pair.hosted.add(pair.pairs[0][0])
    acts = (
        [pair.step] * 5 + [pair.move] * 3 + [pair.rollback, pair.fork, pair.reorder, pair.swap, pair.save, pair.close]
    )
    for _ in range(70):
        act = pair.random.choice(acts)
        if len(pair.pairs) < 8 or act not in (pair.fork, pair.save):
            act()
            pair.check()
    assert pair.n_mixed > 4
    for moving, _ in pair.pairs:
        pair.moving.close(moving)
    pair.moving.check()
    usage = pair.moving.usage()
    assert usage.on_host is not None and usage.used_bytes == usage.on_host.used_bytes == 0


def hosted(budget: str = "64KiB", host_pages: str = "64KiB", **options: Any) -> tuple[Toy, HybridMemory]:
    model = Toy()
    return model, HybridMemory(
        model.memory_spec, budget, rollback_window=4, page_tokens=4, poison=True, host_pages=host_pages, **options
    )


def on_host(memory: HybridMemory) -> int:
    usage = memory.usage()
    assert usage.on_host is not None
    return usage.on_host.used_bytes


def test_pages_are_where_they_are_said_to_be() -> None:
    """Every byte of the other place is overwritten, and no output changes."""
    model, memory = hosted()
    sequence, other = memory.open(), memory.open()
    memory.run(model, {sequence: list(range(17)), other: list(range(9))})
    expected = memory.run(model, {memory.fork(sequence): [3, 5]})
    memory.to_host(sequence)
    memory.close(other)
    near, far = (bytes_of(memory).view(torch.float32) for bytes_of in (arena_bytes, host_bytes))
    free = torch.isnan(near)
    fork = memory.fork(sequence)
    near[: near.numel() // 2] = torch.nan  # Pages are at the low end, and states at the high end.
    assert not free.all() and not torch.isnan(far).all()
    assert torch.equal(memory.run(model, {fork: [3, 5]}), expected)  # type: ignore[arg-type]
    far[:] = torch.nan
    assert torch.isnan(memory.run(model, {memory.fork(sequence): [3, 5]})).any()  # type: ignore[arg-type]


def test_whoever_looks_sees_them() -> None:
    from hybridmem.memory.pictures import fork_tree, layer_map
    from hybridmem.memory.pictures.forks import grow, share_out
    from hybridmem.memory.pictures.layers import layer_rows

    model, memory = hosted()
    sequence, other = memory.open(), memory.open()
    memory.run(model, {sequence: list(range(17)), other: [1, 2]})
    rows = layer_rows(memory, sequence)
    memory.to_host(sequence)
    assert layer_rows(memory, sequence) == rows
    assert (
        "in host memory 1.88 KiB: keys and values" in sequence._repr_html_()
        and "in host memory" not in other._repr_html_()
    )
    fork = memory.fork(sequence)
    memory.run(model, {fork: [3]})
    usage = memory.usage()
    assert (
        usage.on_host is not None and usage.on_host.shared == {"pages": 4 * 384} and usage.on_host.used_bytes == 6 * 384
    )
    for text in (str(usage), usage._repr_html_()):
        assert text.count("in host memory") == 3, "in the summary and in two tables"
    assert "in host memory 2.25 KiB of 64 KiB in 2 sequences (pages 2.25 KiB)" in repr(memory)
    root = grow([sequence, fork], {s.id: s.tokens for s in (sequence, fork)})
    inventory = memory.counters.host_inventory(sequence, fork)
    assert inventory is not None
    share_out(root, inventory)
    assert root.n_bytes == 4 * 384 and sum(node.n_bytes for node in root.below) == 2 * 384
    assert "keys and values in host memory" in layer_map(memory, fork).get_suptitle()
    assert fork_tree(memory).axes


def test_tokens_are_dropped_there() -> None:
    table = Table(UNROTATED)
    memory = table.memory(host_pages="64KiB")
    sequence = memory.open()
    table.feed(memory, sequence, range(30))
    memory.to_host(sequence)
    mark = memory.checkpoint(sequence)
    memory.drop(sequence, 5, 11)
    memory.check()
    assert sequence.is_on_host
    table.assert_is(memory, sequence, [*range(5), *range(11, 30)])
    table.assert_is(memory, mark, list(range(30)))
    small = table.memory(host_pages="6KiB")
    sequence = small.open()
    small.to_host(sequence)
    table.feed(small, sequence, range(30))
    used_bytes = on_host(small)
    with pytest.raises(CapacityError, match="host memory") as caught:
        small.drop(sequence, 1, 2)
    assert caught.value.unit == HOST_UNIT and on_host(small) == used_bytes
    small.check()
    table.assert_is(small, sequence, list(range(30)))


def books(memory: HybridMemory) -> Any:
    """Return all books except the lists of free blocks."""
    usage = memory.usage()
    assert usage.on_host is not None
    return [
        (u.held, u.shared, {i: (s.held, s.shared_bytes) for i, s in u.by_sequence.items()})
        for u in (usage, usage.on_host)
    ]


def test_a_full_host_refuses_and_changes_nothing() -> None:
    model, memory = hosted(host_pages="4KiB")
    there, here = memory.open(), memory.open()
    memory.run(model, {there: list(range(16)), here: [1] * 40})
    memory.to_host(there)
    before = books(memory)
    with pytest.raises(CapacityError, match=r"bytes of host memory.*to_device") as caught:
        memory.to_host(here)
    assert caught.value.unit == HOST_UNIT and caught.value.needed == 10 * 384 and caught.value.free == 4096 - 4 * 384
    with pytest.raises(CapacityError) as caught, memory.step({here: [1], there: [2] * 40}):
        pass
    assert caught.value.unit == HOST_UNIT and not here.is_on_host
    memory.check()
    assert books(memory) == before
    memory.run(model, {here: [1], there: [2] * 4})


def test_a_full_device_refuses_and_changes_nothing() -> None:
    model, memory = hosted(budget="8KiB")
    there, here = memory.open(), memory.open()
    memory.to_host(there)
    memory.run(model, {there: [1] * 60})
    memory.run(model, {here: [1] * 20})
    before = books(memory)
    with pytest.raises(CapacityError, match="larger budget") as caught:
        memory.to_device(there)
    assert (
        caught.value.unit == BUDGET_UNIT and caught.value.needed == 15 * 384 and caught.value.free == memory.free_bytes
    )
    with pytest.raises(CapacityError, match="larger budget"), memory.step({there: [1], here: [1] * 60}):
        pass
    memory.check()
    assert books(memory) == before and there.is_on_host
    memory.run(model, {there: [1] * 30, here: [1]})


def test_cached_prefixes_make_room_there() -> None:
    """Only checkpoints in host memory are closed. Closing those on the device would not help."""
    model, memory = hosted(host_pages="3KiB")
    cache = PrefixCache(memory)
    first, second = memory.open(), memory.open()
    memory.run(model, {first: list(range(16)), second: [1] * 16})
    cache.insert(second)
    memory.to_host(first)
    with pytest.raises(CapacityError), memory.step({first: [1] * 40}):
        pass
    assert cache.stats().n_checkpoints == 1
    cache.insert(first)
    memory.rollback(first, to=0)
    memory.run(model, {first: [2] * 24})
    assert first.is_on_host and cache.stats().n_evicted


def test_a_dry_run_keeps_the_books_of_both() -> None:
    model, memory = hosted()
    dry = HybridMemory(model.memory_spec, "64KiB", rollback_window=4, page_tokens=4, host_pages="64KiB", device="meta")
    for own in (memory, dry):
        a, b = own.open(), own.open()
        own.run(None if own is dry else model, {a: list(range(18)), b: list(range(5))})
        own.to_host(a)
        own.fork(a)
        own.run(None if own is dry else model, {a: [1, 2, 3], b: [1]})
        own.swap_out(b)
        own.check()
    assert books(dry) == books(memory) and on_host(dry) > 0


def test_what_cannot_be_is_refused() -> None:
    spec = Toy().memory_spec
    with pytest.raises(SpecError, match="host_attention='there'"):
        HybridMemory(spec, host_pages="1MiB", host_attention="there")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="host_pages="):
        HybridMemory(spec, host_attention="compute")
    with pytest.raises(SpecError, match="no attention"):
        HybridMemory(Toy(attention=False).memory_spec, host_pages="1MiB")
    with pytest.raises(SpecError, match="too few for one sequence of toy; give 1,536 or more"):
        HybridMemory(spec, host_pages=64)
    memory = HybridMemory(spec)
    sequence = memory.open()
    with pytest.raises(SpecError, match="host_pages"):
        memory.to_host(sequence)
    assert not sequence.is_on_host and memory.usage().on_host is None and memory.counters.host_inventory() is None
    _, memory = hosted()
    with pytest.raises(SequenceError):
        memory.to_host(sequence)
    sequence = memory.open()
    memory.swap_out(sequence)
    with pytest.raises(SequenceError, match="swapped out"):
        memory.to_device(sequence)
    with pytest.raises(SequenceError, match="open step"), memory.step({(own := memory.open()): [1]}):
        memory.to_host(own)


def test_check_notices_what_is_in_two_places() -> None:
    model = Toy(window=5)
    memory = HybridMemory(model.memory_spec, "1MiB", page_tokens=4, host_pages="64KiB")
    sequence = memory.open()
    memory.run(model, {sequence: list(range(9))})
    memory.to_host(sequence)
    kinds = [kind for kind in layer_memories(memory).values() if isinstance(kind, HostedAttention)]
    assert len(kinds) == 2
    for chosen in (kinds, kinds[:1]):
        for kind in chosen:
            kind.moved(sequence.slot, is_far=False)
        with pytest.raises(IntegrityError):
            memory.check()
        for kind in chosen:
            kind.moved(sequence.slot, is_far=True)
    lost = host_arena(memory).allocate(64, from_top=False)
    with pytest.raises(IntegrityError):
        memory.check()
    assert lost is not None
    host_arena(memory).free(lost, 64)
    memory.check()


def test_what_the_host_computes_is_sent_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test only looks at where tensors go, and in which order.

    The CPU stands for the device, and a host without numbers for the host.
    """
    spec, calls, moved = AttentionSpec(4, 2, 8), list[str](), Tensor.to

    def kind(name: str, fill: float, place: str) -> Any:
        def attend(plan: Any, index: int, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
            calls.append(name)
            assert scoring.sinks_H is not None and scoring.scale == 0.5 and scoring.window is None
            assert {x.device.type for x in (q, k, v, scoring.sinks_H)} == {place} and len(q) == len(k) == len(
                plan.token_ids
            )
            return torch.full((len(q), 4, 8), fill)

        return SimpleNamespace(attend=attend, plan=lambda packed: packed)

    def spy(x: Tensor, device: torch.device) -> Tensor:
        calls.extend(["moved"] if device.type == "meta" else [])
        return moved(x, device)

    monkeypatch.setattr(Tensor, "to", spy)
    stores: Any = [
        SimpleNamespace(device=torch.device(name), upload=torch.from_numpy, journal=Journal())
        for name in ("cpu", "meta")
    ]
    both = HostedAttention(kind("near", 1.0, "cpu"), kind("far", 2.0, "meta"), *stores, [spec], torch.float32)
    both.moved(1, is_far=True)
    tokens = TokenLists.of([np.arange(3), np.arange(2)])
    for slots, expected in (([1, 2], [1.0, 1.0, 2.0, 2.0, 2.0]), ([2, 1], [2.0, 2.0, 1.0, 1.0, 1.0])):
        calls.clear()
        plan = both.plan(pack(tokens, np.array(slots), np.zeros(2, np.int64), np.zeros(2, np.int64)))
        rows = [torch.randn(5, heads, 8) for heads in (4, 2, 2)]
        out = both.attend(plan, 0, *rows, Scoring(0.5, sinks_H=torch.zeros(4)))
        assert out.device.type == "cpu" and out[:, 3, 7].tolist() == expected and (out == out[:, :1, :1]).all()
        assert calls == [*["moved"] * 4, "near", "far"], "while the host computes, the device must have something to do"
        assert not plan.can_capture


@only_in_long
def test_host_memory_is_pinned_as_long_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[tuple[int, ...]]()

    class Runtime:
        answer = 0

        def cudaHostRegister(self, address: int, n_bytes: int, flags: int) -> int:
            calls.append((address, n_bytes, flags))
            return self.answer

        def cudaHostUnregister(self, address: int) -> None:
            calls.append((address,))

    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda index: None)
    store = host_store(1 << 16, torch.device("cuda", 1), "compute", poison=True, journal=Journal())
    assert store.device == torch.device("cpu") and store.arena.unit == HOST_UNIT
    own = store.flat(Field(0, (1 << 16,), torch.uint8))
    address = own.data_ptr()
    assert calls == [(address, 1 << 16, 3)] and (own == 0xFF).all()
    kept = own[5:]
    del store, own
    gc.collect()
    assert len(calls) == 1 and (kept == 0xFF).all()
    del kept
    gc.collect()
    assert calls[1:] == [(address,)]
    runtime.answer = 2
    with pytest.raises(SpecError, match="bytes of host memory"):
        host_store(1 << 16, torch.device("cuda", 1), "compute", poison=False, journal=Journal())
