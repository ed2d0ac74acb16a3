"""Describes the layouts of weights that are held as integers, in the form that kernels of products read.

A weight is scale * (code - zero), plus a minimum in some layouts; or scale * table[code]; or scale * a float of 8 bits.
Sixteen outputs form a block. A block is stored from its first 32 inputs to its last. Codes and scales are two arrays.

Codes, for each block and each 32 inputs in it: 64 bytes for each bit of a code.
    8 bits, signed or floats: 16 pairs of inputs; a pair has 16 outputs of two bytes, the first input's first.
    fewer bits, not negative: as many words of 16 bits as a code has bits, each for 16 outputs and the two inputs of a
        pair. A word holds codes of as many pairs as fit, from its lowest bit on. Codes of the last pairs, which do not
        fit into whole words, lie in the highest bits of all words (`spare_bits`).

Scales come, for each block and each unit of inputs in it, in 16 bits: a float for each output, and another float if
minima are floats or factors of floats. After them come, for each group of the unit, in 8 bits: 16 factors of the scale
if a unit has several groups, and 16 factors of the minimum.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

BLOCK, GROUP, PAIRS = 16, 32, 16
"""The outputs of a block, the inputs that are read at once, and the pairs of these inputs."""

Minimum = Literal["float", "factor", "zero"]
"""How a minimum is stored. "float": as a float of its own.

"factor": it is minus a float of the unit times a factor of the group. "zero": it is minus the scale times an integer of
the group, which is the code of zero.
"""


@dataclass(frozen=True)
class Layout:
    """Describes one layout.

    Attributes:
        n_bits: how many bits a code has: 2 to 6, or 8.
        scale: the type of floats.
        group: how many inputs share a scale: 16 or a multiple of 32; or 0 if all inputs of an output share one.
        unit: how many inputs share a float. It is more than `group` if the scale of a group is a factor times this
            float.
        zero: the code of weights that are zero, without a table.
        minimum: how minima are stored, or None if there are none.
        table: the integers that codes of 4 bits stand for.
        float8: the type of codes of 8 bits that are floats, or None.
    """

    n_bits: int
    scale: Literal["bfloat16", "float16", "float32"] = "float16"
    group: int = 32
    unit: int = 0
    zero: int = 0
    minimum: Minimum | None = None
    table: tuple[int, ...] | None = None
    float8: Literal["float8_e4m3fn", "float8_e5m2"] | None = None

    @cached_property
    def name(self) -> str:
        """Return a name for everything that kernels are compiled for."""
        parts = [self.float8 or f"{self.n_bits} bits", f"{self.scale} a {self.unit or self.group or 'row'}"]
        parts += [f"factors a {self.group}"] if self.has_factors else []
        parts += [f"zero {self.zero}"] if self.zero else []
        parts += [f"minimum {self.minimum}"] if self.minimum else []
        parts += ["table " + " ".join(map(str, self.table))] if self.table else []
        return ", ".join(parts)

    @property
    def has_factors(self) -> bool:
        """True if the scale of a group is its factor times a float that several groups share."""
        return self.unit > self.group > 0

    @property
    def is_by_row(self) -> bool:
        """True if all inputs of an output share a scale."""
        return self.group == 0

    @property
    def n_parts(self) -> int:
        """Return how many scales 32 inputs of an output have."""
        return 1 if self.is_by_row else max(1, GROUP // self.group)

    @property
    def summed_inputs(self) -> int:
        """Return how many inputs of a row are summed, because their sum counts times a minimum; 0 without minima."""
        return 0 if self.minimum is None else min(self.group, GROUP)

    @property
    def code_bytes(self) -> int:
        """Return the bytes of the codes of 32 inputs of a block."""
        return self.n_bits * GROUP * BLOCK // 8

    @property
    def float_shorts(self) -> int:
        """Return how many 16-bit numbers hold one float for each output of a block."""
        return 2 * BLOCK if self.scale == "float32" else BLOCK

    @property
    def n_floats(self) -> int:
        """Return how many floats a unit has."""
        return 2 if self.minimum in ("float", "factor") else 1

    @property
    def n_factors(self) -> int:
        """Return how many 8-bit numbers a group has."""
        return int(self.has_factors) + int(self.minimum in ("factor", "zero"))

    @property
    def unit_inputs(self) -> int:
        """Return how many inputs a unit has."""
        return max(self.unit, self.group)

    @property
    def unit_shorts(self) -> int:
        """Return how many 16-bit numbers a block's unit has."""
        n_groups = 1 if self.is_by_row else self.unit_inputs // self.group
        return self.n_floats * self.float_shorts + self.n_factors * n_groups * BLOCK // 2

    def n_units(self, n_in: int) -> int:
        """Return how many units `n_in` inputs have. A unit consists of whole groups of 32."""
        return 1 if self.is_by_row else -(-(-(-n_in // GROUP) * GROUP) // self.unit_inputs)

    @cached_property
    def dtype(self) -> np.dtype:
        """Return the type of arrays of codes.

        Compiled code recognizes the layout by the name of the type's only field.
        """
        _LAYOUTS[self.name] = self
        return np.dtype([(self.name, np.uint8)])


_LAYOUTS: dict[str, Layout] = {}


def layout_of(name: str) -> Layout:
    """Return the layout whose `dtype` has a field of this name."""
    return _LAYOUTS[name]


def whole_pairs(n_bits: int) -> int:
    """Return how many pairs have their whole codes in words. The codes of the others are in `spare_bits`."""
    return n_bits * (16 // n_bits)


def spare_bits(n_bits: int, pair: int) -> list[tuple[int, int]]:
    """Return the places of a code that is in no single word: for each bit, from the lowest, a word and a bit in it."""
    n_spare = 16 % n_bits
    n_low = 16 - whole_pairs(n_bits)  # Each of the first `n_low` words holds the lowest bits of one pair.
    own = pair - whole_pairs(n_bits)
    found = [(own, 16 - n_spare + bit) for bit in range(n_spare)]
    for bit in range(n_bits - n_spare):
        at = own * (n_bits - n_spare) + bit
        found.append((n_low + at // n_spare, 16 - n_spare + at % n_spare))
    return found


INT8 = Layout(8, "bfloat16")
INT8_BY_ROW = Layout(8, "bfloat16", group=0)
INT4 = Layout(4, "bfloat16", zero=8)
