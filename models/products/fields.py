"""Describes products as integers, from which compiled code reads the weights' addresses and sizes."""

from __future__ import annotations

import numpy as np

from hybridmem.memory.kernels.cpu.parts import array_at, inlined, subroutine

FIELDS = 11
"""The number of a product's fields: see `product_fields`.

They are a single array of integers, because each array in a call is an object that must be read, and between two calls
the weights push such objects out of the caches.
"""

CODES, SCALES, BIAS, ACTIVATION, N, N_OUT, N_PADDED, KERNEL = 0, 2, 4, 6, 7, 8, 9, 10
FLOATS, SHORTS = np.empty(0, np.float32), np.empty(0, np.uint16)


def product_fields(
    weight: tuple[np.ndarray, ...], bias: np.ndarray, activation: int, n: int, n_out: int, n_padded: int, kernel_at: int
) -> list[int]:
    """Describe a product as integers for compiled code. Its arrays must live as long as the integers are used.

    Args:
        weight: the array of codes, and the array of scales if codes are integers.
        n_padded: how many inputs a row has, with the zeros at its end. The field n is the number of their codes, or of
            inputs if weights are integers and there are no tiles.
        kernel_at: the result of `few_rows_kernels.product_address`.
    """
    scales = weight[1] if len(weight) == 2 else SHORTS
    arrays = [number for array in (weight[0], scales, bias) for number in (array.ctypes.data, len(array))]
    return [*arrays, activation, n, n_out, n_padded, kernel_at]


@inlined
def field_array(fields, at, like):
    """Return the array whose address and length are two consecutive fields."""
    return array_at(fields[at], fields[at + 1], like)


@subroutine(inline="never")
def keep(array):
    """Keep an array alive up to this call, because its address alone does not."""
    return len(array)
