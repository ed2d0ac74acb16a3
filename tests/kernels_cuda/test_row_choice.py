"""The device chooses rows by the keys of an index.

The cases are those of `tests/memory/kernels/test_row_choice.py`.
"""

from __future__ import annotations

import pytest
import torch

from hybridmem.memory.kernels import reference
from tests.kernels_cuda.on_device import OnDevice
from tests.memory.kernels.test_row_choice import Keys


@pytest.mark.parametrize("n_heads, head_dim, page_tokens", [(1, 8, 1), (2, 20, 4), (20, 48, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_best_rows_are_chosen(
    device: torch.device, dtype: torch.dtype, n_heads: int, head_dim: int, page_tokens: int
) -> None:
    """All numbers are whole, so they are exact in both dtypes."""
    keys = Keys(n_heads, head_dim, page_tokens)
    expected = keys.expected(20)
    keys.q, keys.arena = keys.q.to(dtype), keys.arena.to(dtype)
    assert keys.chosen(OnDevice(device), 20).tolist() == expected


@pytest.mark.parametrize("span_tokens", [2, 3])
def test_the_best_spans_are_chosen(device: torch.device, span_tokens: int) -> None:
    keys = Keys(2, 20, 4)
    assert keys.chosen(OnDevice(device), 6, span_tokens).tolist() == keys.expected(6, span_tokens)


def test_a_row_whose_key_is_nan_is_chosen(device: torch.device) -> None:
    keys = Keys(3, 8, 4)
    at = int(keys.batch.pages[keys.batch.cu_pages[2]]) + 3 * 8
    keys.arena[at] = torch.nan
    chosen = keys.chosen(OnDevice(device), 4)
    assert torch.equal(chosen, keys.chosen(reference, 4))


def test_scores_in_parts_are_as_at_once(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(2, 8, 4)
    monkeypatch.setattr("hybridmem.memory.kernels.cuda.row_choice._MOST_SCORES", 3_000)
    assert keys.chosen(OnDevice(device), 20).tolist() == keys.expected(20)


def test_a_batch_without_whole_spans_chooses_nothing(device: torch.device) -> None:
    keys = Keys(2, 8, 4)
    assert keys.chosen(OnDevice(device), 20, 1000).tolist() == keys.expected(20, 1000)
