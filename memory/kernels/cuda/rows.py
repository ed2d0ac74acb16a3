"""Copies rows into the arena and out of it, on the GPU."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from hybridmem.memory.errors import StepError
from hybridmem.memory.kernels.cuda.launch import aligned_elements, launch, next_power_of_2
from hybridmem.memory.kernels.signature import Prepared

_MOST_ELEMENTS = 2048
"""The most elements of a tile: 16 bytes or more for each thread of four warps."""


def prepare(tensor: Tensor) -> Prepared:
    return tensor.detach()


def write_rows_(flat: Tensor, offsets_T: Tensor, rows_TR: Tensor) -> None:
    if offsets_T.shape[0] != rows_TR.shape[0]:
        raise StepError(f"{rows_TR.shape[0]} rows go to {offsets_T.shape[0]} places; give one for each")
    rows_TR = rows_TR if rows_TR.stride(-1) == 1 or rows_TR.shape[-1] == 1 else rows_TR.contiguous()
    n_rows, n_elements = rows_TR.shape
    block_T, block_R = _tile(n_elements)
    grid = (triton.cdiv(n_rows, block_T), triton.cdiv(n_elements, block_R))
    align = aligned_elements(n_elements, flat.element_size())
    launch(
        _write,
        grid,
        flat,
        offsets_T,
        rows_TR,
        n_rows,
        n_elements,
        rows_TR.stride(0),
        BLOCK_T=block_T,
        BLOCK_R=block_R,
        ALIGN=align,
    )


def read_rows(flat: Tensor, offsets_T: Tensor, shape: tuple[int, ...], initial: float) -> Tensor:
    n_rows, n_elements = len(offsets_T), math.prod(shape)
    rows_TR = torch.empty(n_rows, n_elements, dtype=flat.dtype, device=flat.device)
    block_T, block_R = _tile(n_elements)
    grid = (triton.cdiv(n_rows, block_T), triton.cdiv(n_elements, block_R))
    align = aligned_elements(n_elements, flat.element_size())
    launch(
        _read,
        grid,
        flat,
        offsets_T,
        rows_TR,
        n_rows,
        n_elements,
        float(initial),
        BLOCK_T=block_T,
        BLOCK_R=block_R,
        ALIGN=align,
    )
    return rows_TR.view(n_rows, *shape)


def _tile(n_elements: int) -> tuple[int, int]:
    """Return the numbers of rows and elements that a program copies."""
    block_R = min(next_power_of_2(n_elements), _MOST_ELEMENTS)
    return max(1, _MOST_ELEMENTS // block_R // 8), block_R


@triton.jit(do_not_specialize=["n_rows"])
def _write(
    flat,
    offsets,
    rows,
    n_rows,
    n_elements,
    row_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ALIGN: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = (t < n_rows)[:, None] & (r < n_elements)[None, :]
    at = tl.multiple_of(tl.load(offsets + t, mask=t < n_rows, other=0), ALIGN)
    x = tl.load(rows + t.to(tl.int64)[:, None] * row_stride + r[None, :], mask=inside, other=0.0)
    tl.store(flat + at[:, None] + r[None, :], x.to(flat.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["n_rows"])
def _read(
    flat, offsets, rows, n_rows, n_elements, initial, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr, ALIGN: tl.constexpr
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = (t < n_rows)[:, None] & (r < n_elements)[None, :]
    at = tl.load(offsets + t, mask=t < n_rows, other=-1)
    is_there = (at >= 0)[:, None]
    at = tl.multiple_of(tl.where(at >= 0, at, 0), ALIGN)
    x = tl.load(flat + at[:, None] + r[None, :], mask=inside & is_there, other=0.0)
    x = tl.where(is_there, x, tl.full([BLOCK_T, BLOCK_R], initial, tl.float32).to(x.dtype))
    tl.store(rows + t.to(tl.int64)[:, None] * n_elements + r[None, :], x, mask=inside)
