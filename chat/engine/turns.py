"""Finds the positions in a prompt at which turns of users begin. Prompts of other sessions may differ from there on.

Agents write long texts before and after the words of a user. A session with other words can continue from a checkpoint
before them, so the prefix cache keeps one there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridmem.memory.blocks import Int64s

_MOST_TURNS = 4
_LEAST_TOKENS = 64
"""A step of the model ends at each checkpoint. A checkpoint that lies nearer to the one before it costs more than it
saves.
"""


def begun_turns(token_ids: Sequence[int] | Int64s, begin: Sequence[int], n_before: int, n_behind: int) -> list[int]:
    """Return the positions of the latest turns, ascending, leaving out those that are too near to the one before.

    Args:
        begin: the tokens with which a turn of a user begins. If there are none, no turn is found.
        n_before: how many leading tokens need no checkpoint. All positions lie after them.
        n_behind: how many tokens must at least follow a position. Positions nearer to the end need no checkpoint,
            because the memory can roll back to them.
    """
    if not begin or len(token_ids) < n_before + n_behind + _LEAST_TOKENS:
        return []
    tokens = np.asarray(token_ids, np.int64)
    ends = max(0, len(tokens) - max(n_behind, len(begin)) + 1)
    found = np.flatnonzero(tokens[:ends] == begin[0])
    for offset, token_id in enumerate(begin[1:], 1):
        found = found[tokens[found + offset] == token_id]
    positions, last = list[int](), n_before
    for position in found.tolist():
        if position - last >= _LEAST_TOKENS:
            positions.append(position)
            last = position
    return positions[-_MOST_TURNS:]


def apart(cuts: Sequence[int], turns: Sequence[int]) -> list[int]:
    """Return the cuts and those of the turns that lie far enough after the previous cut, ascending."""
    kept = list[int]()
    for position in sorted({*cuts, *turns}):
        if position in cuts or not kept or position - kept[-1] >= _LEAST_TOKENS:
            kept.append(position)
    return kept
