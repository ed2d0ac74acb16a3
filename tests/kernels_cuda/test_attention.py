"""Attention over pages is compared with plain attention. Rows of few queries are divided among programs, or not.

All else in the arena is NaN.
"""

from __future__ import annotations

import pytest
import torch

from hybridmem.memory.kernels import Scoring, cuda, reference
from hybridmem.memory.kernels.cuda import tiles
from tests.kernels_cuda.on_device import OnDevice
from tests.memory.kernels.test_kernels import Pages
from tests.memory.kernels.test_masked_rows import BIASES, N_HEADS, SINKS, assert_same, hide_keys_
from tests.tolerances import TOLERANCE, assert_kernel_close

REQUESTS = {
    "decode": {"lengths": (1,) * 5, "histories": (0, 62, 63, 64, 130)},
    "drafts": {"lengths": (2, 5, 5, 16), "histories": (0, 1, 59, 3)},
    "prompts": {"lengths": (1, 17, 63, 65), "histories": (40, 30, 1, 0)},
}
"""Lengths and what was there before."""

BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16


@pytest.fixture
def split_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide rows among programs even if there are few, so that these tests see it."""
    monkeypatch.setattr(tiles, "SPLIT_ROWS", 32)
    monkeypatch.setattr(tiles, "WHOLE_TILES", 32)


def assert_as_reference(pages: Pages, device: torch.device, window: int | None = None) -> None:
    expected, before = pages.attend(reference, window=window), pages.arena.clone()
    actual = pages.attend(OnDevice(device), window=window)
    assert actual.dtype == expected.dtype
    assert_kernel_close(actual, expected, expected.dtype)
    assert torch.equal(pages.arena.view(torch.uint8), before.view(torch.uint8)), "attention wrote into the arena"


@pytest.mark.usefixtures("split_rows")
@pytest.mark.parametrize("n_groups, head_dim, n_kv_heads, page_tokens", [(1, 8, 2, 4), (3, 20, 1, 16), (7, 48, 1, 1)])
@pytest.mark.parametrize("requests", REQUESTS)
def test_attention_is_plain_attention(
    device: torch.device, requests: str, n_groups: int, head_dim: int, n_kv_heads: int, page_tokens: int
) -> None:
    pages = Pages(n_groups * n_kv_heads, n_kv_heads, head_dim, page_tokens, **REQUESTS[requests])
    assert_kernel_close(pages.attend(OnDevice(device)), pages.expected())


@pytest.mark.parametrize("requests", ["decode", "drafts"])
def test_rows_that_are_not_divided(device: torch.device, requests: str) -> None:
    pages = Pages(6, 2, 20, 4, **REQUESTS[requests])
    assert_kernel_close(pages.attend(OnDevice(device)), pages.expected())


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("requests", REQUESTS)
def test_sixteen_bits(device: torch.device, requests: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results in float16 have three bits more than those in bfloat16."""
    monkeypatch.setitem(TOLERANCE, FLOAT16, TOLERANCE[BFLOAT16])
    assert_as_reference(Pages(6, 2, 32, 4, dtype=dtype, **REQUESTS[requests]), device)


@pytest.mark.usefixtures("split_rows")
@pytest.mark.parametrize("window", [1, 16, 64, 1000])
def test_windows(device: torch.device, window: int) -> None:
    assert_as_reference(Pages(6, 2, 8, 4, lengths=(1, 5, 70), histories=(100, 64, 3)), device, window)


def test_rows_before_the_window_are_not_read(device: torch.device) -> None:
    """Everything before the last window of the longest history is NaN, so any read would show."""
    pages = Pages(6, 2, 8, page_tokens=4, lengths=(1, 20), histories=(130, 130))
    page, window = pages.values_at, 24
    for i in range(2):
        for at in pages.batch.pages[pages.batch.cu_pages[i] :][: (130 + 1 - window) // 4].tolist():
            pages.arena[at : at + 2 * page] = torch.nan
    assert pages.attend(OnDevice(device), window=window).isfinite().all()


@pytest.mark.usefixtures("split_rows")
@pytest.mark.parametrize(
    "softcap, has_sinks, n_distances", [(0.7, False, 0), (None, True, 0), (2.0, True, 30), (None, False, 1000)]
)
def test_capped_scores_sinks_and_biases(
    device: torch.device, softcap: float | None, has_sinks: bool, n_distances: int
) -> None:
    pages = Pages(6, 2, 8, 4, lengths=(1, 4, 40), histories=(100, 62, 5))
    pages.softcap, pages.sinks = softcap, torch.randn(6) if has_sinks else None
    pages.bias = torch.randn(6, n_distances) if n_distances else None
    for window in (None, 20):
        assert_as_reference(pages, device, window)
    if n_distances:
        pages.bias = torch.randn(len(pages.q), 6, n_distances)
        assert_as_reference(pages, device)


@pytest.mark.parametrize("sinks", ["no sinks", "some"])
@pytest.mark.parametrize("split", [32, 512])
def test_scores_of_minus_infinity(
    device: torch.device, split: int, sinks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each head hides other rows."""
    monkeypatch.setattr(tiles, "SPLIT_ROWS", split)
    monkeypatch.setattr(tiles, "WHOLE_TILES", split)
    pages = Pages(N_HEADS, 2, 8, 4, lengths=(1, 2, 20), histories=(150, 0, 100))
    pages.bias = torch.stack([make()[h] for h, make in enumerate([*BIASES.values(), BIASES["all"]])])
    for pages.sinks in (SINKS[sinks], None if SINKS[sinks] is None else SINKS[sinks].flip(0)):
        assert_same(pages.attend(OnDevice(device)), pages.attend(reference))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # The interpreter warns of numbers that only pad a tile.
@pytest.mark.usefixtures("split_rows")
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_keys_that_score_minus_infinity(device: torch.device, softcap: float | None) -> None:
    pages = Pages(N_HEADS, 2, 8, 4, lengths=(1, 2, 20), histories=(150, 0, 100))
    pages.softcap = softcap
    hide_keys_(pages)
    assert_same(pages.attend(OnDevice(device)), pages.attend(reference))


def test_scores_far_apart(device: torch.device) -> None:
    """Scores are thousands apart. They are whole numbers, so that no rounding decides between them."""
    pages = Pages(2, 1, 8, 4, lengths=(1, 20), histories=(70, 0))
    pages.q, pages.arena, pages.rows = (
        pages.q.round() * 1000,
        pages.arena.round(),
        [rows.round() for rows in pages.rows],
    )
    pages.scale = 1.0
    assert_kernel_close(pages.attend(OnDevice(device)), pages.expected())


@pytest.mark.parametrize("half", ["keys", "values"])
@pytest.mark.parametrize("n_queries", [1, 40])
def test_a_nan_that_may_be_read_shows(device: torch.device, half: str, n_queries: int) -> None:
    pages = Pages(2, 1, 8, page_tokens=4, lengths=(n_queries,), histories=(9,))
    pages.arena[int(pages.batch.pages[1]) + (pages.values_at if half == "values" else 0)] = torch.nan
    assert pages.attend(OnDevice(device)).flatten(1).isnan().any(1).all()


def test_the_same_bits_alone_and_among_others(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "SPLIT_ROWS", 64)
    pages = Pages(6, 2, 20, 4, lengths=(1, 1, 3, 20), histories=(0, 130, 100, 9))
    together = pages.attend(OnDevice(device))
    for i in range(4):
        start, end = pages.batch.cu_seqlens[i : i + 2].tolist()
        assert torch.equal(pages.attend(OnDevice(device), only=i), together[start:end])


def test_queries_that_are_a_view(device: torch.device) -> None:
    pages = Pages(2, 1, 8, 4, lengths=(1, 5), histories=(3, 9))
    expected = pages.attend(OnDevice(device))
    pages.q = pages.q.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(pages.attend(OnDevice(device)), expected)


@pytest.mark.usefixtures("split_rows")
@pytest.mark.parametrize("n_queries", [1, 5])
def test_keys_that_are_values_too(device: torch.device, n_queries: int) -> None:
    """In latent attention, many queries share one wide head. Its width is no power of two."""
    pages = Pages(20, 1, 144, 4, lengths=(n_queries,), histories=(70,))
    pages.values_at = 0
    assert_as_reference(pages, device)


@pytest.mark.parametrize("n_queries, n_rows", [(1, 1), (3, 70), (33, 33), (20, 65)])
def test_rows_at_hand(device: torch.device, n_queries: int, n_rows: int) -> None:
    q, (k, v) = torch.randn(n_queries, 6, 16), torch.randn(2, n_rows, 3, 16)
    scoring = Scoring(0.3, window=40)
    on_device = cuda.attend_rows(*(x.to(device) for x in (q, k, v)), scoring)
    assert_kernel_close(on_device.cpu(), reference.attend_rows(q, k, v, scoring))
