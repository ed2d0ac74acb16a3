"""Describes what a slot holds: its blocks of each pool, their part in the memory, and its record in saved files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hybridmem.memory.blocks.arrays import Int64s

Record = dict[str, list[int]]
"""What a layer memory saves of a slot, as JSON, in addition to the bytes of its blocks."""


LiveRows = dict[str, NDArray[np.bool_]]
"""Maps a pool to masks of those rows of a slot's blocks that belong to its tokens, (blocks, rows per block).

A state counts as one row.
"""


Part = Literal["body", "tail", "head"]
"""What a block is for a sequence: "body" (older rows), "tail" (newest rows, exact) or "head" (a shortcut state)."""


@dataclass(frozen=True)
class Holding:
    """Lists the blocks of one pool that S slots hold as one part of their memory, for usage and pictures.

    Attributes:
        counts: (S,) the number of blocks of each slot.
        ids: (counts.sum(),) the blocks, slot after slot.
        starts, ends: (S,) the tokens [start, end) that each slot's blocks are for. If `ends` is None, they reach to the
            newest token. In cross-attention they count the encoder's rows. A negative number means that the state is
            stale.
        fold_tokens: the distance between positions at which rows fold into a body. None: rows do not fold.
    """

    pool: str
    part: Part
    counts: Int64s
    ids: Int64s
    starts: Int64s
    ends: Int64s | None = None
    fold_tokens: int | None = None
