"""Kernels for states of 8 bits return what plain torch returns, and leave the same bodies and rings."""

from __future__ import annotations

import pytest
import torch

from hybridmem.memory.kernels import cuda, reference
from hybridmem.memory.kernels.eight_bits import EIGHT_BITS, read_states
from tests.memory.kernels.eight_bits import (
    COUNTS,
    FOLDS,
    LENGTHS,
    MODES,
    N,
    assert_nothing_else_written,
    assert_same_bodies,
    in_8_bits,
    matrix_case,
)
from tests.memory.kernels.tails import behind_tails, flats_of, forget_folded, moved, rows_of
from tests.tolerances import TOLERANCE, assert_kernel_close

CPU = torch.device("cpu")
STATE_DTYPES = pytest.mark.parametrize("state_dtype", EIGHT_BITS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mode", MODES)
@STATE_DTYPES
def test_bodies_of_8_bits(device: torch.device, state_dtype: str, mode: str, dtype: torch.dtype) -> None:
    inputs, options = matrix_case(mode, EIGHT_BITS[state_dtype], dtype)
    shape = inputs[5].shape
    ours, theirs = moved(inputs, device), moved(inputs, CPU)
    found = cuda.matrix_scan(*ours, **{name: moved(x, device) for name, x in options.items()}).cpu()
    assert_kernel_close(found, reference.matrix_scan(*theirs, **options), dtype)
    ours = moved(ours, CPU)
    forget_folded(ours)
    forget_folded(theirs)
    for flat, twin in zip(flats_of(ours)[1:], flats_of(theirs)[1:], strict=True):
        assert torch.equal(flat.isnan(), twin.isnan()), "another part of the rings was written"
        assert_kernel_close(flat.nan_to_num().float(), twin.nan_to_num().float(), dtype)
    assert_nothing_else_written(ours[5], theirs[5])
    targets = ours[5].targets[ours[5].targets >= 0]
    apart = TOLERANCE[dtype].kernel
    assert_same_bodies(ours[5].flat, theirs[5].flat, targets, shape, state_dtype, dtype, apart=apart)


@STATE_DTYPES
def test_channels_of_8_bits(device: torch.device, state_dtype: str) -> None:
    n_numbers, n_channels = 5, 140
    rings = ((n_channels,), (n_channels,), (n_numbers,))
    slots = in_8_bits(behind_tails((n_numbers, n_channels), rings, COUNTS, LENGTHS, FOLDS), EIGHT_BITS[state_dtype])
    x, dt, b, c = rows_of(N, n_channels, n_channels, n_numbers, n_numbers)
    a, bias, d = -torch.rand(n_numbers, n_channels), torch.randn(n_channels) - 1, torch.randn(n_channels)
    inputs = (x, dt, bias, b, c, a, d, slots)
    ours, theirs = moved(inputs, device), moved(inputs, CPU)
    found = cuda.selective_scan(*ours).cpu()
    assert_kernel_close(found, reference.selective_scan(*theirs), torch.float32)
    own, targets = moved(ours[-1], CPU), slots.targets[slots.targets >= 0]
    assert_same_bodies(own.flat, theirs[-1].flat, targets, slots.shape, state_dtype, torch.float32)
    assert_nothing_else_written(own, theirs[-1])


@STATE_DTYPES
# In the interpreter, numpy warns of the products that this test wants.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_with_a_number_that_is_none_becomes_nan(device: torch.device, bad: float, state_dtype: str) -> None:
    """A row with a NaN or an infinite number becomes NaN. The other rows of the state do not change."""
    slots = in_8_bits(behind_tails((5, 9), ((9,), (9,), (5,)), (0,), (2,), (1,)), EIGHT_BITS[state_dtype])
    x, dt, b, c = rows_of(2, 9, 9, 5, 5)
    x = x.clone()
    x[0, 4] = bad
    inputs = (x, dt, torch.randn(9), b, c, -torch.rand(5, 9), torch.randn(9), slots)
    ours, theirs = moved(inputs, device), moved(inputs, CPU)
    cuda.selective_scan(*ours)
    reference.selective_scan(*theirs)
    body, twin = (read_states(x[-1].flat.cpu(), slots.targets, slots.shape, 0.0) for x in (ours, theirs))
    assert torch.equal(body.isnan(), twin.isnan())
    assert bool(body[0, :, 4].isnan().all())
    assert int(body.isnan().sum()) == 5
