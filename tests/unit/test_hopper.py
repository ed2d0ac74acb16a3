"""Every kernel, in the shapes that models have, compiles for a Hopper GPU and fits on it: which the interpreter cannot say."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from memory.kernels import FoldedRows, PageChoice, PagedBatch, Scoring
from memory.quantization import Float8, Quantized, Storage
from tests.hopper import SHARED_BYTES, Recorder

triton = pytest.importorskip("triton", reason="triton is not installed")

BF16, F32 = torch.bfloat16, torch.float32


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder()
    for name in ("attention", "page_choice", "rows"):
        monkeypatch.setattr(importlib.import_module(f"memory.kernels.cuda.{name}"), "launch", recorder.launch)
    yield recorder
    assert recorder.compiled, "nothing was compiled"
    assert all(kernel.shared_bytes <= SHARED_BYTES for kernel in recorder.compiled), recorder.compiled


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def attend(dtype: torch.dtype, heads: tuple[int, int, int], n_queries: int, scoring: Scoring, storage: Storage | None = None) -> None:
    """A request of so many queries after 2,000 rows, some of them folded."""
    from memory.kernels import cuda

    n_heads, n_kv_heads, head_dim = heads
    n_rows = 2000 + n_queries
    n_pages = -(-n_rows // 16)
    batch = PagedBatch(np.array([0, n_queries]), np.array([n_rows]), zeros(n_pages), np.array([0, n_pages]), 16)
    keys, values = zeros(64, dtype=dtype), zeros(64, dtype=dtype)
    folded = None
    if storage is not None:
        parts = [part for is_key in (True, False) for part in storage.shapes(n_kv_heads, 64, head_dim, by_channel=is_key)]
        flats = tuple(zeros(64, dtype=dtype) for _, dtype in parts)
        folded = FoldedRows(storage, tuple(s for s, _ in parts), flats, np.zeros(4, np.int64), np.array([0, 4]), np.array([256]), head_dim)
    q = zeros(n_queries, n_heads, head_dim, dtype=dtype)
    cuda.paged_attention(q, keys, keys if n_kv_heads == 1 else values, batch, n_kv_heads, scoring, folded)


PLAIN = Scoring(0.1)


def with_all(n_heads: int) -> Scoring:
    return Scoring(0.1, 1024, 30.0, zeros(n_heads, dtype=F32), zeros(n_heads, 32, dtype=F32))


@pytest.mark.parametrize(
    "dtype, heads, scoring, n_queries",
    [
        (BF16, (32, 8, 128), PLAIN, 1),
        (BF16, (32, 8, 128), PLAIN, 100),
        (F32, (32, 8, 128), PLAIN, 100),
        (BF16, (32, 8, 96), with_all(32), 5),
        (BF16, (16, 8, 256), with_all(16), 100),
    ],
    ids=["decode", "prompt", "float32", "drafts", "wide"],
)
def test_attention(recorder: Recorder, dtype: torch.dtype, heads: tuple[int, int, int], scoring: Scoring, n_queries: int) -> None:
    attend(dtype, heads, n_queries, scoring)
    assert all(kernel.spilled_bytes <= 64 for kernel in recorder.compiled), recorder.compiled


def test_latent_attention(recorder: Recorder) -> None:
    """DeepSeek's: 128 heads share keys of 576 elements, which are their values too."""
    attend(BF16, (128, 1, 576), 1, PLAIN)


@pytest.mark.parametrize("storage", [Quantized(4), Float8()], ids=str)
def test_attention_over_folded_rows(recorder: Recorder, storage: Storage) -> None:
    attend(BF16, (32, 8, 128), 1, PLAIN, storage)


def test_choice_of_pages(recorder: Recorder) -> None:
    from memory.kernels import cuda

    choice = PageChoice(zeros(500), np.array([0, 500]), 1, np.array([2]), np.array([0, 32]))
    cuda.choose_pages(zeros(1, 32, 128, dtype=BF16), zeros(64, dtype=BF16), zeros(64, dtype=BF16), choice, 8)


def test_rows(recorder: Recorder) -> None:
    from memory.kernels import cuda

    cuda.write_rows_(zeros(64, dtype=BF16), zeros(64), zeros(64, 128, dtype=BF16))
    cuda.read_rows(zeros(64, dtype=F32), zeros(2), (128, 4096), 0.0)
