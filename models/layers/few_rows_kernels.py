"""Compiles what lies between two steps of a model's layer for few rows: norms, gates and sums, with their products.

For one sequence a call from Python takes as long as the norm that it computes. And the weights that a product reads
push everything else out of the second-level cache, Python's objects too, so that a call takes twice as long as in a
loop of its own. All results have the bits of the separate functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import njit, types
from numba.extending import overload

from memory.kernels.cpu.addresses import address_of, call_at
from memory.kernels.cpu.compiled import compiled
from memory.kernels.cpu.norms import norm_row
from memory.kernels.cpu.numbers import array_at, get, put
from memory.kernels.cpu.rows import as_array
from models.layers import amx, blocked_kernels, finishing, integer_tile_kernels, quantised_kernels, tile_kernels


@dataclass(frozen=True)
class ProductKind:
    """Says which kernel computes a product: by the types of codes and of rows, and whether tiles are multiplied."""

    codes: np.dtype
    rows: torch.dtype
    has_tiles: bool

    @property
    def is_integer(self) -> bool:
        return self.codes.itemsize == 1


@cache
def product_address(kind: ProductKind) -> int:
    """Return the address of a kernel for products."""
    codes, i, no_bias = np.empty(0, kind.codes), 0, finishing.NO_BIAS
    like = as_array(torch.empty(0, dtype=kind.rows))
    shape = amx.shape(1) if kind.has_tiles else None
    if not kind.is_integer and shape is None:
        return address_of(blocked_kernels.product, codes, i, i, i, no_bias, i, i, i, i, like)
    if not kind.is_integer:
        return address_of(tile_kernels.product, codes, i, i, i, shape, no_bias, i, i, i, i)
    scales = np.empty(0, np.uint16)
    if shape is not None:
        return address_of(integer_tile_kernels.product, codes, scales, i, i, i, shape, no_bias, i, i, i, i, like)
    rows = np.empty((1, 1), like.dtype)
    return address_of(quantised_kernels.product, codes, scales, rows, no_bias, i, i, rows)


def _of_any_weight(at, weight, x_at, n_rows, n, shape, bias, activation, n_parts, out_at, n_out, like):  # type: ignore[no-untyped-def]
    raise NotImplementedError("for compiled code only: see `_choose`")


multiply: Any = _of_any_weight
"""Calls the product at an address, see `_choose`."""


@overload(_of_any_weight)
def _choose(at, weight, x_at, n_rows, n, shape, bias, activation, n_parts, out_at, n_out, like) -> Callable[..., Any]:  # type: ignore[no-untyped-def]
    """Choose a product's arguments by the types of a weight: a tuple of codes, and of scales if they are integers.

    `at` is from `product_address`; n counts codes, or inputs of integers without tiles; `shape` is that of `amx`, or
    None where there are no tiles.
    """
    is_integer, has_tiles = len(weight) == 2, shape != types.none
    if is_integer:
        return _integer_tiles if has_tiles else _integers
    return _tiles if has_tiles else _blocks


def _integer_tiles(at, weight, x_at, n_rows, n, shape, bias, activation, n_parts, out_at, n_out, like):  # type: ignore[no-untyped-def]
    call_at(at, (weight[0], weight[1], x_at, n_rows, n, shape, bias, activation, n_parts, out_at, n_out, like))


def _integers(at, weight, x_at, n_rows, n, shape, bias, activation, n_parts, out_at, n_out, like):  # type: ignore[no-untyped-def]
    x, out = array_at(x_at, n_rows * n, like).reshape((n_rows, n)), array_at(out_at, n_rows * n_out, like)
    call_at(at, (weight[0], weight[1], x, bias, activation, n_parts, out.reshape((n_rows, n_out))))


def _tiles(at, weight, x_at, n_rows, n, shape, bias, activation, n_parts, out_at, n_out, like):  # type: ignore[no-untyped-def]
    call_at(at, (weight[0], x_at, n_rows, n, shape, bias, activation, n_parts, out_at, n_out))


def _blocks(at, weight, x_at, n_rows, n, shape, bias, activation, n_parts, out_at, n_out, like):  # type: ignore[no-untyped-def]
    call_at(at, (weight[0], x_at, n_rows, n, bias, activation, n_parts, out_at, n_out, like))


@compiled(error_model="numpy")
def normed_products(  # type: ignore[no-untyped-def]
    x_at, n_rows, n_inputs, x_like, norm_weight, eps, n_padded, n, shape, n_parts, like, kernel_at, weight, bias,
    activation, out_at, n_out, other, other_bias, other_activation, other_at, n_other,
):  # fmt: skip
    """Set out = activation(norm(x) W^T + bias), and the same with other weights unless `other_at` is 0.

    Args:
        x_at: address of rows of `n_inputs` numbers as in `x_like`, which are rounded to the type of `like` first.
        n_padded: inputs of the products, of which those from `n_inputs` on are 0; n counts their codes.
        others: see `_choose`.
    """
    x = array_at(x_at, n_rows * n_inputs, x_like)
    rows, normed = np.empty(n_inputs, like.dtype), np.zeros(n_rows * n_padded, like.dtype)
    scratch = np.empty(n_inputs, np.float32)
    for t in range(n_rows):
        for e in range(n_inputs):
            put(rows, e, get(x, t * n_inputs + e))
        target = normed[t * n_padded : t * n_padded + n_inputs]
        norm_row(rows, rows[:0], norm_weight, eps, n_inputs, scratch, target)
    at = normed.ctypes.data
    multiply(kernel_at, weight, at, n_rows, n, shape, bias, activation, n_parts, out_at, n_out, like)
    if other_at != 0:
        multiply(kernel_at, other, at, n_rows, n, shape, other_bias, other_activation, n_parts, other_at, n_other, like)
    keep(normed)


@compiled(error_model="numpy")
def gated_product(  # type: ignore[no-untyped-def]
    y_at, gate_at, n_rows, n_inputs, norm_weight, eps, n_part, n_padded, n, shape, n_parts, like, kernel_at, weight,
    bias, residual_at, out_at, n_out, out_like,
):  # fmt: skip
    """Set out = residual + W (y * gate) + bias; or norm(y * gate) where there is a norm's weight.

    Args:
        y_at, gate_at: addresses of (n_rows, n_inputs) numbers as in `like`; no gate at 0.
        residual_at, out_at: of (n_rows, n_out) numbers as in `out_like`.
        others: as for `normed_products`.
    """
    y, n_gates = array_at(y_at, n_rows * n_inputs, like), n_inputs if gate_at != 0 else 0
    gate = array_at(gate_at, n_rows * n_inputs, like)
    gated, scratch = np.zeros(n_rows * n_padded, like.dtype), np.empty(n_inputs, np.float32)
    for t in range(n_rows):
        first = t * n_inputs
        own, gates, target = y[first : first + n_inputs], gate[first : first + n_gates], gated[t * n_padded :]
        if len(norm_weight) > 0:
            norm_row(own, gates, norm_weight, eps, n_part, scratch, target[:n_inputs])
        else:
            for e in range(n_inputs):
                put(target, e, get(own, e) * get(gates, e) if n_gates > 0 else get(own, e))
    product = np.empty(n_rows * n_out, like.dtype)
    place = product.ctypes.data
    multiply(kernel_at, weight, gated.ctypes.data, n_rows, n, shape, bias, 0, n_parts, place, n_out, like)
    residual, out = array_at(residual_at, n_rows * n_out, out_like), array_at(out_at, n_rows * n_out, out_like)
    for i in range(n_rows * n_out):
        put(out, i, get(residual, i) + get(product, i))
    keep(gated)
    keep(product)


@njit(inline="never")
def keep(array):  # type: ignore[no-untyped-def]
    """Keep an array until here: what only has its address does not."""
    return len(array)
