"""Copies rows into the arena and out of it, on the CPU."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.errors import StepError
from hybridmem.memory.kernels import checks
from hybridmem.memory.kernels.cpu.compiled import compiled
from hybridmem.memory.kernels.cpu.numbers import array_at, move, put
from hybridmem.memory.kernels.cpu.rules import subroutine
from hybridmem.memory.kernels.signature import PagedBatch, Prepared, StateSlots, as_tensor

_BITS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}
LIKE: dict[torch.dtype, np.ndarray] = {
    torch.float32: np.empty(0, np.float32), torch.bfloat16: np.empty(0, np.uint16), torch.float16: np.empty(0, np.int16)
}  # fmt: skip
"""Empty arrays that tell `numbers.array_at` the dtype of a tensor."""


def prepare(tensor: Tensor) -> Prepared:
    """Return the tensor as an array that numba takes. Floats of 16 bits become integers; see `numbers`.

    Floats of 8 bits, in which bodies may be stored, become integers as well. No other kernel takes them.
    """
    return tensor.view(torch.uint8).numpy() if tensor.dtype is torch.float8_e4m3fn else _in_numpy(tensor)


def _in_numpy(tensor: Tensor) -> Prepared:
    try:
        own = tensor.detach() if tensor.requires_grad else tensor
        return own.view(_BITS[own.dtype]).numpy() if own.dtype in _BITS else own.numpy()
    except TypeError as error:
        raise StepError(
            f"{tensor.dtype} on {tensor.device} is not for these kernels; give numbers that numpy has, on the CPU"
        ) from error


def plan_attention(*_: object) -> None:
    """Do nothing, because the kernels here divide their work when they run."""


def plan_choice(*_: object) -> None:
    """Do nothing, like `plan_attention`."""


def as_array(x: Prepared) -> Prepared:
    return x if isinstance(x, np.ndarray) else _in_numpy(x)


def as_flat(x: Tensor) -> tuple[Prepared, int]:
    """Return x (T, ...) as one flat array, and the distance between two rows in it, in elements.

    The array is a view if each row is contiguous. So parts of wider rows, such as the keys in a projection, are read in
    place.
    """
    n_rows, n_elements = x.shape[0], math.prod(x.shape[1:])
    if x.is_contiguous():
        return as_array(x).reshape(-1), n_elements
    if n_rows == 1 or not x[0].is_contiguous():
        return as_array(x.contiguous()).reshape(-1), n_elements
    stride = x.stride(0)
    return as_array(x.as_strided(((n_rows - 1) * stride + n_elements,), (1,))), stride


def opened(state: StateSlots) -> StateSlots:
    """Return a state's slots in float32. If the state has 16 bits, they are copies that `close` writes back."""
    if as_array(state.flat).dtype == np.float32:
        return state
    copies = read_rows(state.flat, state.sources, state.shape, state.initial).float().flatten()
    places = np.arange(len(state.sources)) * math.prod(state.shape)
    return state._replace(flat=copies, sources=places, targets=places)


def close(own: StateSlots, state: StateSlots) -> None:
    """Write what a kernel has left in the slots of `opened(state)` into the state."""
    if own is not state:
        write_rows_(state.flat, state.targets, as_tensor(own.flat).view(len(state.sources), -1))


def write_rows_(flat: Prepared, offsets_T: Prepared, rows_TR: Tensor) -> None:
    if offsets_T.shape[0] != rows_TR.shape[0]:
        raise StepError(f"{rows_TR.shape[0]} rows go to {offsets_T.shape[0]} places; give one for each")
    own = rows_TR if rows_TR.dtype in checks.FLOATS_UP_TO_32_BITS else rows_TR.float()
    own = own.contiguous()
    _write_rows(as_array(flat), as_array(offsets_T), own.data_ptr(), own.shape[1], LIKE[own.dtype])


@compiled()
def _write_rows(flat, offsets_T, rows_at, n, like):
    rows = array_at(rows_at, len(offsets_T) * n, like)
    for t in range(len(offsets_T)):
        start = offsets_T[t]
        copy_(flat[start : start + n], rows[t * n : (t + 1) * n])


def read_rows(flat: Prepared, offsets_T: Prepared, shape: tuple[int, ...], initial: float) -> Tensor:
    array = as_array(flat)
    rows_TR = torch.empty(len(offsets_T), math.prod(shape), dtype=as_tensor(array[:0]).dtype)
    _read_rows(array, as_array(offsets_T), as_array(rows_TR), np.float32(initial))
    return rows_TR.reshape(len(offsets_T), *shape)


@compiled()
def _read_rows(flat, offsets_T, rows_TR, initial):
    for t in range(len(offsets_T)):
        start = offsets_T[t]
        if start < 0:
            fill_(rows_TR[t], initial)
        else:
            copy_(rows_TR[t], flat[start : start + rows_TR.shape[1]])


def gather_rows(
    flat: Prepared, batch: PagedBatch, request: int, n_kv_heads: int, head_dim: int, begin: int, end: int
) -> Tensor:
    """Copy rows [begin, end) of the rows that a request sees in pages, in order: (rows, G, D), stored head by head."""
    array = as_array(flat)
    rows_GRD = torch.empty(n_kv_heads, end - begin, head_dim, dtype=as_tensor(array[:0]).dtype)
    pages_GP = np.atleast_2d(as_array(batch.pages))[:, batch.cu_pages[request] : batch.cu_pages[request + 1]]
    _gather_rows(array, pages_GP, batch.page_tokens, begin, as_array(rows_GRD))
    return rows_GRD.transpose(0, 1)


@compiled()
def _gather_rows(flat, pages_GP, page_tokens, first, rows_GRD):
    """Copy rows from the request's row `first` on."""
    n_heads, n_rows, head_dim = rows_GRD.shape
    for g in range(n_heads):
        table = pages_GP[g if len(pages_GP) > 1 else 0]
        row = 0
        while row < n_rows:
            page, slot = (first + row) // page_tokens, (first + row) % page_tokens
            n = min(page_tokens - slot, n_rows - row)
            start = table[page] + (g * page_tokens + slot) * head_dim
            copy_(rows_GRD[g, row : row + n].reshape(-1), flat[start : start + n * head_dim])
            row += n


@subroutine()
def copy_(target, source):
    for e in range(len(target)):
        move(target, source, e)


@subroutine()
def fill_(target, x):
    for e in range(len(target)):
        put(target, e, x)
