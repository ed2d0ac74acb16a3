"""Describes what a slot holds: blocks of each pool, their role, and what a saved file says beside their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hybridmem.memory.blocks.arrays import Int64s

Record = dict[str, list[int]]
"""What a layer memory saves of a slot beside the bytes of its blocks, as JSON can hold it."""


LiveRows = dict[str, NDArray[np.bool_]]
"""Pool -> which rows of a slot's blocks belong to its tokens, (blocks, rows a block); a state is one row."""


Part = Literal["body", "tail", "head"]
"""The part of a sequence's memory that a block is: older rows, the newest rows verbatim, or a state as a shortcut."""


@dataclass(frozen=True)
class Holding:
    """Lists the blocks of one pool that S slots hold as one part of their memory, for usage and pictures.

    Attributes:
        counts: (S,) blocks of each slot.
        ids: (counts.sum(),) slot after slot.
        starts, ends: (S,) the tokens [start, end) that each slot's blocks are for; ends None: up to its newest. Of
            cross-attention the encoder's tokens. Negative: none, the state is stale.
        fold_tokens: distance of the positions at which rows fold into a body; None: they do not.
    """

    pool: str
    part: Part
    counts: Int64s
    ids: Int64s
    starts: Int64s
    ends: Int64s | None = None
    fold_tokens: int | None = None
