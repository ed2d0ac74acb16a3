"""Cuts requests into chunks: the tokens of a request that one step takes. It computes positions only.

If attention has a policy or few bits, a query sees the body as it was before its step. So what it sees depends on where
its prompt was cut. Such prompts are cut at multiples of GRID_TOKENS positions and nowhere else. Then the same text sees
the same rows, whichever requests share its steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s, ceil_div, ranges

GRID_TOKENS = 512
"""The distance between cuts on the grid, and the default of how many tokens a step of `HybridMemory.run` has."""


@dataclass(frozen=True)
class Chunks:
    """Lists n chunks. The chunks of a request follow each other.

    Attributes:
        requests: (n,) the number of the request that each chunk is a part of.
        starts, ends: (n,) the tokens [start, end) of each chunk, counted from the first new token of its request.
        steps: (n,) the number of the step that takes each chunk.
    """

    requests: Int64s
    starts: Int64s
    ends: Int64s
    steps: Int64s


def cut_anywhere(counts: Int64s, max_tokens: int, first: int = 0) -> Chunks:
    """Cut requests of counts (S,) tokens, one after the other, into steps of `max_tokens`.

    The last step may have fewer.

    The steps of the first `first` tokens, where `first` is a multiple of `max_tokens`, are left out.
    """
    ends = counts.cumsum()
    begins, n_tokens = ends - counts, int(ends[-1])
    cuts = np.unique(np.concatenate([begins[begins >= first], np.arange(first, n_tokens, max_tokens)]))
    requests = ends.searchsorted(cuts, side="right")
    starts, behind = cuts - begins[requests], np.append(cuts[1:], n_tokens) - begins[requests]
    return Chunks(requests, starts, behind, (cuts - first) // max_tokens)


def cut_on_grid(lengths: Int64s, counts: Int64s, max_tokens: int) -> Chunks:
    """Cut requests of counts (S,) tokens, for sequences of lengths (S,), at multiples of GRID_TOKENS positions.

    A step takes at most `max_tokens`, or GRID_TOKENS if that is more, because a chunk is never divided.
    """
    cells = lengths // GRID_TOKENS
    n_chunks = ceil_div(lengths + counts, GRID_TOKENS) - cells
    requests, numbers = np.repeat(np.arange(len(counts)), n_chunks), ranges(np.zeros_like(n_chunks), n_chunks)
    at = (cells[requests] + numbers) * GRID_TOKENS - lengths[requests]
    starts, ends = np.maximum(at, 0), np.minimum(at + GRID_TOKENS, counts[requests])
    steps, last_step = np.zeros_like(starts), [-1] * len(counts)
    step, left = 0, max(max_tokens, GRID_TOKENS)
    sizes, owners = (ends - starts).tolist(), requests.tolist()
    # The first chunks of all requests come first, then the second chunks, and so on.
    for i in np.argsort(numbers, kind="stable").tolist():
        if sizes[i] > left or last_step[owners[i]] == step:
            step, left = step + 1, max(max_tokens, GRID_TOKENS)
        steps[i] = last_step[owners[i]] = step
        left -= sizes[i]
    return Chunks(requests, starts, ends, steps)
