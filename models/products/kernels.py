"""Lists the kernels that multiply rows by weights: for which weights each is, and on which processors.

A new kernel is a line of `KERNELS`. Products take the first that is for their weights, in every number of rows, and it
is compiled ahead. Without its line another kernel takes its place. Kernels of one format are given the same arguments;
those that multiply tiles are given addresses of rows and a shape as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch

from hybridmem.models.products import (
    amx,
    blocked_kernels,
    integer_row_kernels,
    integer_tile_kernels,
    integer_vectors,
    quantised_kernels,
    tile_kernels,
)
from hybridmem.models.weights.formats import IntegerFormat, WeightFormat


@dataclass(frozen=True)
class Kernel:
    """Describes a kernel.

    Attributes:
        product: the compiled function.
        formats, weights: it is for weights of these formats, which have one of these dtypes.
        rows: the dtype in which it reads rows.
        applies: says whether compiled code may use it on this processor, and should.
        has_tiles: True if it is given `amx.shape`.
    """

    product: Any
    formats: tuple[WeightFormat, ...]
    weights: tuple[torch.dtype, ...]
    rows: torch.dtype
    applies: Callable[[], bool]
    has_tiles: bool = False


def _multiplies_tiles() -> bool:
    return integer_vectors.multiplies_pairs() and amx.multiplies_tiles()


def _multiplies_pairs_fastest() -> bool:
    """False where oneDNN alone may use AMX, by which it is faster."""
    return integer_vectors.multiplies_pairs() and (amx.multiplies_tiles() or not torch.cpu._is_amx_tile_supported())


_F32, _BF16, _ANY = torch.float32, torch.bfloat16, (torch.float32, torch.bfloat16, torch.float16)
_ROUNDED: tuple[WeightFormat, ...] = get_args(IntegerFormat)

KERNELS = {
    "tiles": Kernel(tile_kernels.product, ("auto",), (_BF16,), _BF16, _multiplies_tiles, has_tiles=True),
    "pairs": Kernel(blocked_kernels.product, ("auto",), (_BF16,), _BF16, _multiplies_pairs_fastest),
    "float32": Kernel(blocked_kernels.product, ("auto",), (_F32,), _F32, integer_vectors.has_many_registers),
    "integers in tiles": Kernel(
        integer_tile_kernels.product, _ROUNDED, (_BF16,), _BF16, _multiplies_tiles, has_tiles=True
    ),
    "integers": Kernel(integer_row_kernels.product, ("int8", "int4"), (_BF16,), _BF16, integer_vectors.adds_integers),
    "integers as pairs": Kernel(quantised_kernels.product, _ROUNDED, (_BF16,), _BF16, integer_vectors.multiplies_pairs),
    "integers as float32": Kernel(quantised_kernels.product, _ROUNDED, _ANY, _F32, lambda: True),
}
"""Name -> kernel, the fastest of each format and dtype first."""


def choose(format: WeightFormat, dtype: torch.dtype) -> str | None:
    """Return the name of the kernel for weights of this format and dtype; None if compiled ones are not the fastest."""
    for name, kernel in KERNELS.items():
        if format in kernel.formats and dtype in kernel.weights and kernel.applies():
            return name
    return None
