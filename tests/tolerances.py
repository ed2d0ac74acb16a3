"""Says how far results may be apart. No other file of the tests does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Limits on the largest difference.

    Attributes:
        kernel: one kernel against another, of the largest expected value, or of 1 where that is smaller.
        parity: a logit against transformers' in float32, absolute; the logits of the tests have a std of at least 1.
        parity_rms: all logits against transformers' in float32, root mean square, of their std.
        split: logits of the same tokens fed in other steps, of the logits' spread.
        replay: logits after a rollback where a replay runs a matrix product or steps differ in shape, of the logits'
            spread.
    """

    kernel: float
    parity: float
    parity_rms: float
    split: float
    replay: float


TOLERANCE = {
    torch.float32: Tolerance(kernel=1e-5, parity=5e-4, parity_rms=1e-4, split=1e-4, replay=1e-5),
    torch.bfloat16: Tolerance(kernel=2e-2, parity=1.0, parity_rms=8e-2, split=2e-2, replay=2e-2),
}


def assert_kernel_close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Assert that there is no NaN, and that results are as close as two kernels must be."""
    assert actual.shape == expected.shape
    scale = max(1.0, float(expected.abs().max()))
    worst = float((actual.float() - expected.float()).abs().max())
    assert worst <= TOLERANCE[dtype].kernel * scale, f"off by {worst}, the largest value is {scale}"


def assert_logits_close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Assert that logits are as close as a model in `dtype` must be to transformers in float32."""
    assert actual.shape == expected.shape
    delta, std = actual.float() - expected, float(expected.std())
    worst, rms = float(delta.abs().max()), float(delta.square().mean().sqrt())
    assert worst <= TOLERANCE[dtype].parity, f"a logit is off by {worst}"
    assert rms <= TOLERANCE[dtype].parity_rms * std, f"logits are off by {rms}, their std is {std}"


def assert_split_close(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Assert that logits are as close as the same tokens must be when they are fed in other steps."""
    assert actual.shape == expected.shape
    worst, spread = float((actual - expected).abs().max()), float(expected.max() - expected.min())
    assert worst <= TOLERANCE[dtype].split * spread, f"off by {worst}, the logits spread over {spread}"
