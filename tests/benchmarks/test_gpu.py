"""What of the benchmark of a GPU can be seen without one: that it is refused, and how its table is reckoned."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_nothing_is_measured() -> None:
    result = CliRunner().invoke(app, ["gpu", "--quick"])
    assert result.exit_code == 1
    assert "needs an NVIDIA GPU" in result.output


def test_a_row_counts_keys_and_values_once() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from benchmarks.gpu_attention import CONTEXT, HEADS, row

    dense, _, latent = (row(heads, n_sequences=128, decode_ms=1.0, verify_ms=1.2, copy=4000.0) for heads in HEADS)
    gbytes = 128 * CONTEXT * 8 * 128 * 2 * 2 / 1e6
    assert dense["GB/s"] == pytest.approx(gbytes)
    assert dense["of the copy"] == pytest.approx(gbytes / 4000)
    assert dense["4 drafts / step"] == pytest.approx(1.2)
    assert dense["decode, µs"] == pytest.approx(1000)
    assert latent["GB/s"] == pytest.approx(128 * CONTEXT * 576 * 2 / 1e6), "latent keys are the values too"
