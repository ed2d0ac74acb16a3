"""At a place where files cannot be locked or read, as on Windows, nobody removes what others hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.storage import local_files
from tests.subjects import make_subject


def test_without_locks_everything_works_and_blocks_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "fcntl", None)
    monkeypatch.delattr(os, "preadv")
    toy, folder, swapped = make_subject("toy", tmp_path), tmp_path / "saved", tmp_path / "swapped"
    swapped.mkdir()
    of_others = swapped / "swapped-0123.safetensors"
    of_others.write_text("another process may use it")
    for n_checkpoints, first in ((1, 1), (2, 2)):
        with toy.memory(4, host_budget=1, swap_dir=swapped) as memory:
            cache = PrefixCache(memory, grid_tokens=0)
            assert not folder.exists() or cache.load(folder) == 1
            sequence = memory.open()
            memory.run(toy.model, {sequence: [first, 2, 3, 4, 5, 6]})
            cache.insert(sequence)
            memory.swap_out(sequence)
            memory.swap_in(sequence)
            memory.save(sequence, tmp_path / "one.safetensors")
            assert memory.load(tmp_path / "one.safetensors").tokens.tolist() == sequence.tokens.tolist()
            cache.save(folder)
            assert cache.stats().n_checkpoints == n_checkpoints
            cache.forget([2, 2, 3, 4, 5, 6])
            cache.save(folder)
            memory.check()
    assert len(list(folder.glob("blocks-*"))) == 2 and of_others.exists()
