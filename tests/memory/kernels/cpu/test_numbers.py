"""In compiled loops, each float of 16 bits is converted as in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import njit

from hybridmem.memory.kernels.cpu.numbers import get, move, put
from hybridmem.memory.kernels.cpu.rows import as_array, copy_
from hybridmem.memory.kernels.cpu.vectors import LANES, load, store
from hybridmem.memory.kernels.signature import as_tensor

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@njit
def _read(x, out):
    for e in range(len(out)):
        out[e] = get(x, e)


@njit
def _read_vectors(x, out):
    for e in range(0, len(out), LANES):
        store(out, e, load(x, e))


@njit
def _write(x, out):
    for e in range(len(out)):
        put(out, e, x[e])


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether numbers are equal, with the sign of zero. Any NaN equals any other."""
    return bool((torch.isnan(a) & torch.isnan(b) | (a == b) & (a.signbit() == b.signbit())).all())


@DTYPES
@pytest.mark.parametrize("read", [_read, _read_vectors])
def test_every_number_is_read(read: object, dtype: torch.dtype) -> None:
    numbers = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    out = np.empty(1 << 16, np.float32)
    read(as_array(numbers), out)  # type: ignore[operator]
    assert same(torch.from_numpy(out), numbers.float())


@DTYPES
def test_numbers_are_rounded_as_torch_does(dtype: torch.dtype) -> None:
    """Numbers are rounded to the nearest, and ties to even.

    The test takes numbers at, between and beside all floats of 16 bits, infinities and NaN.
    """
    numbers = torch.arange(1 << 16).to(torch.uint16).view(dtype).float()
    bits = numbers.view(torch.int32)
    halves = 1 << (15 if dtype == torch.bfloat16 else 12)
    x = torch.cat([(bits + more).view(torch.float32) for more in (0, 1, -1, halves - 1, halves, halves + 1)])
    out = torch.empty(len(x), dtype=dtype)
    _write(x.numpy(), as_array(out))
    assert same(out.float(), x.to(dtype).float())


@DTYPES
def test_copies_of_one_dtype_keep_their_bits(dtype: torch.dtype) -> None:
    numbers = torch.arange(1 << 16).to(torch.uint16)
    out = torch.zeros(1 << 16, dtype=dtype)
    copy_(as_array(out), as_array(numbers.view(dtype)))
    assert torch.equal(out.view(torch.uint16), numbers)


def test_other_arrays_are_read_and_written_as_ever() -> None:
    @njit
    def run(x, y):
        move(y, x, 0)
        put(y, 1, get(x, 1) + 1)

    x, y = np.array([1 << 40, 7]), np.zeros(2, np.int64)
    run(x, y)
    assert y.tolist() == [1 << 40, 8]


@DTYPES
def test_arrays_become_tensors_again(dtype: torch.dtype) -> None:
    x = torch.randn(5).to(dtype)
    assert as_tensor(as_array(x)).dtype == dtype and torch.equal(as_tensor(as_array(x)), x)
