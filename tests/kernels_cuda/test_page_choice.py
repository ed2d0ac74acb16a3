"""The device chooses pages, and each head attends to pages of its own.

The cases are those of `tests/memory/kernels/test_page_choice.py`.
"""

from __future__ import annotations

import pytest
import torch

from hybridmem.memory.kernels import reference
from tests.kernels_cuda.on_device import OnDevice
from tests.memory.kernels.test_page_choice import COUNTS, Bounds
from tests.memory.kernels.test_page_choice import test_each_head_may_read_pages_of_its_own as attention_of_each_head


@pytest.mark.parametrize("n_shared, n_kv_heads, head_dim", [(1, 1, 8), (3, 2, 20), (7, 1, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_best_pages_are_chosen(
    device: torch.device, dtype: torch.dtype, n_shared: int, n_kv_heads: int, head_dim: int
) -> None:
    """All numbers are whole, so they are exact in both dtypes."""
    bounds, kernels = Bounds(n_shared, n_kv_heads, head_dim), OnDevice(device)
    expected = bounds.expected()
    bounds.q, bounds.arena = bounds.q.to(dtype), bounds.arena.to(dtype)
    assert torch.equal(bounds.chosen(kernels), expected)
    for i in (0, 1, 4):
        begin, end = bounds.choice.cu_chosen[i : i + 2].tolist()
        assert torch.equal(bounds.chosen(kernels, only=i), expected[:, begin:end])


def test_a_page_whose_bounds_are_nan_is_chosen(device: torch.device) -> None:
    bounds = Bounds(3, 2, 8)
    page = int(bounds.choice.pages[bounds.choice.cu_pages[2] + 70])
    bounds.arena[page + 3] = torch.nan
    chosen = bounds.chosen(OnDevice(device))
    assert (chosen == page).any(1)[0]
    assert torch.equal(chosen, bounds.chosen(reference))


def test_queries_that_choose_everything(device: torch.device) -> None:
    bounds = Bounds(3, 2, 8)
    alone = bounds.chosen(OnDevice(device), only=3)
    assert torch.equal(alone, bounds.choice.pages[bounds.choice.cu_pages[3] :][: COUNTS[3][0]].expand(2, -1))


@pytest.mark.parametrize("page_tokens", [1, 4])
def test_each_head_reads_pages_of_its_own(device: torch.device, page_tokens: int) -> None:
    attention_of_each_head(OnDevice(device), 3, 3, 20, page_tokens)
