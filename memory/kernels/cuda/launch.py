"""Launches Triton kernels, and holds what they share: rows of matrices, their products, and sizes of tiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True if Triton runs kernels in its interpreter, on tensors of the CPU (TRITON_INTERPRET=1 when triton is imported).
"""

MOST_REGISTERS = 255
"""How many registers a thread of an NVIDIA GPU may have at most."""
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc):
    """Compute acc + a b with sums in float32.

    Tensor cores read only 10 bits of a float32's fraction, so each float32 is given as a sum of two numbers. These are
    of the same kind ("tf32x3"), or bfloat16 (together 16 bits of the fraction) if the other factor is bfloat16, which
    is twice as fast.

    All three sides of a and b are at least 16 long. Other pairs of dtypes, and float64, are rounded to float32. In the
    interpreter all are, because it takes bfloat16 for integers.
    """
    if not _INTERPRETED and a.dtype == tl.bfloat16 and b.dtype == tl.float32:
        high = b.to(tl.bfloat16)
        acc = tl.dot(a, high, tl.dot(a, (b - high.to(tl.float32)).to(tl.bfloat16), acc))
    elif not _INTERPRETED and a.dtype == tl.float32 and b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        acc = tl.dot(high, b, tl.dot((a - high.to(tl.float32)).to(tl.bfloat16), b, acc))
    elif not _INTERPRETED and a.dtype == b.dtype and a.dtype != tl.float64:
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
    return acc


@triton.jit
def load_rows(x, stride, rows, is_row, n, n_columns, other=0.0):
    """Load a block (rows, columns) of a matrix x. The result is `other` where x has no such row or column."""
    at = x + (rows * stride)[:, None] + n[None, :]
    return tl.load(at, mask=is_row[:, None] & (n < n_columns)[None, :], other=other)


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def aligned_elements(n_elements: int, itemsize: int) -> int:
    """Return the number of elements of which offsets of rows are multiples: 16 bytes, or 1 element.

    It is 16 bytes if a row is a whole number of 16 bytes, because blocks are, too.
    """
    return 16 // itemsize if n_elements * itemsize % 16 == 0 else 1


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *args: object,
    num_warps: int = 4,
    num_stages: int = 1,
    max_registers: int = MOST_REGISTERS,
    **constants: object,
) -> None:
    """Run a kernel on the device of its first tensor. If the launch grid is empty, do nothing.

    With fewer registers per thread, more programs run at once, unless values no longer fit into registers.
    """
    if 0 in grid:
        return
    device = next(x.device for x in args if isinstance(x, Tensor))
    guard: AbstractContextManager[object] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with guard:
        # Fused multiply-add is set explicitly, because Triton's default changes between versions.
        options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True}
        kernel[grid](*args, **constants, **options, maxnreg=None if max_registers == MOST_REGISTERS else max_registers)


def head_parts(head_dim: int) -> dict[str, int]:
    """Return two powers of two, D0 and D1, whose sum is at least a head's channels; D1 may be 0.
    D0 has no unused channels unless the head is narrower than the smallest tile, which is 16.
    """
    first = max(16, 1 << (head_dim.bit_length() - 1))
    return {"D0": first, "D1": max(16, next_power_of_2(head_dim - first)) if head_dim > first else 0}


def with_contiguous_rows(x: Tensor) -> Tensor:
    """Return x (T, ...) with contiguous rows.

    It is x itself if its rows are contiguous, as in a part of a wider row.
    """
    return x if x.numel() == 0 or x[0].is_contiguous() else x.contiguous()


def absent(x: Any, instead: Tensor) -> Any:
    """Return x, or, if it is None, a pointer that is never read."""
    return instead if x is None else x
