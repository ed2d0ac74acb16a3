"""Holds bytes: the arena, which divides a budget into blocks, and the pools, tables and arrays of blocks."""

from hybridmem.memory.blocks.arena import read_budget
from hybridmem.memory.blocks.arguments import check_usable, is_integer, read_count, read_device, read_dtype
from hybridmem.memory.blocks.arrays import EMPTY, Int64s, ceil_div
from hybridmem.memory.blocks.copying import refuse_to_copy
from hybridmem.memory.blocks.ends import ExitOnStack, has_ended
from hybridmem.memory.blocks.hints import refuse_arguments, refuse_attribute
from hybridmem.memory.blocks.scoped import Scoped, without_gradients
from hybridmem.memory.blocks.store import reserve

__all__ = [
    "EMPTY",
    "ExitOnStack",
    "Int64s",
    "Scoped",
    "ceil_div",
    "check_usable",
    "has_ended",
    "is_integer",
    "read_budget",
    "read_count",
    "read_device",
    "read_dtype",
    "refuse_arguments",
    "refuse_attribute",
    "refuse_to_copy",
    "reserve",
    "without_gradients",
]
