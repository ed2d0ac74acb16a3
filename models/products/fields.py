"""Describes products in integers, which compiled code reads their weights and sizes from."""

from __future__ import annotations

import numpy as np
from numba import njit

from hybridmem.memory.kernels.cpu.parts import array_at

FIELDS = 11
"""The number of a product's fields: see `product_fields`.

They are one array of integers, because each array that a call is given has an object to be read, and between two calls
the weights push such objects out of the caches.
"""

CODES, SCALES, BIAS, ACTIVATION, N, N_OUT, N_PADDED, KERNEL = 0, 2, 4, 6, 7, 8, 9, 10
FLOATS, SHORTS = np.empty(0, np.float32), np.empty(0, np.uint16)


def product_fields(
    weight: tuple[np.ndarray, ...], bias: np.ndarray, activation: int, n: int, n_out: int, n_padded: int, kernel_at: int
) -> list[int]:
    """Describe a product in integers for compiled code; its arrays must live as long as these are used.

    Args:
        weight: arrays of codes, and of scales if they are integers.
        n_padded: inputs of a row, of which the last may be zeros; n counts their codes, or inputs where weights are
            integers and there are no tiles.
        kernel_at: from `few_rows_kernels.product_address`.
    """
    scales = weight[1] if len(weight) == 2 else SHORTS
    arrays = [number for array in (weight[0], scales, bias) for number in (array.ctypes.data, len(array))]
    return [*arrays, activation, n, n_out, n_padded, kernel_at]


@njit(inline="always")
def field_array(fields, at, like):
    """Return the array whose address and length are two fields."""
    return array_at(fields[at], fields[at + 1], like)


@njit(inline="never")
def keep(array):
    """Keep an array until here: what only has its address does not."""
    return len(array)
