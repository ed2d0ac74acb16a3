"""Publishes the parts from which kernels outside of this package are built, such as the products of `models.products`.

`compiled` keeps machine code on disk. `numbers` reads and writes 16-bit floats. The functions whose names end in `_at`
work at an address, so that a kernel can call them without making arrays.
"""

from hybridmem.memory.kernels.cpu.addresses import address_of, call_at
from hybridmem.memory.kernels.cpu.compiled import cache_folder, compiled, is_kept
from hybridmem.memory.kernels.cpu.features import features, has_many_registers, has_wide_products
from hybridmem.memory.kernels.cpu.norms import norm_parts_at, norm_row
from hybridmem.memory.kernels.cpu.numbers import (
    array_at,
    as_float,
    element_at,
    get,
    move,
    put,
    rounded,
    untyped_intrinsic,
)
from hybridmem.memory.kernels.cpu.recurrences import channels_at_once, convolve_at, scan_at
from hybridmem.memory.kernels.cpu.rows import LIKE, as_array, copy_
from hybridmem.memory.kernels.cpu.rules import AS_WRITTEN, inlined, subroutine
from hybridmem.memory.kernels.cpu.threads import use_threads
from hybridmem.memory.kernels.cpu.vector_math import EXP2, LOG2_E
from hybridmem.memory.kernels.cpu.warm_up import NAMES

__all__ = [
    "AS_WRITTEN",
    "EXP2",
    "LIKE",
    "LOG2_E",
    "NAMES",
    "address_of",
    "array_at",
    "as_array",
    "as_float",
    "cache_folder",
    "call_at",
    "channels_at_once",
    "compiled",
    "convolve_at",
    "copy_",
    "element_at",
    "features",
    "get",
    "has_many_registers",
    "has_wide_products",
    "inlined",
    "is_kept",
    "move",
    "norm_parts_at",
    "norm_row",
    "put",
    "rounded",
    "scan_at",
    "subroutine",
    "untyped_intrinsic",
    "use_threads",
]
