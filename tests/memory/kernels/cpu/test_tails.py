"""CPU kernels for states behind tails return what their twins return, and leave every byte of the arena as they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hybridmem.memory.kernels import Erase, StateSlots, cpu, reference
from tests.extent import IS_LONG
from tests.memory.kernels.tails import behind_tails, flats_of, forget_folded, matrix_rows, moved, rows_of, table
from tests.subjects import IS_FULL
from tests.tolerances import assert_kernel_close

DTYPES = (torch.float32, *((torch.bfloat16,) if IS_LONG else ()), *((torch.float16,) if IS_FULL else ()))
"""Each is compiled on its own, which takes seconds."""

COUNTS, LENGTHS, FOLDS = (0, 1, 2, 9, 9, 3), (1, 1, 2, 1, 20, 1), (1, 0, 3, 4, 21, 0)
"""Tails that are empty, shorter than a window and full; bodies among old rows, across, among new ones, and none."""
N = sum(LENGTHS)


def assert_as_twin(name: str, *args: Any, dtype: torch.dtype, state_dtype: torch.dtype = torch.float32) -> None:
    args = tuple(
        x._replace(flat=x.flat.to(state_dtype)) if isinstance(x, StateSlots) and len(x.tail.flats) > 1 else x
        for x in args
    )
    options = args[-1] if isinstance(args[-1], dict) else {}
    args = tuple(x for x in args if not isinstance(x, dict))
    ours, theirs = moved(args, torch.device("cpu")), moved(args, torch.device("cpu"))
    expected = getattr(reference, name)(*theirs, **options)
    assert_kernel_close(getattr(cpu, name)(*ours, **options), expected, table(dtype))
    forget_folded(ours)
    forget_folded(theirs)
    for flat, twin in zip(flats_of(ours), flats_of(theirs), strict=True):
        assert torch.equal(flat.isnan(), twin.isnan()), "another part of the arena was written"
        assert_kernel_close(flat.nan_to_num().float(), twin.nan_to_num().float(), table(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolution(dtype: torch.dtype) -> None:
    slots = behind_tails((3, 140), ((143,),), COUNTS, LENGTHS, FOLDS, dtype, initial=0.5)
    rows, weight, bias = (x.to(dtype) for x in (torch.randn(N, 143), torch.randn(4, 140), torch.randn(140)))
    assert_as_twin("causal_conv", rows, weight, bias, slots, dtype=dtype)
    assert_as_twin("causal_conv", rows, weight, None, slots, {"activation": False}, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_selective_scan(dtype: torch.dtype) -> None:
    """If rows have 16 bits, states have 16 bits as well."""
    slots = behind_tails((5, 140), ((140,), (140,), (5,)), COUNTS, LENGTHS, FOLDS, dtype)
    x, dt, b, c = rows_of(N, 140, 140, 5, 5, dtype=dtype)
    a, bias, d = -torch.rand(5, 140).mul(3).exp() / 4, torch.randn(140) - 1, torch.randn(140)
    assert_as_twin("selective_scan", x, dt, bias, b, c, a, d, slots, dtype=dtype, state_dtype=dtype)


def test_stabiliser() -> None:
    gate, log_decay = rows_of(N, 6, 6)
    slots = behind_tails((6,), ((6,),), COUNTS, LENGTHS, FOLDS, initial=0.5)
    assert_as_twin("stabilise", 9 * gate, -log_decay.abs(), slots, dtype=torch.float32)


SHAPES = [((3, 1, 5, 12), torch.float32), ((1, 1, 300, 64), torch.float32)]
IN_16_BITS = [((4, 2, 9, 48), torch.bfloat16), ((4, 2, 9, 48), torch.float16)]


@pytest.mark.parametrize("mode", ["adds", "erases", "by column", "with b, by column"])
@pytest.mark.parametrize(("shape", "dtype"), SHAPES + (IN_16_BITS if IS_FULL else []), ids=str)
def test_matrix_scan(shape: tuple[int, int, int, int], dtype: torch.dtype, mode: str) -> None:
    """States belong to one task or several, heads may share keys, and tokens change states in every possible way."""
    n_heads, n_groups, n_rows, n_columns = shape
    decays = (n_heads, n_columns) if "column" in mode else (n_heads,)
    rings = [(n_groups, n_columns), (n_heads, n_rows), decays]
    has_b = "b," in mode
    slots = behind_tails(
        (n_heads, n_rows, n_columns), (*rings, *([(n_heads, n_columns), (n_heads, n_rows)] if has_b else [])),
        COUNTS, LENGTHS, FOLDS, dtype,
    )  # fmt: skip
    q, k, v = matrix_rows(N, *shape, dtype=dtype)
    b = -torch.rand(N, n_heads, 1) * F.normalize(torch.randn(N, n_heads, n_columns), dim=-1)
    erase = (
        Erase(k, b.to(dtype) if has_b else None, after_decay=not has_b) if mode not in ("adds", "by column") else None
    )
    options = {} if has_b else {"strength_TH": torch.rand(N, n_heads), "skip_H": torch.randn(n_heads)}
    assert_as_twin("matrix_scan", q, k, v, -torch.rand(N, *decays), erase, slots, options, dtype=dtype)
