"""One memory stores sequences, and another continues them bit for bit. It refuses what does not belong to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hybridmem.chat.engine.blank_drafts import BlankDrafter
from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine
from hybridmem.cluster.routing.prompts import TokenPrompt
from hybridmem.cluster.serving.mover import Mover
from hybridmem.cluster.store.health import StoreHealth
from hybridmem.cluster.store.place import Place
from hybridmem.cluster.store.sequences import Quota, SequenceStore
from hybridmem.memory import HybridMemory, MismatchError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import LanguageModel, load_model


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


def test_a_replica_fetches_what_the_draft_head_of_another_remembers(tmp_path: Path) -> None:
    model: Any = load_model("embedded", draft_head=True)
    place, health = Place(str(tmp_path / "store")), StoreHealth(Clock())
    movers, engines = list[Mover](), list[Engine]()
    for _ in range(2):
        own = HybridMemory(model.draft_head.memory_spec, "8MiB", rollback_window=16)
        drafter = BlankDrafter(model, model.draft_head, own, prefixes=PrefixCache(own))
        memory = HybridMemory(model.memory_spec, "32MiB", rollback_window=16)
        prefixes, speculation = PrefixCache(memory), Speculation(adapts=False, drafter=drafter)
        engines.append(Engine(model, memory, None, stop_ids=(), prefixes=prefixes, speculation=speculation))
        store = SequenceStore(place, memory.archive.signature, Quota(1 << 30, 3600.0), Clock())
        movers.append(Mover(engines[-1], prefixes, store, health, least_tokens=16))
    tokens = list(range(20, 120))
    said = engines[0].submit(tokens, max_tokens=20, owner=b"a")
    engines[0].run()
    text = np.array([*tokens, *said.token_ids[:-1]])
    packed = movers[0].pack(TokenPrompt(text.astype("<i4").tobytes(), b"a"))
    assert packed is not None
    stand, write = packed
    write()
    prompt = TokenPrompt(np.append(text, 5).astype("<i4").tobytes(), b"a")
    assert movers[1].fetch(prompt, stand) == stand.n_tokens == len(text)
    texts = engines[1].drafted_texts
    assert texts is not None and texts.hold(text, b"a") and not texts.hold(text, b"b")
