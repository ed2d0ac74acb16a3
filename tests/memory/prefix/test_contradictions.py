"""A list of checkpoints that contradicts itself is refused whole, and leaves nothing in the memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridmem.memory import FormatError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.storage.files import write_blocks
from hybridmem.memory.storage.reading import read_blocks
from tests.memory.prefix.test_outside import WINDOW, run
from tests.subjects import Subject, make_subject

Entries = list[dict[str, Any]]


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    return make_subject("toy", tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def folder(toy: Subject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save checkpoints of one prompt at 8, 16 and 20 tokens."""
    place = tmp_path_factory.mktemp("saved")
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory, grid_tokens=8)
        run(toy, cache, [[i % 10 for i in range(20)]])
        cache.save(place)
    return place


def without_file(entries: Entries) -> None:
    entries[0]["file"] = None


def with_more_shared(entries: Entries) -> None:
    for blocks in entries[1]["blocks"].values():
        blocks[0] = 1000


def from_later_file(entries: Entries) -> None:
    for _, runs in entries[0]["blocks"].values():
        for run_of in runs:
            run_of[0] = 2


def with_run_of(n: int) -> Callable[[Entries], None]:
    def change(entries: Entries) -> None:
        for _, runs in entries[0]["blocks"].values():
            for run_of in runs:
                run_of[2] = n

    return change


CONTRADICTIONS: dict[str, Callable[[Entries], object]] = {
    "goes on from itself": lambda entries: entries[1].update(parent=1),
    "records of other layers": lambda entries: entries[1]["records"].popitem(),
    "blocks in no file": without_file,
    "more shared blocks than there are": with_more_shared,
    "blocks of a file that comes later": from_later_file,
    "fewer than no blocks": with_run_of(-1),
    "thousands of millions of blocks": with_run_of(1 << 40),
    "more tokens than there are": lambda entries: entries[2].update(n_tokens=21),
    "a file elsewhere": lambda entries: entries[1].update(file="../blocks.safetensors"),
    "no owner": lambda entries: entries[2].update(label=["bytes", "no hexadecimal digits"]),
    "no entry": lambda entries: entries.__setitem__(2, None),  # type: ignore[call-overload]
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_list_that_contradicts_itself_leaves_nothing(name: str, toy: Subject, folder: Path) -> None:
    path = folder / "checkpoints.safetensors"
    whole = path.read_bytes()
    _, about = read_blocks(str(path))
    CONTRADICTIONS[name](about["entries"])
    with toy.memory(WINDOW) as memory:
        cache = PrefixCache(memory)
        kept = memory.open()
        memory.run(toy.model, {kept: [1, 2, 3]})
        try:
            write_blocks(str(path), {}, {k: v for k, v in about.items() if k != "version"})
            with pytest.raises(FormatError, match="again"):
                cache.load(folder)
        finally:
            path.write_bytes(whole)
        assert memory.sequences == [kept] and not cache.stats().n_checkpoints and not sum(memory.counters.swapped_bytes)
        memory.check()
        assert cache.load(folder) == 3  # The same memory loads the whole folder.
        memory.check()
