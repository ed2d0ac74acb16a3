"""In a tree of draft tokens, a query sees its sequence and its path, whatever else is stored beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import starts_of
from hybridmem.memory.kernels import Kernels, PagedBatch, Scoring, TreePaths, cpu, reference
from tests.extent import few_cases, only_in_long
from tests.tolerances import assert_kernel_close

PARENTS = ([-1, 0, 0, 2, -1, 4, 3, 6], [-1, -1], [-1, *range(69), 3, 40])
N_NODES = sum(map(len, PARENTS))
HISTORIES = (21, 0, 67)
PAGE_TOKENS = 4


def path_to(node: int, parents: list[int]) -> list[int]:
    return [*(path_to(parents[node], parents) if parents[node] >= 0 else []), node]


class Case:
    """Holds pages of three requests with trees, shuffled in an arena full of NaN."""

    def __init__(self, n_kv_heads: int, n_groups: int, head_dim: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(3)
        self.n_kv_heads, counts = n_kv_heads, [len(parents) for parents in PARENTS]
        lengths = np.array([a + b for a, b in zip(HISTORIES, counts, strict=True)])
        n_pages, block = -(-lengths // PAGE_TOKENS), n_kv_heads * PAGE_TOKENS * head_dim
        places = (2 * torch.randperm(int(n_pages.sum()), generator=generator) + 1) * block
        self.k, self.v = (
            [torch.randn(int(n), n_kv_heads, head_dim, generator=generator).to(dtype) for n in lengths] for _ in "kv"
        )
        self.keys, self.values = (torch.full(((2 * len(places) + 1) * block,), torch.nan, dtype=dtype) for _ in "kv")
        cu_pages = starts_of(n_pages)
        for flat, rows in ((self.keys, self.k), (self.values, self.v)):
            for i, own in enumerate(rows):
                for r, row in enumerate(own):
                    page = int(places[cu_pages[i] + r // PAGE_TOKENS])
                    for g in range(n_kv_heads):
                        at = page + (g * PAGE_TOKENS + r % PAGE_TOKENS) * head_dim
                        flat[at : at + head_dim] = row[g]
        self.q = torch.randn(sum(counts), n_kv_heads * n_groups, head_dim, generator=generator).to(dtype)
        self.batch = PagedBatch(starts_of(np.array(counts)), lengths, places, cu_pages, PAGE_TOKENS)
        ways = [path_to(node, parents) for parents in PARENTS for node in range(len(parents))]
        self.paths = TreePaths(
            np.array(HISTORIES), np.concatenate(ways), starts_of(np.array([len(way) for way in ways]))
        )  # fmt: skip

    def attend(self, kernels: Kernels, scoring: Scoring) -> Tensor:
        return kernels.tree_attention(
            self.q, self.keys, self.values, self.batch, self.paths, self.n_kv_heads, scoring
        )  # fmt: skip

    def expected(self, scoring: Scoring) -> Tensor:
        """Compute by chains: each query is the last of its path, and the rows that it sees are in order."""
        found, t = [], 0
        for i, parents in enumerate(PARENTS):
            for node in range(len(parents)):
                rows = [*range(HISTORIES[i]), *(HISTORIES[i] + other for other in path_to(node, parents))]
                own = slice(t, t + 1)
                found.append(reference.attend_rows(self.q[own], self.k[i][rows], self.v[i][rows], scoring.of(own)))
                t += 1
        return torch.cat(found)


SCORINGS = {
    "plain": Scoring(0.3),
    "window": Scoring(0.3, window=5),
    "capped": Scoring(0.3, softcap=0.7),
    "sinks": Scoring(0.3, sinks_H=torch.linspace(-1.0, 1.0, 6)),
    "bias": Scoring(0.3, bias_HL=torch.linspace(-2.0, 2.0, 6 * 9).reshape(6, 9)),
    "bias of each query": Scoring(0.3, bias_HL=torch.linspace(-9.0, 9.0, N_NODES * 6 * 9).reshape(N_NODES, 6, 9).sin()),
}


@few_cases
@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize(("n_kv_heads", "head_dim"), [(2, 8), (1, 20)])
@pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])
def test_a_query_sees_its_sequence_and_its_path(
    kernels: Kernels, n_kv_heads: int, head_dim: int, scoring: str
) -> None:  # fmt: skip
    case = Case(n_kv_heads, 6 // n_kv_heads, head_dim)
    assert_kernel_close(case.attend(kernels, SCORINGS[scoring]), case.expected(SCORINGS[scoring]))


@only_in_long
def test_trees_in_16_bits_are_close_to_float32() -> None:
    case = Case(2, 3, 16, torch.bfloat16)
    expected = case.expected(SCORINGS["plain"])
    assert_kernel_close(case.attend(cpu, SCORINGS["plain"]).float(), expected.float(), torch.bfloat16)


@pytest.mark.parametrize("n_kv_heads", [1, 2])
def test_on_a_gpu_each_query_is_a_request_of_single_rows(n_kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin's attention over pages stands for the device. Calls are cut so that each reads few rows."""
    tree_attention = pytest.importorskip("hybridmem.memory.kernels.cuda.tree_attention")
    monkeypatch.setattr(tree_attention, "paged_attention", reference.paged_attention)
    monkeypatch.setattr(tree_attention, "_MOST_ROWS", 300)
    case = Case(n_kv_heads, 6 // n_kv_heads, 8)
    for _ in range(2):  # The second layer takes what the first has computed.
        assert_kernel_close(case.attend(tree_attention, SCORINGS["window"]), case.expected(SCORINGS["window"]))
