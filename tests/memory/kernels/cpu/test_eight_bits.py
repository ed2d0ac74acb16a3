"""CPU kernels for bodies of 8 bits are compared with plain torch: outputs, rings, and every byte of the bodies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridmem.memory.kernels import Erase, StateSlots, cpu, reference
from hybridmem.memory.kernels.eight_bits import EIGHT_BITS
from tests.extent import one_in, only_in_long
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
from tests.memory.kernels.tails import behind_tails, flats_of, forget_folded, matrix_rows, moved, rows_of
from tests.subjects import IS_FULL
from tests.tolerances import assert_kernel_close


def run(
    kernels: object, slots: StateSlots, inputs: tuple[Tensor, ...], erase: Erase | None, **options: Tensor
) -> Tensor:
    own = slots._replace(flat=slots.flat if kernels is reference else cpu.prepare(slots.flat))
    return kernels.matrix_scan(*inputs, erase, own, **options)  # type: ignore[attr-defined]


@only_in_long
@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if IS_FULL else [])], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("state_dtype", one_in(2, EIGHT_BITS))
def test_bodies_of_8_bits(state_dtype: str, mode: str, dtype: torch.dtype) -> None:
    (*inputs, erase, slots), options = matrix_case(mode, EIGHT_BITS[state_dtype], dtype)
    ours, theirs = (moved((slots,), torch.device("cpu")) for _ in range(2))
    expected = run(reference, theirs[0], tuple(inputs), erase, **options)
    assert_kernel_close(run(cpu, ours[0], tuple(inputs), erase, **options), expected, dtype)
    forget_folded(ours)
    forget_folded(theirs)
    for flat, twin in zip(flats_of(ours)[1:], flats_of(theirs)[1:], strict=True):
        assert torch.equal(flat.isnan(), twin.isnan()), "another part of the rings was written"
        assert_kernel_close(flat.nan_to_num().float(), twin.nan_to_num().float(), dtype)
    assert_nothing_else_written(ours[0], theirs[0])
    targets = slots.targets[slots.targets >= 0]
    assert_same_bodies(ours[0].flat, theirs[0].flat, targets, slots.shape, state_dtype, dtype)


@only_in_long
@pytest.mark.parametrize("state_dtype", one_in(2, EIGHT_BITS))
def test_channels_of_8_bits(state_dtype: str) -> None:
    n_numbers, n_channels, codes = 5, 140, EIGHT_BITS[state_dtype]
    rings = ((n_channels,), (n_channels,), (n_numbers,))
    slots = in_8_bits(behind_tails((n_numbers, n_channels), rings, COUNTS, LENGTHS, FOLDS), codes)
    x, dt, b, c = rows_of(N, n_channels, n_channels, n_numbers, n_numbers)
    a, bias, d = -torch.rand(n_numbers, n_channels), torch.randn(n_channels) - 1, torch.randn(n_channels)
    ours, theirs = (moved((slots,), torch.device("cpu"))[0] for _ in range(2))
    found = cpu.selective_scan(x, dt, bias, b, c, a, d, ours._replace(flat=cpu.prepare(ours.flat)))
    assert_kernel_close(found, reference.selective_scan(x, dt, bias, b, c, a, d, theirs), torch.float32)
    targets = slots.targets[slots.targets >= 0]
    assert_same_bodies(ours.flat, theirs.flat, targets, slots.shape, state_dtype, torch.float32)
    assert_nothing_else_written(ours, theirs)


@only_in_long
def test_a_segment_has_the_same_bits_alone_as_beside_a_prompt() -> None:
    shape, codes = (3, 10, 32), torch.int8
    slots = in_8_bits(behind_tails(shape, ((1, 32), (3, 10), (3,)), COUNTS, LENGTHS, FOLDS), codes)
    inputs = (*matrix_rows(N, 3, 1, 10, 32), -torch.rand(N, 3))
    together = run(cpu, moved((slots,), torch.device("cpu"))[0], inputs, None)
    starts = np.cumsum([0, *LENGTHS])
    for i in range(len(LENGTHS)):
        own = moved((slots,), torch.device("cpu"))[0]
        tail = own.tail._replace(
            sources=tuple(x[i : i + 1] for x in own.tail.sources),
            targets=tuple(x[i : i + 1] for x in own.tail.targets),
            firsts=own.tail.firsts[i : i + 1], counts=own.tail.counts[i : i + 1], folds=own.tail.folds[i : i + 1],
        )  # fmt: skip
        cu_rows = type(own.cu_rows)(np.array([0, LENGTHS[i]]), own.cu_rows.device[:2])
        one = own._replace(cu_rows=cu_rows, sources=own.sources[i : i + 1], targets=own.targets[i : i + 1], tail=tail)
        rows = slice(int(starts[i]), int(starts[i + 1]))
        assert torch.equal(run(cpu, one, tuple(x[rows] for x in inputs), None), together[rows])
