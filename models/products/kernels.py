"""Lists the kernels that multiply rows by weights: for which weights, and on which processors, each of them is.

A new kernel is a line of `KERNELS`. Products use the first kernel that is for their weights, with any number of rows,
and it is compiled ahead. If its line is removed, another kernel is used instead. Kernels of one format have the same
arguments. Those that multiply tiles also get addresses of rows, and a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hybridmem.memory.kernels.cpu.parts import has_many_registers, has_wide_products
from hybridmem.models.products import (
    amx,
    blocked_kernels,
    integer_row_kernels,
    integer_tile_kernels,
    integer_vectors,
    joined_kernels,
    quantised_kernels,
    tile_kernels,
)
from hybridmem.models.weights.layouts import Layout


@dataclass(frozen=True)
class Kernel:
    """Describes a kernel.

    Attributes:
        product: the compiled function.
        layouts: says whether the kernel is for integers in a layout; None if it is for weights that are floats.
        weights: the dtypes of weights, or of the floats for which integers stand.
        rows: the dtype in which the kernel reads rows.
        applies: returns whether compiled code may use the kernel on this processor, and is fast enough there.
        has_tiles: True if the kernel gets `amx.shape`.
    """

    product: Any
    layouts: Callable[[Layout], bool] | None
    weights: tuple[torch.dtype, ...]
    rows: torch.dtype
    applies: Callable[[], bool]
    has_tiles: bool = False


def _multiplies_tiles() -> bool:
    return integer_vectors.multiplies_pairs() and amx.multiplies_tiles()


def _multiplies_pairs_fastest() -> bool:
    """False if only oneDNN may use AMX, which makes oneDNN faster."""
    return integer_vectors.multiplies_pairs() and (amx.multiplies_tiles() or not torch.cpu._is_amx_tile_supported())


_F32, _BF16, _ANY = torch.float32, torch.bfloat16, (torch.float32, torch.bfloat16, torch.float16)


def _has_exact_sums(layout: Layout) -> bool:
    """True if weights are integers, so that their products with rounded rows are exact."""
    return layout.float8 is None


def _is_by_group(layout: Layout) -> bool:
    return not layout.is_by_row and _has_exact_sums(layout)


def _has_no_table(layout: Layout) -> bool:
    return layout.table is None or has_many_registers()


KERNELS = {
    "tiles": Kernel(tile_kernels.product, None, (_BF16,), _BF16, _multiplies_tiles, has_tiles=True),
    "pairs": Kernel(blocked_kernels.product, None, (_BF16,), _BF16, _multiplies_pairs_fastest),
    "float32": Kernel(blocked_kernels.product, None, (_F32,), _F32, has_wide_products),
    "integers in tiles": Kernel(
        integer_tile_kernels.product, _has_exact_sums, (_BF16,), _BF16, _multiplies_tiles, has_tiles=True
    ),
    "integers": Kernel(integer_row_kernels.product, _is_by_group, (_BF16,), _BF16, integer_vectors.adds_integers),
    "integers as pairs": Kernel(
        quantised_kernels.product, lambda _: True, (_BF16,), _BF16, integer_vectors.multiplies_pairs
    ),
    "integers as float32": Kernel(quantised_kernels.product, _has_no_table, _ANY, _F32, lambda: True),
}
"""Maps a name to a kernel. For each kind of weights, the fastest kernel comes first."""

JOINED_KERNELS = {
    "pieces": Kernel(joined_kernels.product, None, _ANY, _F32, lambda: True),
    "pieces in tiles": Kernel(
        joined_kernels.product_in_tiles, None, (_BF16,), _BF16, _multiplies_tiles, has_tiles=True
    ),
}
"""Maps a name to a kernel for weights in several layouts. These kernels are not chosen, but used by `joined`."""


def kernel_of(name: str) -> Kernel:
    """Return a kernel by its name."""
    return JOINED_KERNELS[name] if name in JOINED_KERNELS else KERNELS[name]


def choose(layout: Layout | None, dtype: torch.dtype) -> str | None:
    """Return the name of the kernel for weights of this dtype, or for integers in a layout that stand for this dtype.

    None if there is no compiled kernel, or if it is not the fastest product.
    """
    for name, kernel in KERNELS.items():
        is_for = layout is None if kernel.layouts is None else layout is not None and kernel.layouts(layout)
        if is_for and dtype in kernel.weights and kernel.applies():
            return name
    return None


def choose_by_row(dtype: torch.dtype) -> tuple[torch.dtype, str]:
    """Return in which dtype floats are laid out, and the kernel that gives a row the same bits in any batch.

    It may not be the fastest product, but oneDNN's has other bits for other numbers of rows.
    """
    if dtype is torch.bfloat16:
        for name in ("tiles", "pairs"):
            if KERNELS[name].applies() or (name == "pairs" and integer_vectors.multiplies_pairs()):
                return torch.bfloat16, name
    return torch.float32, "float32"
