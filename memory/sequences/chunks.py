"""Cuts requests into chunks, the tokens that a step takes of each: chunked prefill, as positions alone.

Where attention has a policy or few bits, a query sees the body as it was before its step, so what it sees depends on
where its prompt was cut. There requests are cut at multiples of GRID_TOKENS positions and nowhere else: the same text
then sees the same rows, whatever shares its steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s, ceil_div, ranges

GRID_TOKENS = 512
"""Distance of the positions at which requests are cut if that matters: as many tokens as a step has by default."""


@dataclass(frozen=True)
class Chunks:
    """Lists chunks (n,), those of a request one after the other.

    Attributes:
        requests: the number of the request that each is a part of.
        starts, ends: its tokens [start, end), counted from the first new one of the request.
        steps: the number of the step that takes it.
    """

    requests: Int64s
    starts: Int64s
    ends: Int64s
    steps: Int64s


def cut_anywhere(counts: Int64s, max_tokens: int, first: int = 0) -> Chunks:
    """Cut requests of counts (S,) tokens into steps of `max_tokens`, each but the last one full, request after request.

    Without the steps of the first `first` tokens, a multiple of `max_tokens`.
    """
    ends = counts.cumsum()
    begins, n_tokens = ends - counts, int(ends[-1])
    cuts = np.unique(np.concatenate([begins[begins >= first], np.arange(first, n_tokens, max_tokens)]))
    requests = ends.searchsorted(cuts, side="right")
    starts, behind = cuts - begins[requests], np.append(cuts[1:], n_tokens) - begins[requests]
    return Chunks(requests, starts, behind, (cuts - first) // max_tokens)


def cut_on_grid(lengths: Int64s, counts: Int64s, max_tokens: int) -> Chunks:
    """Cut requests of counts (S,) tokens, for sequences of lengths (S,), at multiples of GRID_TOKENS positions.

    A step takes at most `max_tokens`, or GRID_TOKENS if that is more: a chunk is never divided.
    """
    cells = lengths // GRID_TOKENS
    n_chunks = ceil_div(lengths + counts, GRID_TOKENS) - cells
    requests, numbers = np.repeat(np.arange(len(counts)), n_chunks), ranges(np.zeros_like(n_chunks), n_chunks)
    at = (cells[requests] + numbers) * GRID_TOKENS - lengths[requests]
    starts, ends = np.maximum(at, 0), np.minimum(at + GRID_TOKENS, counts[requests])
    steps, last_step = np.zeros_like(starts), [-1] * len(counts)
    step, left = 0, max(max_tokens, GRID_TOKENS)
    sizes, owners = (ends - starts).tolist(), requests.tolist()
    for i in np.argsort(numbers, kind="stable").tolist():  # the first chunks of all requests, then the second ones, ...
        if sizes[i] > left or last_step[owners[i]] == step:
            step, left = step + 1, max(max_tokens, GRID_TOKENS)
        steps[i] = last_step[owners[i]] = step
        left -= sizes[i]
    return Chunks(requests, starts, ends, steps)
