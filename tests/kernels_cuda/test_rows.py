"""Rows are written into the arena and read from it, in every dtype that a flat may have."""

from __future__ import annotations

import pytest
import torch

from hybridmem.memory.kernels import cuda, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


@pytest.mark.parametrize("n_elements", [1, 7, 64, 3000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_the_reference_s(device: torch.device, dtype: torch.dtype, n_elements: int) -> None:
    """Rows have another dtype and stride, and offsets come in any order. All other bytes stay as they were."""
    flat = torch.full((40 * n_elements * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device).view(dtype)
    expected = flat.clone()
    offsets = (torch.randperm(15, device=device) * 2 + 1) * n_elements
    # These numbers are exact in all dtypes, because the interpreter cuts where a GPU rounds.
    rows = torch.randint(0, 256, (n_elements, 15), device=device).float().T
    cuda.write_rows_(flat, offsets, rows)
    reference.write_rows_(expected, offsets, rows)
    assert torch.equal(flat.view(torch.uint8), expected.view(torch.uint8))

    wanted = torch.cat([offsets[3:9], torch.tensor([-1, -1], device=device), offsets[:1]])
    found = cuda.read_rows(flat, wanted, (1, n_elements), 3.0)
    assert torch.equal(found, reference.read_rows(flat, wanted, (1, n_elements), 3.0))
    found.zero_()
    assert torch.equal(flat.view(torch.uint8), expected.view(torch.uint8)), "the rows are no copy"


def test_no_rows(device: torch.device) -> None:
    flat, none = torch.full((8,), torch.nan, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    cuda.write_rows_(flat, none, torch.zeros(0, 4, device=device))
    assert flat.isnan().all()
    assert cuda.read_rows(flat, none, (2, 3), 0.0).shape == (0, 2, 3)
