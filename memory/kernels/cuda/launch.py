"""What the kernels here share: how they are launched, and how host arrays reach the device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether Triton runs kernels in its interpreter, on tensors of the CPU (TRITON_INTERPRET=1 when triton is imported).
"""


_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc):  # type: ignore[no-untyped-def]
    """acc + a b, summed in float32.
    Tensor cores know 10 bits of a float32, so each is given as a sum of two ("tf32x3").

    All three sides of a and b are at least 16 long. The interpreter takes bfloat16 for integers, so there it gets
    float32.
    """
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="tf32x3")


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def aligned_elements(n_elements: int, itemsize: int) -> int:
    """What offsets of rows of so many elements are a multiple of: 16 bytes, where rows are whole numbers of that, for
    so are blocks.
    """
    return 16 // itemsize if n_elements * itemsize % 16 == 0 else 1


def launch(
    kernel: Any, grid: tuple[int, ...], *args: object, num_warps: int = 4, num_stages: int = 1, **constants: object
) -> None:
    """Run a kernel on the device of its first tensor; an empty grid is no launch."""
    if 0 in grid:
        return
    device = next(x.device for x in args if isinstance(x, Tensor))
    guard: AbstractContextManager[object] = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with guard:
        # Fused multiply-add is asked for by name: what Triton does without being asked changes from one version to the
        # next.
        kernel[grid](*args, **constants, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True)


def head_parts(head_dim: int) -> dict[str, int]:
    """Powers of two that hold a head: the first is full unless the head is narrower than a tile may be, the second may
    be 0.
    """
    first = max(16, 1 << (head_dim.bit_length() - 1))
    return {"D0": first, "D1": max(16, next_power_of_2(head_dim - first)) if head_dim > first else 0}


def with_contiguous_rows(x: Tensor) -> Tensor:
    """x (T, ...) such that each row is contiguous: itself where it is, such as a part of a wider row."""
    return x if x.numel() == 0 or x[0].is_contiguous() else x.contiguous()


def absent(x: Any, instead: Tensor) -> Any:
    """A pointer that is never read, where an input is None."""
    return instead if x is None else x
