"""One memory stores sequences, and another continues them bit for bit. It refuses what does not belong to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridmem.cluster.store.place import Place
from hybridmem.cluster.store.sequences import Quota, SequenceStore
from hybridmem.memory import HybridMemory, MismatchError
from hybridmem.models import LanguageModel


class Clock:
    now = 2e9

    def __call__(self) -> float:
        return self.now


def test_logits_after_a_move_are_the_same_bits(embedded: LanguageModel, tmp_path: Path) -> None:
    here, there = (HybridMemory(embedded.memory_spec, "16MiB") for _ in range(2))
    sequence, tokens = here.open(), list(range(20, 120))
    here.run(embedded, {sequence: tokens})
    mark = here.checkpoint(sequence, holds_tail=True)
    write = here.archive.pack(mark)
    here.close(mark)
    here.run(embedded, {sequence: [1, 2, 3]})  # The packed copy does not change any more.
    write(str(tmp_path / "moved.safetensors"))
    moved = there.archive.open(there.archive.read(tmp_path / "moved.safetensors"))
    assert moved.length == 100 and here.archive.signature == there.archive.signature
    for other in (there.rollback, here.rollback):
        other(moved if other == there.rollback else sequence, to=90)
    assert torch.equal(there.run(embedded, {moved: [5, 6]}), here.run(embedded, {sequence: [5, 6]}))


def test_other_weights_have_another_signature_and_are_refused(embedded: LanguageModel, tmp_path: Path) -> None:
    memory = HybridMemory(embedded.memory_spec, "16MiB")
    other = HybridMemory(replace(embedded.memory_spec, weights="float32:v1:00"), "16MiB")
    sequence = memory.open()
    memory.run(embedded, {sequence: [1, 2, 3]})
    memory.archive.pack(sequence)(str(tmp_path / "x.safetensors"))
    assert memory.archive.signature != other.archive.signature
    with pytest.raises(MismatchError, match="weights"):
        other.archive.read(tmp_path / "x.safetensors")


def test_what_is_old_goes_and_then_the_oldest_until_the_rest_fits(tmp_path: Path) -> None:
    place, clock = Place(str(tmp_path / "store")), Clock()
    store = SequenceStore(place, "ab" * 32, Quota(250, 3600.0), clock)
    for i in range(4):
        digest = bytes([i]) * 16
        store.write(digest, 10, lambda path: Path(path).write_bytes(b"x" * 100))
        age = [7200, 30, 20, 10][i]
        path = Path(store.path(digest, 10))
        path.touch()
        os.utime(path, (clock.now - age, clock.now - age))
        store.mark_hot(digest, 10)
    assert store.sweep() == 200
    assert [store.has(bytes([i]) * 16, 10) for i in range(4)] == [False, False, True, True]
    assert set(store.hot()) == {bytes([2]) * 16, bytes([3]) * 16}


def test_a_replica_starts_while_its_store_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(error: OSError) -> Callable[[str], None]:
        def fail(path: str) -> None:
            raise error

        return fail

    for error, is_down in ((OSError(16, "503"), True), (PermissionError("no"), False)):
        monkeypatch.setattr("hybridmem.cluster.store.place.make_folder", failing(error))
        with nullcontext() if is_down else pytest.raises(PermissionError):
            assert Place("memory://nothing").names("sessions") == []


@pytest.mark.parametrize("scheme", ["folder", "memory"])
def test_a_file_is_created_once(scheme: str, tmp_path: Path) -> None:
    place = Place(str(tmp_path) if scheme == "folder" else f"memory://{np.random.default_rng().integers(1 << 40)}")
    assert place.create("a/b.json", b"1") and not place.create("a/b.json", b"2")
    assert place.read("a/b.json") == b"1" and place.read("a/c.json") is None
    assert place.names("a") == ["b.json"] and place.names("nowhere") == []
    assert [(entry.name, entry.n_bytes) for entry in place.entries("a")] == [("a/b.json", 1)]
    place.remove("a/b.json")
    place.remove("a/b.json")
    assert not place.has("a/b.json")
