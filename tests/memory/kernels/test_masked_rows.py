"""Rows whose score is -inf take no weight, wherever they are.

A query that sees only such rows gets NaN, which is 0 / 0.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hybridmem.memory.kernels import Kernels, PagedBatch, Scoring, cpu, reference
from hybridmem.memory.quantization import Float8, Quantized, Storage
from tests.extent import few_cases
from tests.memory.kernels.test_kernels import Pages, cumulate
from tests.memory.test_quantization import folded_rows
from tests.tolerances import assert_kernel_close

N_HEADS, N_DISTANCES = 6, 250
INF = torch.inf


def _hidden(begin: int, end: int, heads: slice = slice(None)) -> Callable[[], Tensor]:
    """Return a bias that hides rows at these distances from their query."""

    def make() -> Tensor:
        bias = torch.randn(N_HEADS, N_DISTANCES)
        bias[heads, begin:end] = -INF
        return bias

    return make


BIASES = {
    "all but the newest": _hidden(20, N_DISTANCES),
    "a block": _hidden(64, 128),
    "the newest": _hidden(0, 70),
    "all of some heads": _hidden(0, N_DISTANCES, slice(1, 5, 2)),
    "all": _hidden(0, N_DISTANCES),
}
SINKS = {
    "no sinks": None,
    "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, -3.0]),
    "some": torch.tensor([0.3, -INF, 2.0, -INF, -INF, 0.1]),
}


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Assert that results are close, and NaN where that is expected."""
    assert torch.equal(actual.isnan(), expected.isnan())
    assert_kernel_close(actual.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


def hide_keys_(pages: Pages) -> None:
    """Make keys whose scores are -inf: every other row of the first 100, and blocks of 64."""
    pages.q.abs_()
    for first, last in zip(pages.batch.cu_pages[:-1].tolist(), pages.batch.cu_pages[1:].tolist(), strict=True):
        for page in pages.batch.pages[first:last][:20].tolist():
            keys = pages.arena[page : page + pages.values_at]
            keys[~keys.isnan()] = -INF


@few_cases
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("bias", BIASES)
def test_attention_over_pages(bias: str, softcap: float | None, sinks: str) -> None:
    pages = Pages(N_HEADS, 2, 20, page_tokens=4, lengths=(1, 2, 16, 1, 17, 40), histories=(200, 130, 64, 0, 130, 3))
    pages.bias, pages.softcap, pages.sinks = BIASES[bias](), softcap, SINKS[sinks]
    for window in (None, 90):
        expected = pages.attend(reference, window=window)
        assert_same(pages.attend(cpu, window=window), expected)
        for i in (0, 2):  # Heads of a request that runs alone are divided among tasks.
            own = slice(*pages.batch.cu_seqlens[i : i + 2].tolist())
            assert_same(pages.attend(cpu, only=i, window=window), expected[own])


def test_what_nothing_is_paid_to() -> None:
    """By definition, the result is 0 / 0 = NaN without sinks. A sink takes all the weight, and then it is zeros."""
    pages = Pages(2, 1, 8, page_tokens=4, lengths=(1, 20), histories=(70, 0))
    pages.bias = torch.full((2, 1), -INF)
    for kernels in (cpu, reference):
        pages.sinks = None
        assert pages.attend(kernels).isnan().all()
        pages.sinks = torch.tensor([0.0, -INF])
        out = pages.attend(kernels)
        assert out[:, 0].abs().max() < 1e-30 and out[:, 1].isnan().all()


@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_keys_that_score_minus_infinity(softcap: float | None, sinks: str) -> None:
    pages = Pages(N_HEADS, 2, 20, page_tokens=4, lengths=(1, 2, 1, 40), histories=(200, 130, 3, 130))
    pages.softcap, pages.sinks = softcap, SINKS[sinks]
    hide_keys_(pages)
    expected = pages.attend(reference)
    assert not expected[0].isnan().any()
    assert_same(pages.attend(cpu), expected)


@few_cases
@pytest.mark.parametrize("sinks", SINKS)
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("storage", [Quantized(8, group=8), Quantized(4, group=8), Float8(group=8)], ids=str)
def test_rows_that_a_storage_keeps(storage: Storage, bias: str, sinks: str) -> None:
    pages = Pages(N_HEADS, 2, 24, 4, lengths=(1, 2, 1, 20), histories=(70, 40, 3, 0))
    folded = folded_rows(storage, [80, 0, 8, 136], 8, 2, 24, by_channel=True)
    scoring = Scoring(0.3, None, None, SINKS[sinks], BIASES[bias]())
    arguments = (pages.q, pages.arena, pages.arena[pages.values_at :], pages.batch, 2, scoring, folded)
    assert_same(cpu.paged_attention(*arguments), reference.paged_attention(*arguments))


@pytest.mark.parametrize("n_queries, n_rows", [(1, 200), (16, 150), (40, 150)])
@pytest.mark.parametrize("bias", BIASES)
def test_rows_at_hand(bias: str, n_queries: int, n_rows: int) -> None:
    """Evicting attention reads such rows, and each head has pages of its own."""
    q, (k, v) = torch.randn(n_queries, N_HEADS, 16), torch.randn(2, n_rows, 3, 16)
    scoring = Scoring(0.3, bias_HL=BIASES[bias]())
    assert_same(cpu.attend_rows(q, k, v, scoring), reference.attend_rows(q, k, v, scoring))


@pytest.mark.parametrize("kernels", [cpu, reference])
def test_pages_of_each_head(kernels: Kernels) -> None:
    """`Quest` reads such pages. The first pages of one head have only keys that score -inf."""
    rows_GRD, q = torch.randn(2, 140, 8), torch.randn(1, 4, 8).abs()
    rows_GRD[1, :128] = -INF
    keys, values = rows_GRD.reshape(-1), torch.randn(2, 140, 8).reshape(-1)
    # Head 1 counts from its own pages on.
    pages_GP = torch.stack([torch.arange(35) * 32, 140 * 8 - 32 + torch.arange(35) * 32])
    batch = PagedBatch(cumulate((1,)), cumulate((140,))[1:], pages_GP, cumulate((35,)), page_tokens=4)
    k, v = (x.view(2, 140, 8).transpose(0, 1) for x in (keys, values))
    out = kernels.paged_attention(q, keys, values, batch, 2, Scoring(0.3))
    assert_same(out, reference.attend_rows(q, k, v, Scoring(0.3)))
