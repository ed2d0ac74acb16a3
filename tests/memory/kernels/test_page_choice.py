"""The kernel that chooses pages, and attention over pages of each head, are compared with loops over both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridmem.memory.kernels import Kernels, PageChoice, PagedBatch, Scoring, cpu, reference
from tests.extent import few_cases
from tests.memory.kernels.test_kernels import cumulate, poisoned, shuffled_offsets
from tests.tolerances import assert_kernel_close

BOTH = pytest.mark.parametrize("kernels", [cpu, reference])
COUNTS = ((9, 4), (1, 1), (130, 40), (3, 3), (40, 3), (65, 64))
"""Pages that queries see, and how many they choose, one first and one or two last ones among them."""


class Bounds:
    """Holds whole numbers, so that no rounding decides and many pages have equal scores. Unused places are NaN."""

    def __init__(self, n_shared: int, n_kv_heads: int, head_dim: int) -> None:
        n_pages, size = [n for n, _ in COUNTS], n_kv_heads * head_dim
        self.n_kv_heads, self.size = n_kv_heads, size
        self.q = torch.randint(-2, 3, (len(COUNTS), n_shared * n_kv_heads, head_dim)).float()
        offsets = torch.tensor(shuffled_offsets(sum(n_pages), 2 * size))
        self.arena = poisoned((2 * len(offsets) + 1) * 2 * size)
        n_last = np.array([1, 1, 2, 1, 2, 1])
        self.choice = PageChoice(offsets, cumulate(tuple(n_pages)), 1, n_last, cumulate(tuple(n for _, n in COUNTS)))
        for i, n in enumerate(n_pages):
            for at in offsets[self.choice.cu_pages[i] :][1 : n - n_last[i]].tolist():
                keys = torch.randint(-1, 2, (2, size)).float()
                self.arena[at : at + 2 * size] = torch.cat([keys.amin(0), keys.amax(0)])

    def chosen(self, kernels: Kernels, only: int | None = None) -> Tensor:
        q, choice = self.q, self.choice
        if only is not None:
            begin, end = choice.cu_pages[only : only + 2].tolist()
            own = (
                choice.pages[begin:end],
                np.array([0, end - begin]),
                choice.n_last[only:][:1],
                np.array([0, COUNTS[only][1]]),
            )
            q, choice = q[only:][:1], replace(choice, pages=own[0], cu_pages=own[1], n_last=own[2], cu_chosen=own[3])
        return kernels.choose_pages(q, self.arena, self.arena[self.size :], choice, self.n_kv_heads)

    def expected(self) -> Tensor:
        choice, parts = self.choice, []
        for i, (n_pages, n_chosen) in enumerate(COUNTS):
            pages = choice.pages[choice.cu_pages[i] :][:n_pages].tolist()
            rows = []
            for g in range(self.n_kv_heads):
                middle = [] if n_chosen == n_pages else range(1, n_pages - int(choice.n_last[i]))
                always = [p for p in range(n_pages) if p not in middle]
                best = sorted(middle, key=lambda p, i=i, g=g, pages=pages: (-self._score(i, g, pages[p]), p))[
                    : n_chosen - len(always)
                ]
                rows.append([pages[p] for p in sorted([*always, *best])])
            parts.append(torch.tensor(rows))
        return torch.cat(parts, 1)

    def _score(self, query: int, g: int, page: int) -> float:
        n_shared, dim = self.q.shape[1] // self.n_kv_heads, self.q.shape[2]
        least, greatest = self.arena[page : page + 2 * self.size].view(2, self.n_kv_heads, dim)[:, g]
        return max(
            float(torch.maximum(q * least, q * greatest).sum())
            for q in self.q[query, g * n_shared : (g + 1) * n_shared]
        )


@few_cases
@BOTH
@pytest.mark.parametrize("n_kv_heads, head_dim", [(1, 8), (2, 20), (3, 64)])
@pytest.mark.parametrize("n_shared", [1, 3, 7])
def test_the_best_pages_are_chosen_and_of_equal_ones_the_oldest(
    kernels: Kernels, n_shared: int, n_kv_heads: int, head_dim: int
) -> None:
    bounds = Bounds(n_shared, n_kv_heads, head_dim)
    expected = bounds.expected()
    assert torch.equal(bounds.chosen(kernels), expected)
    for i in range(len(COUNTS)):
        begin, end = bounds.choice.cu_chosen[i : i + 2].tolist()
        assert torch.equal(bounds.chosen(kernels, only=i), expected[:, begin:end])


@BOTH
@pytest.mark.parametrize("half", [0, 1])
def test_a_page_whose_bounds_are_nan_is_chosen(kernels: Kernels, half: int) -> None:
    bounds = Bounds(3, 2, 8)
    page = int(bounds.choice.pages[bounds.choice.cu_pages[2] + 70])
    bounds.arena[page + half * bounds.size + 3] = torch.nan
    is_chosen = (bounds.chosen(kernels) == page).any(1)
    assert is_chosen[0]


@BOTH
@pytest.mark.parametrize("page_tokens", [1, 4])
@pytest.mark.parametrize("n_shared, n_kv_heads, head_dim", [(1, 2, 8), (3, 3, 20), (7, 1, 64)])
def test_each_head_may_read_pages_of_its_own(
    kernels: Kernels, n_shared: int, n_kv_heads: int, head_dim: int, page_tokens: int
) -> None:
    lengths, page = (
        np.array([1, 2 * page_tokens, 7 * page_tokens - page_tokens // 2, 90 * page_tokens]),
        page_tokens * n_kv_heads * head_dim,
    )
    n_pages = -(-lengths // page_tokens)
    offsets = torch.tensor(shuffled_offsets(n_kv_heads * int(n_pages.sum()), 2 * page)).view(n_kv_heads, -1)
    arena, q = (
        poisoned((2 * offsets.numel() + 1) * 2 * page),
        torch.randn(len(lengths), n_shared * n_kv_heads, head_dim),
    )
    k, v = torch.randn(2, len(lengths), int(lengths.max()), n_kv_heads, head_dim)
    cu_pages = cumulate(tuple(n_pages.tolist()))
    for i, length in enumerate(lengths.tolist()):
        for g in range(n_kv_heads):
            for r in range(length):
                at = int(offsets[g, cu_pages[i] + r // page_tokens]) + (g * page_tokens + r % page_tokens) * head_dim
                arena[at : at + head_dim], arena[at + page : at + page + head_dim] = k[i, r, g], v[i, r, g]
    batch = PagedBatch(np.arange(len(lengths) + 1), lengths, offsets, cu_pages, page_tokens)
    found = kernels.paged_attention(q, arena, arena[page:], batch, n_kv_heads, Scoring(0.3))
    for i, length in enumerate(lengths.tolist()):
        expected = reference.attend_rows(q[i : i + 1], k[i, :length], v[i, :length], Scoring(0.3))
        assert_kernel_close(found[i : i + 1], expected)
