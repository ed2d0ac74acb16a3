"""Weights of products share memory in huge pages."""

from __future__ import annotations

import mmap
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from weakref import ref

import pytest
import torch

from hybridmem.models.layers.linear import Linear
from hybridmem.models.products import huge_pages

MAPS = Path("/proc/self/smaps")


def filled(i: int, n: int) -> torch.Tensor:
    return huge_pages.empty(n, dtype=torch.int32).fill_(i)


def test_no_two_weights_overlap_whatever_thread_asks() -> None:
    sizes = [1, 15, 16, 17, 1000, 70_000, 3 << 20, 9 << 20] * 4
    with ThreadPoolExecutor(4) as threads:
        weights = list(threads.map(filled, range(len(sizes)), sizes))
    for i, (weight, n) in enumerate(zip(weights, sizes, strict=True)):
        assert weight.data_ptr() % 64 == 0 and weight.shape == (n,) and bool((weight == i).all())


@pytest.mark.parametrize("shape", [(0,), (3, 0), (2, 3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_tensor_is_as_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = huge_pages.empty(*shape, dtype=dtype)
    assert found.shape == shape and found.dtype == dtype and found.is_contiguous()
    # The storage has no other bytes, so a copy of it copies nothing else.
    assert found.untyped_storage().nbytes() == found.nbytes


def test_memory_is_given_back_with_the_last_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    mappings, make = list[ref[mmap.mmap]](), mmap.mmap

    def noted(*arguments: int, flags: int) -> mmap.mmap:
        mapping = make(*arguments, flags=flags)
        mappings.append(ref(mapping))
        return mapping

    monkeypatch.setattr(mmap, "mmap", noted)
    most = huge_pages.empty(300 << 20, dtype=torch.uint8)  # Nothing is written, so this takes no memory.
    first, second = (huge_pages.empty(n, dtype=torch.uint8) for n in (3 << 20, 100))
    assert len(mappings) == 2, "one as large as needed, and another that the small ones share"
    del most, first
    assert mappings[0]() is None and mappings[1]() is not None
    del second
    assert mappings[1]() is None


@pytest.mark.skipif(not MAPS.exists(), reason="this system does not say what it gives huge pages")
def test_the_weights_of_products_lie_in_huge_pages() -> None:
    linear = Linear(torch.ones(8, 16))
    if linear.compiled is None:
        pytest.skip("products of this processor are oneDNN's, which allocates its weights itself")
    address, own = linear.compiled.weight[0].ctypes.data, ""
    for line in MAPS.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(number, 16) for number in found.groups())
            own = "is it" if begin <= address < end else ""
        elif own and line.startswith("VmFlags"):
            assert "hg" in line.split()
            return
    pytest.fail("the weight lies nowhere")
