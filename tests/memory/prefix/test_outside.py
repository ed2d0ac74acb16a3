"""Checkpoints that give way move to host memory and files, and come back. Each continues bit for bit."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest
import torch

from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.storage import tiers
from tests.extent import few_cases, pick
from tests.subjects import Subject, make_subject
from tests.tolerances import assert_kernel_close

WINDOW = 4
SUBJECTS = "toy", "toy-window", "toy-h2o", "toy-4-bit", "jamba", "mamba replay", "toy-attention"


@pytest.fixture(params=SUBJECTS, scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param))


def run(subject: Subject, cache: PrefixCache, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Answer each prompt through the cache. Every 8 tokens become a checkpoint."""
    rows = list[torch.Tensor]()
    for tokens in prompts:
        sequence, lookup = cache.open(tokens)
        at = lookup.reused
        for cut in [*cache.cuts(tokens, at), len(tokens)]:
            (row,) = cache.memory.run(subject.model, {sequence: tokens[at:cut]})
            at = cut
            cache.insert(sequence)
        rows.append(row)
        cache.memory.close(sequence)
        cache.memory.check()
    return rows


def prompts_of(rng: random.Random, n: int) -> list[list[int]]:
    """Return prompts that begin as earlier ones do, and part from them anywhere."""
    made: list[list[int]] = []
    for _ in range(n):
        base = rng.choice(made) if made and rng.random() < 0.85 else []
        made.append(base[: rng.randint(0, len(base))] + [rng.randrange(10) for _ in range(rng.randint(1, 30))])
    return made


@few_cases
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_gave_way_is_found_again_and_continues_bit_for_bit(subject: Subject, tmp_path: Path, tier: str) -> None:
    """A memory with room for everything must give the same lookups."""
    prompts = prompts_of(random.Random(tier), pick(14, 24))
    with subject.memory(WINDOW) as roomy:
        plenty = PrefixCache(roomy, grid_tokens=8)
        expected = run(subject, plenty, prompts)
        most_bytes, n_reused = roomy.usage().used_bytes, plenty.stats().n_reused
        least = roomy.counters.needed_bytes(max(map(len, prompts)))
    options = {"host_budget": 1, "swap_dir": tmp_path} if tier == "disk" else {}
    with subject.memory(WINDOW, budget=max(3 * least, most_bytes // 6), **options) as tight:
        cache = PrefixCache(tight, grid_tokens=8, max_bytes="1GiB")
        found = run(subject, cache, prompts)
        stats = cache.stats()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert stats.n_reused == n_reused and not stats.n_evicted
        if most_bytes > tight.budget:
            assert stats.n_moved and stats.n_returned
        if tier == "disk" and stats.n_outside:
            assert tight.usage().disk_bytes and not tight.usage().host_bytes and list(tmp_path.iterdir())
        cache.clear()
        assert sum(tight.counters.swapped_bytes) == 0 and tight.usage().used_bytes == 0
        assert not list(tmp_path.iterdir())


def test_shared_pages_are_outside_once_and_are_shared_again(subject: Subject) -> None:
    """The checkpoints of one prompt are a chain.

    They take as many bytes outside as inside, not a copy of the prefix each.
    """
    tokens = [i % 10 for i in range(96)]
    with subject.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=8, max_bytes="1GiB")
        run(subject, cache, [tokens])
        inside = memory.usage().used_bytes
        while cache.reclaim(memory.budget):
            memory.check()
        assert memory.usage().used_bytes == 0
        outside = sum(memory.counters.swapped_bytes)
        assert inside <= outside <= 1.25 * inside
        for length in range(95, 8, -8):
            sequence, lookup = cache.open(tokens[:length])
            assert lookup.reused and lookup.tier == "host"
            memory.close(sequence)
            memory.check()
        assert memory.usage().used_bytes <= inside


def test_prompts_that_part_where_no_checkpoint_is_share_their_pages_outside(subject: Subject) -> None:
    tokens = [i % 10 for i in range(96)]
    with subject.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=0, max_bytes="1GiB")
        run(subject, cache, [[*tokens, 1, i] for i in range(2)])
        inside = memory.usage().used_bytes
        cache.reclaim(memory.budget)
        assert memory.usage().used_bytes == 0
        assert sum(memory.counters.swapped_bytes) == inside
        run(subject, cache, [[*tokens, 1, 2]])
        cache.open([*tokens, 1, 0, 0])
        cache.open([*tokens, 1, 1, 1])
        memory.check()
        assert memory.usage().used_bytes < 2 * inside


def test_where_files_cannot_be_written_checkpoints_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = make_subject("toy", tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with toy.memory(WINDOW, host_budget=1, swap_dir=tmp_path / "swap") as memory:
        cache = PrefixCache(memory, grid_tokens=8, max_bytes="1GiB")
        run(toy, cache, prompts_of(random.Random(1), 6))
        held = cache.stats().n_checkpoints
        cache.reclaim(memory.usage().used_bytes // 2)
        moved = cache.stats().n_moved
        monkeypatch.setattr("hybridmem.memory.storage.local_files.Path.replace", full)
        while cache.reclaim(memory.budget):
            memory.check()
        stats = cache.stats()
        assert (stats.n_moved, stats.n_checkpoints, stats.n_evicted) == (moved, moved, held - moved)
        assert len([path for path in (tmp_path / "swap").iterdir() if path.suffix == ".part"]) == 0


def test_files_are_read_while_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`fetch` returns at once, however slow the store is. Once the files have arrived, `open` waits for nothing."""
    toy, tokens, may_read = make_subject("toy", tmp_path), [i % 10 for i in range(40)], threading.Event()
    with toy.memory(WINDOW, host_budget=1, swap_dir=tmp_path / "swap") as memory:
        cache = PrefixCache(memory, grid_tokens=8, max_bytes="1GiB")
        (expected,) = run(toy, cache, [tokens])
        while cache.reclaim(memory.budget):
            pass
        read = tiers.read_blocks
        monkeypatch.setattr(tiers, "read_blocks", lambda path: may_read.wait(600) and read(path))
        (checkpoint,) = cache.fetch(tokens)
        assert not cache.has_arrived(checkpoint) and cache.find(tokens).tier == "disk"
        memory.run(toy.model, {memory.open(): [1, 2, 3]})
        may_read.set()
        while not cache.has_arrived(checkpoint):
            time.sleep(0.001)
        monkeypatch.setattr(tiers, "read_blocks", None)  # From now on every read fails.
        sequence, lookup = cache.open(tokens)
        assert lookup.reused == 39
        assert_kernel_close(memory.run(toy.model, {sequence: tokens[39:]})[0], expected, torch.float32)
