"""Describes what a slot holds: blocks of each pool, their role, and what a saved file says beside their bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from memory.blocks.arrays import Int64s

if TYPE_CHECKING:
    pass


Record = dict[str, list[int]]
"""What a kind of memory knows of a slot beside the bytes of its blocks, as JSON can say it."""


LiveRows = dict[str, NDArray[np.bool_]]
"""Pool -> which rows of a slot's blocks mean anything to it, (blocks, rows a block); of a block that is one whole, one
row.
"""


Part = Literal["body", "tail", "head"]
"""What a block is to a sequence: what is older, the newest rows verbatim, or a state that is only a shortcut."""


@dataclass(frozen=True)
class Holding:
    """The blocks of one pool that S slots hold in one role, for whoever looks inside.

    Attributes:
        counts: (S,) blocks of each slot.
        ids: (counts.sum(),) slot after slot.
        starts, ends: (S,) the tokens [start, end) that each slot's blocks stand for; ends None: up to its newest. Of
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

    @staticmethod
    def of_tables(pool: str, part: Part, tables: list[Int64s], starts: Int64s, ends: Int64s | None = None) -> Holding:
        """Make a holding of slots with any number of blocks."""
        return Holding(
            pool,
            part,
            np.array([len(t) for t in tables], np.int64),
            np.concatenate([starts[:0], *tables]),
            starts,
            ends,
        )
