"""Compiles, for few rows, the norms, gates and sums between two steps of a layer, together with their products.

For one sequence, a call from Python takes as long as the norm that it computes. In addition, the weights that a product
reads push everything else out of the second-level cache, also Python's objects, so that a call takes twice as long as
in a loop of its own. All results have the same bits as those of the separate functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import overload

from hybridmem.memory.kernels.cpu.parts import (
    AS_WRITTEN,
    address_of,
    array_at,
    as_array,
    call_at,
    compiled,
    copy_,
    get,
    norm_row,
    put,
    subroutine,
)
from hybridmem.models.products import amx, epilogue
from hybridmem.models.products.fields import (
    ACTIVATION,
    BIAS,
    CODES,
    FIELDS,
    FLOATS,
    KERNEL,
    N_OUT,
    N_PADDED,
    SCALES,
    SHORTS,
    N,
    field_array,
    keep,
)
from hybridmem.models.products.kernels import JOINED_KERNELS, kernel_of


@dataclass(frozen=True)
class ProductKind:
    """Says which kernel of `KERNELS` multiplies rows by a weight, and the dtypes of rows and weight.

    16-bit rows whose codes are float32, because the processor cannot multiply 16 bits, are converted before and after.
    """

    codes: np.dtype
    rows: torch.dtype
    kernel: str

    @property
    def has_tiles(self) -> bool:
        return kernel_of(self.kernel).has_tiles

    def is_called_like(self, other: ProductKind) -> bool:
        """True if the kernels of both kinds take arguments of the same types, so that one call can reach either."""
        if self == other:
            return True
        are_integers = self.codes.itemsize == other.codes.itemsize == 1
        return are_integers and self.rows is other.rows and self.has_tiles is other.has_tiles


@cache
def codes_like(dtype: np.dtype) -> np.ndarray:
    """Return an empty array with the dtype of codes, by which kernels recognize it.

    Kernels of all layouts of integers are called in the same way, by address, so their callers need not know the
    layout.
    """
    return np.empty(0, np.uint8 if dtype.itemsize == 1 else dtype)


@cache
def product_address(kind: ProductKind) -> int:
    """Return the address of a kernel for products."""
    product, codes, i = kernel_of(kind.kernel).product, np.empty(0, kind.codes), 0
    like, no_bias = as_array(torch.empty(0, dtype=kind.rows)), epilogue.NO_BIAS
    scales = (np.empty(0, np.uint16),) if kind.codes.itemsize == 1 else ()
    if kind.has_tiles:
        return address_of(product, codes, *scales, i, i, i, amx.shape(1), no_bias, i, i, i, i, like)
    if scales:
        # Some kernels read rows as float32, and callers convert 16-bit rows for them. A joined product leaves this to
        # its pieces.
        reads = kind.rows if kind.kernel in JOINED_KERNELS else kernel_of(kind.kernel).rows
        rows, out = (as_array(torch.empty(1, 1, dtype=dtype)) for dtype in (reads, kind.rows))
        return address_of(product, codes, *scales, rows, no_bias, i, i, out)
    own = FLOATS if kind.codes == np.float32 else like
    return address_of(product, codes, i, i, i, no_bias, i, i, i, i, own)


def _by_any_weight(fields, first, codes_like, x_at, n_rows, shape, n_parts, out_at, like):
    raise NotImplementedError("compiled code calls what `_choose` returns instead")


product_by: Any = _by_any_weight
"""Multiplies rows by the weight whose fields begin at `first`. It works in compiled code only: see `_choose`."""


@overload(_by_any_weight, jit_options={"fastmath": AS_WRITTEN, "error_model": "numpy"})
def _choose(fields, first, codes_like, x_at, n_rows, shape, n_parts, out_at, like) -> Callable[..., Any]:
    """Choose how a product is called, by the types of codes and of `shape`.

    The call writes (n_rows, n_out) numbers of the dtype of `like` to `out_at`. `codes_like` is an array with the dtype
    of codes. `shape` is that of `amx`, or None if there are no tiles.
    """
    has_tiles = shape != types.none
    if codes_like.dtype.bitwidth == 8:
        return _integer_tiles if has_tiles else _integers
    if codes_like.dtype == types.float32 and like.dtype != types.float32:
        return _blocks_of_floats
    return _tiles if has_tiles else _blocks


def _integer_tiles(fields, first, codes_like, x_at, n_rows, shape, n_parts, out_at, like):
    call_at(fields[first + KERNEL], (
        field_array(fields, first + CODES, codes_like), field_array(fields, first + SCALES, SHORTS), x_at, n_rows,
        fields[first + N], shape, field_array(fields, first + BIAS, FLOATS), fields[first + ACTIVATION], n_parts,
        out_at, fields[first + N_OUT], like,
    ))  # fmt: skip


def _integers(fields, first, codes_like, x_at, n_rows, shape, n_parts, out_at, like):
    n, n_out = fields[first + N], fields[first + N_OUT]
    x, out = array_at(x_at, n_rows * n, like), array_at(out_at, n_rows * n_out, like)
    call_at(fields[first + KERNEL], (
        field_array(fields, first + CODES, codes_like), field_array(fields, first + SCALES, SHORTS),
        x.reshape((n_rows, n)), field_array(fields, first + BIAS, FLOATS), fields[first + ACTIVATION], n_parts,
        out.reshape((n_rows, n_out)),
    ))  # fmt: skip


def _tiles(fields, first, codes_like, x_at, n_rows, shape, n_parts, out_at, like):
    call_at(fields[first + KERNEL], (
        field_array(fields, first + CODES, codes_like), x_at, n_rows, fields[first + N], shape,
        field_array(fields, first + BIAS, FLOATS), fields[first + ACTIVATION], n_parts, out_at, fields[first + N_OUT],
        like,
    ))  # fmt: skip


def _blocks(fields, first, codes_like, x_at, n_rows, shape, n_parts, out_at, like):
    call_at(fields[first + KERNEL], (
        field_array(fields, first + CODES, codes_like), x_at, n_rows, fields[first + N],
        field_array(fields, first + BIAS, FLOATS), fields[first + ACTIVATION], n_parts, out_at, fields[first + N_OUT],
        like,
    ))  # fmt: skip


def _blocks_of_floats(fields, first, codes_like, x_at, n_rows, shape, n_parts, out_at, like):
    n_inputs, n_outputs = n_rows * fields[first + N], n_rows * fields[first + N_OUT]
    x, out = array_at(x_at, n_inputs, like), array_at(out_at, n_outputs, like)
    rows, results = np.empty(n_inputs, np.float32), np.empty(n_outputs, np.float32)
    copy_(rows, x)
    call_at(fields[first + KERNEL], (
        field_array(fields, first + CODES, codes_like), rows.ctypes.data, n_rows, fields[first + N],
        field_array(fields, first + BIAS, FLOATS), fields[first + ACTIVATION], n_parts, results.ctypes.data,
        fields[first + N_OUT], FLOATS,
    ))  # fmt: skip
    copy_(out, results)
    keep(rows)


@subroutine()
def _normed(x_at, n_rows, n_inputs, x_like, norm_at, eps, n_padded, like):
    """Return norms of rows, which are rounded to the type of `like` first, with zeros after them."""
    x, weight = array_at(x_at, n_rows * n_inputs, x_like), array_at(norm_at, n_inputs, like)
    rows, normed = np.empty(n_inputs, like.dtype), np.zeros(n_rows * n_padded, like.dtype)
    scratch = np.empty(n_inputs, np.float32)
    for t in range(n_rows):
        for e in range(n_inputs):
            put(rows, e, get(x, t * n_inputs + e))
        target = normed[t * n_padded : t * n_padded + n_inputs]
        norm_row(rows, rows[:0], weight, np.float32(eps), n_inputs, scratch, target)
    return normed


@subroutine()
def _gated(y, gate, n_rows, n_inputs, norm_weight, eps, n_part, n_padded, like):
    """Return y * gate, or norm(y * gate) where there is a norm's weight, with zeros after each row."""
    gated, scratch = np.zeros(n_rows * n_padded, like.dtype), np.empty(n_inputs, np.float32)
    n_gates = n_inputs if len(gate) > 0 else 0
    for t in range(n_rows):
        first = t * n_inputs
        own, gates, target = y[first : first + n_inputs], gate[first : first + n_gates], gated[t * n_padded :]
        if len(norm_weight) > 0:
            norm_row(own, gates, norm_weight, np.float32(eps), n_part, scratch, target[:n_inputs])
        else:
            for e in range(n_inputs):
                put(target, e, get(own, e) * get(gates, e) if n_gates > 0 else get(own, e))
    return gated


@subroutine()
def _add_product(fields, first, codes_like, x_at, n_rows, shape, n_parts, like, residual_at, out_at, out_like):
    """Multiply rows by the weight whose fields begin at `first`, and set `out` to residual plus the results."""
    n = n_rows * fields[first + N_OUT]
    product = np.empty(n, like.dtype)
    product_by(fields, first, codes_like, x_at, n_rows, shape, n_parts, product.ctypes.data, like)
    residual, out = array_at(residual_at, n, out_like), array_at(out_at, n, out_like)
    for i in range(n):
        put(out, i, get(residual, i) + get(product, i))
    keep(product)


@compiled()
def normed_products(fields, codes_like, x_at, n_rows, x_like, eps, shape, n_parts, like, out_at, other_at):
    """Set out = activation(norm(x) W^T + bias), and the same with another product's weights unless `other_at` is 0.

    Args:
        fields: the norm's address and the number of inputs, then the fields of the product, then those of the other
            one.
        codes_like, like: arrays with the dtypes of codes and of rows.
        x_at: the address of rows of the dtype of `x_like`, which are first rounded to the dtype of `like`.
        others: see `_choose`.
    """
    normed = _normed(x_at, n_rows, fields[1], x_like, fields[0], eps, fields[2 + N_PADDED], like)
    at = normed.ctypes.data
    product_by(fields, 2, codes_like, at, n_rows, shape, n_parts, out_at, like)
    if other_at != 0:
        product_by(fields, 2 + FIELDS, codes_like, at, n_rows, shape, n_parts, other_at, like)
    keep(normed)


@compiled()
def gated_product(fields, codes_like, y_at, gate_at, n_rows, eps, shape, n_parts, like, residual_at, out_at, out_like):
    """Set out = residual + W (y * gate) + bias, or with norm(y * gate) if there is a norm's weight.

    Args:
        fields: the norm's address (0 without a norm), the number of inputs, and the number of inputs that are
            normalized together; then the fields of the product.
        y_at, gate_at: the addresses of rows of the dtype of `like`. If gate_at is 0, there is no gate.
        residual_at, out_at: the addresses of rows of the dtype of `out_like`.
        others: as for `normed_products`.
    """
    n_inputs = fields[1]
    n = n_rows * n_inputs
    gated = _gated(
        array_at(y_at, n, like), array_at(gate_at, n if gate_at != 0 else 0, like), n_rows, n_inputs,
        array_at(fields[0], n_inputs if fields[0] != 0 else 0, like), eps, fields[2], fields[3 + N_PADDED], like,
    )  # fmt: skip
    _add_product(fields, 3, codes_like, gated.ctypes.data, n_rows, shape, n_parts, like, residual_at, out_at, out_like)
    keep(gated)


@compiled()
def gated_mlp(fields, codes_like, x_at, n_rows, x_like, eps, shape, n_parts, like, out_at):
    """Set out = x + W_down(act(W_gate norm(x)) * W_up norm(x)), with biases.

    Args:
        fields: the norm's address and the number of inputs, then the fields of three products: gate, up, down.
        x_at, out_at: the addresses of rows of the dtype of `x_like`.
        others: as for `normed_products`.
    """
    up_at, down_at = 2 + FIELDS, 2 + 2 * FIELDS
    normed = _normed(x_at, n_rows, fields[1], x_like, fields[0], eps, fields[2 + N_PADDED], like)
    n_inner = fields[2 + N_OUT]
    gate, up = np.empty(n_rows * n_inner, like.dtype), np.empty(n_rows * n_inner, like.dtype)
    product_by(fields, 2, codes_like, normed.ctypes.data, n_rows, shape, n_parts, gate.ctypes.data, like)
    product_by(fields, up_at, codes_like, normed.ctypes.data, n_rows, shape, n_parts, up.ctypes.data, like)
    gated = _gated(gate, up, n_rows, n_inner, up[:0], eps, n_inner, fields[down_at + N_PADDED], like)
    _add_product(fields, down_at, codes_like, gated.ctypes.data, n_rows, shape, n_parts, like, x_at, out_at, x_like)
    keep(normed)
    keep(gate)
    keep(up)
    keep(gated)
