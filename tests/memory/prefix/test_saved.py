"""A cache that is saved and loaded, in the same process or another one, finds and continues the same prefixes."""

from __future__ import annotations

import gc
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridmem.memory import FormatError, SpecError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.storage import folder_writing, folders, tiers
from tests.extent import few_cases, only_in_long
from tests.memory.prefix.test_outside import WINDOW, prompts_of, run
from tests.subjects import Subject, make_subject
from tests.tolerances import assert_kernel_close

SUBJECTS = "toy", "toy-window", "toy-h2o", "toy-4-bit", "jamba", "mamba replay"


@pytest.fixture(params=SUBJECTS, scope="module")
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject(request.param, tmp_path_factory.mktemp(request.param))


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@few_cases
def test_a_loaded_cache_is_the_saved_one(subject: Subject, tmp_path: Path) -> None:
    """Some checkpoints are outside, and there are several owners.

    Rows equal those of the cache that was never saved.
    """
    rng = random.Random(3)
    first, second = prompts_of(rng, 12), prompts_of(rng, 2)
    second += [[*prompt[: rng.randint(1, len(prompt))], 7, 3] for prompt in first]
    with subject.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=8, max_bytes="1GiB")
        run(subject, cache, first)
        cache.reclaim(memory.usage().used_bytes // 2)
        n_bytes = cache.save(tmp_path / "saved")
        n_checkpoints = cache.stats().n_checkpoints
        assert 0 < cache.stats().n_outside < n_checkpoints
        before = cache.stats().n_reused
        expected = run(subject, cache, second)
        reused = cache.stats().n_reused - before
    assert n_bytes == sum(bytes_of_tensors(path) for path in (tmp_path / "saved").glob("blocks-*"))
    with subject.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=8)
        assert cache.load(tmp_path / "saved") == n_checkpoints
        memory.check()
        assert memory.usage().used_bytes == 0
        found = run(subject, cache, second)
        assert cache.stats().n_reused == reused
        for a, b in zip(found, expected, strict=True):
            assert_kernel_close(a, b, torch.float32)
        # A second save does not write again what has not changed.
        stamps = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "saved").iterdir()}
        cache.save(tmp_path / "saved")
        same = [name for name in files(tmp_path / "saved") if stamps.get(name) and name.startswith("blocks")]
        assert same
        assert all((tmp_path / "saved" / name).stat().st_mtime_ns == stamps[name] for name in same)
        cache.clear()
        assert cache.save(tmp_path / "saved") == 0
    assert files(tmp_path / "saved") == {"checkpoints.safetensors"}


def bytes_of_tensors(path: Path) -> int:
    content = path.read_bytes()
    return len(content) - 8 - int.from_bytes(content[:8], "little")


def saved(subject: Subject, folder: Path, owner: object = None) -> list[list[int]]:
    prompts = prompts_of(random.Random(5), 8)
    with subject.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=8)
        for tokens in prompts:
            sequence, lookup = cache.open(tokens, owner)
            memory.run(subject.model, {sequence: tokens[lookup.reused :]})
            cache.insert(sequence, owner)
            memory.close(sequence)
        cache.save(folder)
    return prompts


@only_in_long
@pytest.mark.parametrize("name", ["toy", "toy-window", "jamba", "mamba replay"])
def test_a_cache_may_change_while_it_is_saved(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever the lock is free, checkpoints are closed and moved, and others take their blocks.

    Lossy subjects are left out: their outputs depend on where prompts were cut, and this test cuts elsewhere.
    """
    subject = make_subject(name, tmp_path)
    monkeypatch.setattr("hybridmem.memory.storage.folder_writing.LOT_BYTES", 1)
    rng = random.Random(6)
    prompts, later = prompts_of(rng, 12), iter(prompts_of(rng, 60))

    class Lock:
        is_held, n_freed = False, 0

        def __enter__(self) -> None:
            self.is_held = True

        def __exit__(self, *error: object) -> None:
            self.is_held, self.n_freed = False, self.n_freed + 1
            if self.n_freed % 3 == 0:
                cache.reclaim(memory.usage().used_bytes // 4)
            run(subject, cache, [next(later)])

    write, lock = folder_writing.write_blocks, Lock()

    def write_while_free(*arguments: Any) -> None:
        assert not lock.is_held
        write(*arguments)

    monkeypatch.setattr(folder_writing, "write_blocks", write_while_free)
    with subject.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=8, max_bytes="1GiB")
        run(subject, cache, prompts)
        cache.save(tmp_path / "saved", lock)
        assert lock.n_freed > 5 and cache.stats().n_outside
    with subject.memory(WINDOW) as memory:
        alone = PrefixCache(memory, grid_tokens=8)
        expected = run(subject, alone, prompts)
        alone.clear()
        assert alone.load(tmp_path / "saved") > 5
        for a, b in zip(run(subject, alone, prompts), expected, strict=True):
            assert_kernel_close(a, b, torch.float32)


@pytest.mark.parametrize("owner", [None, "alice", b"\x00\xff", 7])
def test_owners_find_what_was_theirs(tmp_path: Path, owner: object) -> None:
    toy = make_subject("toy", tmp_path)
    prompts = saved(toy, tmp_path / "saved", owner)
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory)
        assert cache.load(tmp_path / "saved")
        assert cache.find(prompts[-1], owner).reused and not cache.find(prompts[-1], "another").reused


def test_odd_owners_and_other_memories_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    toy = make_subject("toy", tmp_path)
    with pytest.raises(SpecError, match="owner"):
        saved(toy, tmp_path / "odd", ("a", "b"))
    assert not files(tmp_path / "odd")
    saved(toy, tmp_path / "saved")
    with toy.memory(WINDOW + 1) as memory:
        cache = PrefixCache(memory)
        with pytest.raises(FormatError, match="rollback_window"):
            cache.load(tmp_path / "saved")
        with pytest.raises(FormatError, match="nowhere"):
            cache.load(tmp_path / "nowhere")
        assert not memory.sequences and not cache.stats().n_checkpoints


@pytest.mark.parametrize("damage", ["torn", "gone", "other bytes"])
def test_a_damaged_file_costs_its_checkpoints_and_no_others(tmp_path: Path, damage: str) -> None:
    toy = make_subject("toy", tmp_path)
    prompts = saved(toy, tmp_path / "saved")
    hurt = sorted((tmp_path / "saved").glob("blocks-*"))[0]
    content = bytearray(hurt.read_bytes())
    if damage == "gone":
        hurt.unlink()
    else:
        content[-1] ^= 1
        hurt.write_bytes(content[:-5] if damage == "torn" else content)
    with toy.memory(WINDOW) as memory, toy.memory(WINDOW) as fresh:
        cache = PrefixCache(memory, grid_tokens=8)
        n = cache.load(tmp_path / "saved")
        rows = run(toy, cache, prompts)
        for tokens, row in zip(prompts, rows, strict=True):
            assert_kernel_close(row, fresh.run(toy.model, {fresh.open(): tokens})[0], torch.float32)
        stats = cache.stats()
        assert 0 < stats.n_lost < n and stats.n_returned


def test_tokens_that_checkpoints_have_in_common_are_loaded_once(tmp_path: Path) -> None:
    """A loaded chain of checkpoints has one token buffer, as a chain that was made here.

    With a buffer for each, they would take half a megabyte.
    """
    toy = make_subject("toy", tmp_path)
    tokens = np.arange(2048) % 10
    with toy.memory(WINDOW, budget="64MiB") as memory:
        cache = PrefixCache(memory, grid_tokens=32)
        run(toy, cache, [tokens.tolist()])
        cache.save(tmp_path / "saved")
    with toy.memory(WINDOW, budget="64MiB") as memory:
        cache = PrefixCache(memory)
        tracemalloc.start()
        before = tracemalloc.take_snapshot()
        try:
            assert cache.load(tmp_path / "saved") == 64
            grown = tracemalloc.take_snapshot().compare_to(before, "filename")
        finally:
            tracemalloc.stop()
        assert sum(entry.size_diff for entry in grown if "ledger" in str(entry.traceback)) < 1 << 17
        memory.check()


def test_nothing_of_others_is_in_the_folder(tmp_path: Path) -> None:
    """Such bytes are rows of other sequences, of tokens that were taken back, and of closed checkpoints."""
    toy = make_subject("toy", tmp_path)
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=0, max_bytes="1GiB")
        stranger = memory.open()
        memory.run(toy.model, {stranger: [9] * 13})
        for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 8, 8, 8]):
            sequence, lookup = cache.open(tokens)
            memory.run(toy.model, {sequence: tokens[lookup.reused :]})
            memory.run(toy.model, {sequence: [9, 9]})
            memory.rollback(sequence, n_tokens=2)
            cache.insert(sequence)
            memory.close(sequence)
        cache.save(tmp_path / "with")
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=0)
        for tokens in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 8, 8, 8]):
            sequence, lookup = cache.open(tokens)
            memory.run(toy.model, {sequence: tokens[lookup.reused :]})
            memory.run(toy.model, {sequence: [4, 7]})
            memory.rollback(sequence, n_tokens=2)
            cache.insert(sequence)
            memory.close(sequence)
        cache.save(tmp_path / "without")
    assert {p.name: p.read_bytes() for p in (tmp_path / "with").iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "without").iterdir()
    }


class Killed(BaseException):
    """Stands for the end of a process: nothing runs after it."""


@pytest.mark.parametrize("end", [OSError(28, "No space left on device"), Killed()], ids=["full disk", "killed"])
def test_a_save_that_ends_anywhere_leaves_the_one_before_or_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    """The n-th call of the file system fails, for n = 1, 2, ... until the save succeeds.

    Then no orphaned file is left.
    """
    toy, folder = make_subject("toy", tmp_path), tmp_path / "saved"
    first = prompts_of(random.Random(1), 3)
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=8)
        run(toy, cache, first)
        cache.save(folder)
        n_first = cache.stats().n_checkpoints
        run(toy, cache, prompts_of(random.Random(2), 3))
        n_second = cache.stats().n_checkpoints
        assert n_second > n_first
        for n in range(1, 200):
            calls = count(1)
            with monkeypatch.context() as patch:

                def fail(patched: Callable[..., Any], n: int = n, calls: Iterator[int] = calls) -> Callable[..., Any]:
                    def call(*arguments: Any, **options: Any) -> Any:
                        if next(calls) == n:
                            raise end
                        return patched(*arguments, **options)

                    return call

                patch.setattr(os, "fsync", fail(os.fsync))
                patch.setattr(Path, "replace", fail(Path.replace))
                patch.setattr(os, "open", fail(os.open))
                if isinstance(end, Killed):
                    patch.setattr(Path, "unlink", lambda *_, **__: None)
                try:
                    cache.save(folder)
                    is_saved = True
                except (OSError, Killed):
                    is_saved = False
            memory.check()
            with toy.memory(WINDOW) as other:
                assert PrefixCache(other).load(folder) in ((n_second,) if is_saved else (n_first, n_second))
            if is_saved:
                break
        assert n > 8
        cache.save(folder)
        assert not [name for name in files(folder) if name.endswith(".part")]
        with toy.memory(WINDOW) as other:
            loaded = PrefixCache(other, grid_tokens=8)
            loaded.load(folder)
            run(toy, loaded, first)
            assert not loaded.stats().n_lost


def test_what_the_folder_has_is_neither_read_nor_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy, folder = make_subject("toy", tmp_path), tmp_path / "saved"
    prompts = saved(toy, folder)
    touched = list[str]()

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path, *rest, **options: (touched.append(Path(path).name), call(path, *rest, **options))[1]

    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=8, max_bytes="1GiB")
        cache.load(folder)
        monkeypatch.setattr(tiers, "read_blocks", noted(tiers.read_blocks))
        for module in (folders, folder_writing):
            monkeypatch.setattr(module, "write_blocks", noted(folders.write_blocks))
        n_bytes, before = cache.save(folder), files(folder)
        assert touched == ["checkpoints.safetensors"] and n_bytes > 0
        run(toy, cache, [[*prompts[0], 5]])
        cache.save(folder)
        touched.clear()
        assert cache.save(folder) > n_bytes and touched == ["checkpoints.safetensors"]
        assert cache.save(tmp_path / "other") > n_bytes
        assert before < files(folder) == files(tmp_path / "other")
    with toy.memory(WINDOW) as memory, toy.memory(WINDOW) as fresh:
        for place in (folder, tmp_path / "other"):
            cache = PrefixCache(memory, grid_tokens=8)
            cache.load(place)
            rows = run(toy, cache, prompts)
            for tokens, row in zip(prompts, rows, strict=True):
                assert_kernel_close(row, fresh.run(toy.model, {fresh.open(): tokens})[0], torch.float32)
            assert not cache.stats().n_lost
            cache.clear()


def test_checkpoints_whose_files_are_damaged_are_left_out(tmp_path: Path) -> None:
    toy = make_subject("toy", tmp_path)
    with toy.memory(WINDOW, host_budget=1, swap_dir=tmp_path / "swapped") as memory:
        cache = PrefixCache(memory, grid_tokens=8, max_bytes="1GiB")
        prompts = [[first, *range(10), *range(10)] for first in range(4)]  # These prompts share nothing.
        run(toy, cache, prompts)
        cache.reclaim(memory.usage().used_bytes // 2)
        n_checkpoints = cache.stats().n_checkpoints
        hurt = sorted((tmp_path / "swapped").iterdir())[0]
        hurt.write_bytes(hurt.read_bytes()[:-1])
        with pytest.warns(UserWarning, match="is not saved: .*damaged|is not saved: .*never writes"):
            cache.save(tmp_path / "saved")
    with toy.memory(WINDOW) as memory, toy.memory(WINDOW) as fresh:
        cache = PrefixCache(memory, grid_tokens=8)
        assert 0 < cache.load(tmp_path / "saved") < n_checkpoints
        for tokens, row in zip(prompts, run(toy, cache, prompts), strict=True):
            assert_kernel_close(row, fresh.run(toy.model, {fresh.open(): tokens})[0], torch.float32)
        assert not cache.stats().n_lost


def test_files_that_a_cache_has_not_read_yet_stay(tmp_path: Path) -> None:
    """The cache forgets checkpoints that share blocks with another one.

    So these blocks are written to another file.
    """
    toy, folder, prompt = make_subject("toy", tmp_path), tmp_path / "saved", [i % 10 for i in range(64)]
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=8)
        run(toy, cache, [prompt])
        cache.save(folder)
    clock = [0.0]
    for _ in range(2):
        with toy.memory(WINDOW) as memory:
            cache = PrefixCache(memory, grid_tokens=8, seconds_to_live=10, now=lambda: clock[0])
            cache.load(folder)
            cache.pin(prompt)
            clock[0] += 20
            before = files(folder)
            assert cache.find(prompt).reused == 63 and cache.stats().n_checkpoints == 1
            cache.save(folder)
            assert before & files(folder) > {"checkpoints.safetensors"}
            run(toy, cache, [prompt])
            assert cache.stats().n_returned and not cache.stats().n_lost


@only_in_long
def test_who_reads_a_folder_keeps_its_blocks(tmp_path: Path) -> None:
    """Another cache saves to the same folder meanwhile.

    When nobody reads the folder any more, the next save removes what it does not name.
    """
    toy, folder = make_subject("toy", tmp_path), tmp_path / "saved"
    prompts = saved(toy, folder)
    with toy.memory(WINDOW) as memory:
        reader = PrefixCache(memory, grid_tokens=8)
        reader.load(folder)
        before = files(folder)
        with toy.memory(WINDOW) as other:
            writer = PrefixCache(other)
            run(toy, writer, [[1, 2, 3]])
            writer.save(folder)
            assert before < files(folder)
        run(toy, reader, prompts)
        assert reader.stats().n_returned and not reader.stats().n_lost
    del reader, memory
    gc.collect()
    with toy.memory(WINDOW) as other:
        writer = PrefixCache(other)
        writer.load(folder)
        writer.save(folder)
    assert len(files(folder)) == 2
