"""Without a GPU, its benchmark refuses to run, but the tests see how it computes its table."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.gpu_step import make_config, make_contestants, measure, share_covered
from tests.extent import only_in_long


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_nothing_is_measured() -> None:
    result = CliRunner().invoke(app, ["gpu", "--quick"])
    assert result.exit_code == 1
    assert "needs an NVIDIA GPU" in result.output


@only_in_long
def test_sequences_that_take_turns_do_so_on_any_device() -> None:
    """The measured code runs on the CPU, at sizes that mean nothing, and all sequences get their turn."""
    from benchmarks.gpu_host import Decoding, Sizes, row

    sizes, cpu = (
        Sizes(n_sequences=5, n_hosted=2, context=20, turn_steps=3, n_layers=1, heads=(2, 1, 8)),
        torch.device("cpu"),
    )
    found = row(sizes, cpu, n_rounds=2)
    assert all(value > 0 for value in found.values() if not isinstance(value, str))
    assert found["stream / swapping"] == pytest.approx(found["stream, tokens/s"] / found["swapping, tokens/s"])  # type: ignore[operator]
    turns = Decoding(sizes, cpu, n_on_device=3)
    turns.fill(2, turns.memory.swap_out)
    turns.fill(3)
    turns.sequences.rotate(-2)
    waited = set[int]()
    for _ in range(5):
        waited |= {s.id for s in turns.sequences if s.is_swapped}
        assert [s.is_swapped for s in turns.sequences] == [False] * 3 + [True] * 2
        turns.take_turns()
        turns.memory.check()
    assert len(waited) == 5


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


def test_the_time_that_a_device_is_busy_is_counted_once() -> None:
    assert share_covered([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (6.0, 8.0)]) == pytest.approx(7 / 8)
    assert share_covered([(2.0, 3.0)]) == 1.0


@only_in_long
def test_all_contestants_decode() -> None:
    contestants = make_contestants(make_config(256, 2, [1]), 2, 8, torch.device("cpu"))
    medians = measure(contestants, 3, 1)
    assert set(medians) == {"ours", "ours, recorded", "transformers"}
    assert all(seconds > 0 for seconds in medians.values())
