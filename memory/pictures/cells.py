"""Lists the arena as byte ranges, which are so few that a web page or a notebook can draw them within one frame."""

from __future__ import annotations

from typing import Any

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s, ceil_div
from hybridmem.memory.pictures.blocks import NO_SEQUENCE, Runs, regions_of
from hybridmem.memory.views.palette import pool_colours
from hybridmem.memory.views.usage import Inventory

MOST_RANGES = 1024
"""If there are more ranges than this, neighbouring ranges are drawn as one cell."""
IN_STEP, SEVERAL = -1, -2
"""Owners that are not a sequence: -1 is an open step, and -2 means several sequences in one cell."""


def arena_of(inventory: Inventory) -> dict[str, Any]:
    """Return the used ranges of the arena as columns of numbers. `memory.pictures.arena_map` draws the same ranges.

    `regions` are the byte ranges to draw: the whole budget without its largest free range. `pool_colours` has, for each
    pool, the name of its colour in `memory.views.palette.shades`. Each range has the index of its pool in `pools`, the
    id of the first sequence that refers to it (-1: an open step, -2: several), the percentage of its bytes that are in
    use, and the percentage that several sequences share. Cost: O(blocks).
    """
    runs = Runs.of(inventory)
    regions = regions_of(runs, inventory.arena.capacity_bytes)
    pools = [pool.name for group in inventory.groups for pool, _ in group.pools]
    columns = _exact(runs) if len(runs) <= MOST_RANGES else _cells(runs, regions, len(pools))
    names = ("starts", "ends", "pools", "owners", "used_percent", "shared_percent")
    ranges = {name: column.tolist() for name, column in zip(names, columns, strict=True)}
    return {
        "pool_names": pools,
        "pool_colours": pool_colours(pools),
        "regions": regions,
        "is_exact": len(runs) <= MOST_RANGES,
        **ranges,
    }


def _exact(runs: Runs) -> tuple[Int64s, ...]:
    owners = np.where(runs.owners == NO_SEQUENCE, IN_STEP, runs.owners)
    full = np.full(len(runs), 100)
    return runs.starts, runs.ends, runs.pools, owners, full, np.where(runs.n_owners > 1, full, 0)


def _cells(runs: Runs, regions: list[tuple[int, int]], n_pools: int) -> tuple[Int64s, ...]:
    """Return cells of equal size. The color of a cell is that of the pool with most of its bytes."""
    cell_bytes = ceil_div(sum(end - start for start, end in regions), MOST_RANGES)
    parts = [_cells_of(runs, start, end, cell_bytes, n_pools) for start, end in regions]
    return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))


def _cells_of(runs: Runs, start: int, end: int, cell_bytes: int, n_pools: int) -> tuple[Int64s, ...]:
    inside = np.flatnonzero((runs.starts >= start) & (runs.ends <= end))
    first = (runs.starts[inside] - start) // cell_bytes
    n_pieces = (runs.ends[inside] - 1 - start) // cell_bytes - first + 1
    run = np.repeat(inside, n_pieces)  # A run is cut where it crosses the border of a cell.
    nth = np.arange(len(run)) - np.repeat(n_pieces.cumsum() - n_pieces, n_pieces)
    cell = np.repeat(first, n_pieces) + nth
    left = np.maximum(runs.starts[run], start + cell * cell_bytes)
    right = np.minimum(runs.ends[run], start + (cell + 1) * cell_bytes)
    n_cells, sizes = ceil_div(end - start, cell_bytes), right - left
    by_pool = np.bincount(cell * n_pools + runs.pools[run], sizes, n_cells * n_pools).reshape(n_cells, n_pools)
    shared = np.bincount(cell, sizes * (runs.n_owners[run] > 1), n_cells)
    least, most = np.full(n_cells, NO_SEQUENCE), np.full(n_cells, IN_STEP)
    owners = np.where(runs.owners == NO_SEQUENCE, IN_STEP, runs.owners)[run]
    np.minimum.at(least, cell, owners)
    np.maximum.at(most, cell, owners)
    kept = np.flatnonzero(by_pool.any(1))
    starts, used = start + kept * cell_bytes, by_pool[kept].sum(1)
    ends = np.minimum(starts + cell_bytes, end)
    percent = np.rint(100 * np.stack([used / (ends - starts), shared[kept] / used])).astype(np.int64)
    owner = np.where(least[kept] == most[kept], most[kept], SEVERAL)
    return starts, ends, by_pool[kept].argmax(1), owner, np.maximum(percent[0], 1), percent[1]
