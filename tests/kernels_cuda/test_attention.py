"""Attention over pages, split over keys and not, against plain attention. All else in the arena is NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from memory.kernels import PagedBatch, Scoring, cuda, reference
from memory.kernels.cuda import tiles
from tests.kernels_cuda.conftest import to_device
from tests.tolerances import assert_kernel_close
from tests.unit.test_kernels import HISTORIES, LENGTHS, Pages, cumulate

DECODES = {"lengths": (1,) * 7, "histories": (0, 1, 62, 63, 64, 129, 300)}
DRAFTS = {"lengths": (5, 2, 5, 17), "histories": (200, 0, 59, 3)}


@pytest.fixture(autouse=True, params=[32, 256], ids=["split", "whole"])
def split_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are divided among programs from few on, or not at all at these lengths."""
    monkeypatch.setattr(tiles, "SPLIT_ROWS", request.param)
    monkeypatch.setattr(tiles, "_WHOLE_TILES", min(64, request.param))


def assert_is_plain_attention(pages: Pages, device: torch.device, window: int | None = None) -> None:
    expected, before = pages.attend(reference, window=window), pages.arena.clone()
    pages = to_device(pages, device)
    actual = pages.attend(cuda, window=window).cpu()
    assert actual.dtype == expected.dtype
    assert_kernel_close(actual, expected, expected.dtype)
    assert torch.equal(pages.arena.cpu().view(torch.uint8), before.view(torch.uint8)), "attention wrote into the arena"


@pytest.mark.parametrize("n_groups, head_dim, n_kv_heads, page_tokens", [(1, 8, 2, 4), (3, 20, 1, 16), (7, 64, 3, 1), (4, 96, 2, 16)])
def test_mixed_requests(device: torch.device, n_groups: int, head_dim: int, n_kv_heads: int, page_tokens: int) -> None:
    pages = Pages(n_groups * n_kv_heads, n_kv_heads, head_dim, page_tokens)
    assert_is_plain_attention(pages, device)
