"""A thread takes memory for weights ahead of time. Weights are stored there, and unused memory is given back."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import pytest
import torch

from hybridmem import pages_ahead
from hybridmem.models.products import huge_pages

MIB = 1 << 20
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux takes pages ahead of time")


def begun(folder: Path, n_bytes: int) -> pages_ahead.PagesAhead:
    path = folder / "model.gguf"
    with path.open("wb") as file:
        file.truncate(n_bytes)
    pages_ahead.begin(str(path), "cpu")
    ahead = pages_ahead.take()
    assert ahead is not None
    return ahead


def resident_bytes(pages: mmap.mmap) -> int:
    """Ask the kernel for each page. /proc/self/smaps has one line for this memory and neighbours of the same kind."""
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    resident = (ctypes.c_ubyte * (len(pages) // mmap.PAGESIZE))()
    found = ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(pages)), resident)
    assert found == 0, os.strerror(ctypes.get_errno())
    return mmap.PAGESIZE * sum(page & 1 for page in resident)


def test_weights_lie_in_the_pages_and_the_rest_is_given_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ahead = begun(tmp_path, 96 * MIB)
    waiting = [ahead]
    monkeypatch.setattr(pages_ahead, "take", lambda: waiting.pop() if waiting else None)
    start = torch.frombuffer(ahead.pages, dtype=torch.uint8).data_ptr()
    with huge_pages.taken_ahead():
        weights = [huge_pages.empty(n, dtype=torch.uint8).fill_(7) for n in (5 * MIB, 3, 9 * MIB)]
        beyond = huge_pages.empty(200 * MIB, dtype=torch.uint8)
    for weight in weights:
        assert start <= weight.data_ptr() < start + ahead.n_bytes and bool((weight == 7).all())
    assert not start <= beyond.data_ptr() < start + ahead.n_bytes
    assert 14 * MIB <= resident_bytes(ahead.pages) <= 18 * MIB
    with huge_pages.taken_ahead():  # Nothing waits any more, so that weights are where they usually are.
        other = huge_pages.empty(MIB, dtype=torch.uint8)
    assert not start <= other.data_ptr() < start + ahead.n_bytes


def test_all_pages_are_taken_if_there_is_time(tmp_path: Path) -> None:
    ahead = begun(tmp_path, 64 * MIB)
    ahead.thread.join()
    found = resident_bytes(ahead.pages)
    assert found in (0, ahead.n_bytes), "nothing where the kernel does not know the advice"
    assert pages_ahead.take() is None, "it was taken once"
    ahead.end(0)
    assert resident_bytes(ahead.pages) == 0


@pytest.mark.parametrize(("name", "device"), [("m.gguf", "cuda"), ("m.safetensors", "cpu"), ("none.gguf", "cpu")])
def test_nothing_is_taken_for_others(name: str, device: str, tmp_path: Path) -> None:
    if name != "none.gguf":
        with (tmp_path / name).open("wb") as file:
            file.truncate(80 * MIB)
    pages_ahead.begin(str(tmp_path / name), device)
    assert pages_ahead.take() is None


def test_nothing_is_taken_for_small_files_and_where_memory_is_short(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    for n_bytes, available in ((MIB, 1 << 40), (80 * MIB, 90 * MIB)):
        with path.open("wb") as file:
            file.truncate(n_bytes)
        monkeypatch.setattr(pages_ahead, "_available_bytes", lambda available=available: available)
        pages_ahead.begin(str(path), "cpu")
        assert pages_ahead.take() is None
