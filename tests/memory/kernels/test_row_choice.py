"""The kernel that chooses rows by the keys of an index is compared with loops over rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridmem.memory.kernels import Kernels, PagedBatch, cpu, reference
from tests.memory.kernels.test_kernels import cumulate, poisoned, shuffled_offsets

LENGTHS, COUNTS = (1, 9, 70, 130), (1, 2, 3, 130)
BOTH = pytest.mark.parametrize("kernels", [cpu, reference])


class Keys:
    """Holds whole numbers, so that no rounding decides and many rows have equal scores. Unused places are NaN."""

    def __init__(self, n_heads: int, head_dim: int, page_tokens: int) -> None:
        n_pages = [-(-n // page_tokens) for n in LENGTHS]
        offsets = torch.tensor(shuffled_offsets(sum(n_pages), page_tokens * head_dim))
        self.arena = poisoned(int(offsets.max()) + page_tokens * head_dim)
        self.keys = [torch.randint(-2, 3, (n, head_dim)).float() for n in LENGTHS]
        cu_pages = cumulate(tuple(n_pages))
        for i, keys in enumerate(self.keys):
            for r, key in enumerate(keys):
                at = int(offsets[cu_pages[i] + r // page_tokens]) + r % page_tokens * head_dim
                self.arena[at : at + head_dim] = key
        self.batch = PagedBatch(cumulate(COUNTS), np.array(LENGTHS), offsets, cu_pages, page_tokens)
        self.q = torch.randint(-2, 3, (sum(COUNTS), n_heads, head_dim)).float()
        self.weights = torch.randint(-1, 3, (sum(COUNTS), n_heads)).float()

    def chosen(self, kernels: Kernels, n_chosen: int, span_tokens: int = 1) -> Tensor:
        # The keys are those of whole spans, and a few tokens are behind the last one.
        lengths = np.array(LENGTHS) * span_tokens + np.arange(len(LENGTHS)) % span_tokens
        batch = replace(self.batch, kv_lengths=lengths)
        return kernels.choose_rows(self.q, self.weights, self.arena, batch, n_chosen, 0.5, span_tokens)

    def expected(self, n_chosen: int, span_tokens: int = 1) -> list[int]:
        found, t = [], 0
        for i, (keys, count) in enumerate(zip(self.keys, COUNTS, strict=True)):
            n_tokens = len(keys) * span_tokens + i % span_tokens
            for n_seen in range(n_tokens - count + 1, n_tokens + 1):
                n_rows = n_seen // span_tokens
                products = (0.5 * (keys[:n_rows] @ self.q[t].T)).clamp(min=0)
                scores = (products * self.weights[t]).sum(1).tolist()
                found += sorted(sorted(range(n_rows), key=lambda r, scores=scores: (-scores[r], r))[:n_chosen])
                t += 1
        return found


@BOTH
@pytest.mark.parametrize("n_heads, head_dim, page_tokens", [(1, 8, 1), (2, 20, 4), (7, 64, 16)])
@pytest.mark.parametrize("n_chosen", [1, 20])
def test_the_best_rows_are_chosen_and_of_equal_ones_the_oldest(
    kernels: Kernels, n_chosen: int, n_heads: int, head_dim: int, page_tokens: int
) -> None:
    keys = Keys(n_heads, head_dim, page_tokens)
    assert keys.chosen(kernels, n_chosen).tolist() == keys.expected(n_chosen)


@BOTH
@pytest.mark.parametrize("span_tokens", [2, 3])
def test_a_query_chooses_among_the_spans_that_end_before_it(kernels: Kernels, span_tokens: int) -> None:
    keys = Keys(2, 20, 4)
    assert keys.chosen(kernels, 6, span_tokens).tolist() == keys.expected(6, span_tokens)


@BOTH
def test_a_row_whose_key_is_nan_is_chosen(kernels: Kernels) -> None:
    keys = Keys(2, 8, 4)
    row = 2  # This row is of the second request, whose pages follow those of the first.
    at = int(keys.batch.pages[keys.batch.cu_pages[1]]) + row * 8
    keys.arena[at] = torch.nan
    assert row in keys.chosen(kernels, 4).tolist()[1:9]


def test_scores_in_parts_are_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(2, 20, 4)
    expected = keys.chosen(cpu, 20)
    monkeypatch.setattr("hybridmem.memory.kernels.cpu.row_choice._MOST_SCORES", 300)
    assert torch.equal(keys.chosen(cpu, 20), expected)
