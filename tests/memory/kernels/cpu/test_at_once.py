"""A CPU kernel that computes several things in one call gives the bits of the separate calls."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridmem.memory import StepError
from hybridmem.memory.kernels import Weights, cpu, norm_parts, reference, rms_norm
from tests.extent import IS_LONG, one_in
from tests.memory.kernels.test_kernels import LENGTHS, Slots
from tests.subjects import IS_FULL
from tests.tolerances import assert_kernel_close

DTYPES = [torch.float32, *([torch.bfloat16] if IS_LONG else []), *([torch.float16] if IS_FULL else [])]
"""Each is compiled on its own, which takes more than ten seconds."""
N, H, P, G, S, W = sum(LENGTHS), 6, 5, 2, 20, 4
E = H * P + 2 * G * S


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", one_in(2, [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.3, 0.9)])
@pytest.mark.parametrize("has_skip", [True, False])
def test_ssd_is_convolution_steps_and_scan(
    dtype: torch.dtype, state_dtype: torch.dtype, limits: tuple[float, float], has_skip: bool
) -> None:
    rows = torch.randn(N, E + H + 3).to(dtype)[:, : E + H]  # These rows are not contiguous.
    weight, bias = torch.randn(W, E).to(dtype), torch.randn(E).to(dtype) if has_skip else None
    dt_bias, a, skip = torch.randn(H), -torch.rand(H), torch.randn(H) if has_skip else None
    windows, states = Slots((W - 1, E), dtype=dtype), Slots((H, P, S), dtype=state_dtype)

    x = cpu.causal_conv(rows, weight, bias, windows.fresh(), activation=has_skip)
    values, keys, queries = x.split([H * P, G * S, G * S], -1)
    dt = cpu.softplus(rows[:, E:], dt_bias).clamp(*limits)
    expected = cpu.matrix_scan(
        queries.view(N, G, S), keys.view(N, G, S), values.view(N, H, P), dt * a, None, states.fresh(),
        strength_TH=dt, skip_H=skip,
    ).flatten(1).to(dtype)  # fmt: skip
    after = windows.flat, states.flat

    layer = cpu.SSDLayer(weight, bias, dt_bias, a, skip, limits, G, activation=has_skip)
    y = layer(rows, windows.fresh(), states.fresh())
    assert y.dtype == dtype and torch.equal(y, expected)
    for found, wanted in zip((windows.flat, states.flat), after, strict=True):
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))  # Unwritten bytes stay poisoned.


def test_ssd_refuses_sizes_that_do_not_fit() -> None:
    rows, weight, heads = torch.randn(N, E + H), torch.randn(W, E), torch.randn(H)
    for wrong in (heads[1:], torch.randn(H + 1)):
        layer = cpu.SSDLayer(weight, None, wrong, heads, None, (0.0, 1.0), G, activation=True)
        with pytest.raises(StepError, match=r"ssd.*dt_bias"):
            layer(rows, Slots((W - 1, E)).fresh(), Slots((H, P, S)).fresh())
    layer = cpu.SSDLayer(weight, None, heads, heads, None, (0.0, 1.0), G, activation=True)
    layer(rows, Slots((W - 1, E)).fresh(), Slots((H, P, S)).fresh())
    with pytest.raises(StepError, match=r"rows has shape"):  # Sizes that fit were checked before.
        layer(rows[1:], Slots((W - 1, E)).fresh(), Slots((H, P, S)).fresh())


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_parts_are_norms(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """They equal norms that are computed one by one, and those of plain torch."""
    sizes = 48, 16, 5
    x, weight = torch.randn(7, sum(sizes)).to(dtype), torch.randn(sum(sizes)).to(dtype)

    def parts() -> list[Tensor]:
        return norm_parts(x, Weights(weight), 1e-5, sizes, np.cumsum(sizes))

    one_by_one = [rms_norm(*part, 1e-5) for part in zip(x.split(sizes, 1), weight.split(sizes), strict=True)]
    for found, expected in zip(parts(), one_by_one, strict=True):
        assert torch.equal(found, expected)
    monkeypatch.setenv("HYBRID_MEMORY_KERNELS", reference.__name__.rpartition(".")[2])
    for found, expected in zip(parts(), one_by_one, strict=True):
        assert_kernel_close(expected, found, dtype if dtype is torch.float32 else torch.bfloat16)
