"""Draws the blocks of the budget, and the sequences that refer to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s, ceil_div
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.hybrid import require_memory
from hybridmem.memory.pictures.canvas import (
    FREE,
    INK,
    Colour,
    entitle,
    ink_on,
    legend,
    literal,
    new_figure,
    owner_shade,
    plain,
)
from hybridmem.memory.views.palette import pool_colours, shades
from hybridmem.memory.views.text_tables import count, format_bytes
from hybridmem.memory.views.usage import Inventory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hybridmem.memory.hybrid import HybridMemory

NO_SEQUENCE = np.iinfo(np.int64).max
_MOST_ROWS = 24
_MOST_NUMBERS = 400
_SHARED = (0.0, 0.0, 0.0, 0.6)
_CHARACTER_INCHES, _WIDTH_INCHES, _ROW_INCHES = 0.075, 9.0, 0.26


@dataclass(frozen=True)
class Runs:
    """Groups neighbouring blocks of one pool and one owner, in the order of their addresses. All arrays are int64 (n,).

    Attributes:
        starts, ends: the byte range of each group in the arena.
        pools: the index of the pool of each group.
        owners: the id of the first sequence that refers to the group's blocks, or `NO_SEQUENCE` if an open step has
            allocated them.
        n_owners: how many references each block of the group has.
    """

    starts: Int64s
    ends: Int64s
    pools: Int64s
    owners: Int64s
    n_owners: Int64s

    @staticmethod
    def of(inventory: Inventory) -> Runs:
        """Group the blocks of an inventory. Cost: O(blocks)."""
        pools = [pool for group in inventory.groups for pool, _ in group.pools]
        owners = {pool.name: np.full(len(pool.counts), NO_SEQUENCE) for pool in pools}
        ids_S = np.array([s.id for s in inventory.sequences], np.int64)
        for holding in (h for group in inventory.groups for h in group.holdings):
            np.minimum.at(owners[holding.pool], holding.ids, np.repeat(ids_S, holding.counts))
        columns = [np.zeros((5, 0), np.int64)]
        columns += [_runs_of(pool, i, owners[pool.name]) for i, pool in enumerate(pools) if pool.block_bytes]
        table = np.concatenate(columns, axis=1)
        return Runs(*table[:, table[0].argsort()])

    def __len__(self) -> int:
        return len(self.starts)

    def colour(self, i: int, of_pools: list[str]) -> Colour:
        """Return the colour of group i: its pool's colour, in a shade that differs between consecutive sequences."""
        return owner_shade(of_pools[self.pools[i]], int(self.owners[i]))

    def label(self, i: int) -> str:
        return (
            "in a step" if self.owners[i] == NO_SEQUENCE else f"{self.owners[i]}{', …' if self.n_owners[i] > 1 else ''}"
        )


def _runs_of(pool: BlockPool, number: int, owners: Int64s) -> Int64s:
    """Return the runs of one pool, (5, n), in the order of their addresses.

    No block of another pool lies within a run, so the runs of each pool are sorted alone. They are sorted by timsort,
    because blocks that were allocated together are in order already.
    """
    used = pool.counts.nonzero()[0]
    used = used[pool.addresses[used].argsort(kind="stable")]
    starts, owners, counts = pool.addresses[used], owners[used], pool.counts[used]
    begins = np.ones(len(used) + 1, np.bool_)
    begins[1:-1] = starts[1:] - starts[:-1] != pool.block_bytes
    begins[1:-1] |= (owners[1:] != owners[:-1]) | (counts[1:] != counts[:-1])
    first, last = begins[:-1].nonzero()[0], begins[1:].nonzero()[0]
    ends = starts[last] + pool.block_bytes
    return np.stack([starts[first], ends, np.full_like(first, number), owners[first], counts[first]])


def arena_map(memory: HybridMemory) -> Figure:
    """Draw every block of the budget, coloured by pool, with the number of its sequence, and hatched if it is shared.

    The bar on top is the whole budget to scale. Below it, in rows that are read like lines of text, are the bytes at
    both ends of the budget, without the free bytes in between. Sequences also differ in shade. Cost: O(blocks). Raises
    SpecError without matplotlib.
    """
    require_memory(memory, "arena_map(memory)")
    with memory.counters.lock:  # The lock is held because other threads may be taking steps.
        inventory = memory.counters.inventory()
        arena, runs = inventory.arena, Runs.of(inventory)
    regions = regions_of(runs, arena.capacity_bytes)
    row_bytes = _row_bytes(sum(end - start for start, end in regions), runs)
    n_rows = [ceil_div(end - start, row_bytes) for start, end in regions]
    used, budget = format_bytes(arena.used_bytes), format_bytes(arena.capacity_bytes)
    held = count(len(inventory.sequences), "sequence or checkpoint", "sequences and checkpoints")
    title = f"{used} of {budget} in use, {held}"
    figure = new_figure(_WIDTH_INCHES, 1.7 + _ROW_INCHES * sum(n_rows) + 0.55 * len(regions), title)
    top, *others = figure.subplots(1 + len(regions), 1, height_ratios=[1.3, *(n + 0.3 for n in n_rows)], squeeze=False)[
        :, 0
    ]
    pools = [pool.name for group in inventory.groups for pool, _ in group.pools]
    of_pools = [shades()[name] for name in pool_colours(pools)]
    _draw(top, runs, of_pools, (0, arena.capacity_bytes), max(1, arena.capacity_bytes))
    entitle(top, "the whole budget")
    for ax, (start, end) in zip(others, regions, strict=True):
        _draw(ax, runs, of_pools, (start, end), row_bytes)
        entitle(ax, f"bytes from {format_bytes(start)} to {format_bytes(end)}, {format_bytes(row_bytes)} a row")
    _explain(figure, runs, of_pools, pools)
    return figure


def regions_of(runs: Runs, capacity: int) -> list[tuple[int, int]]:
    """Return the byte ranges to draw: the arena without its largest free range, unless that range is small."""
    if not len(runs):
        return []
    starts, ends = np.append(runs.starts, capacity), np.insert(runs.ends, 0, 0)
    gap = int((starts - ends).argmax())
    if starts[gap] - ends[gap] < capacity / 5:
        return [(0, capacity)]
    return [(start, end) for start, end in ((0, int(ends[gap])), (int(starts[gap]), capacity)) if end > start]


def _row_bytes(n_bytes: int, runs: Runs) -> int:
    """Return how many bytes one row of the picture shows: a power of two, and no less than the smallest group."""
    least = int((runs.ends - runs.starts).min()) if len(runs) else 1
    return 1 << math.ceil(math.log2(max(least, n_bytes / _MOST_ROWS, 1)))


def _draw(ax: Axes, runs: Runs, of_pools: list[str], region: tuple[int, int], row_bytes: int) -> None:
    from matplotlib.collections import PolyCollection

    start, end = region
    n_rows = max(1, ceil_div(end - start, row_bytes))
    plain(ax)
    ax.set(xlim=(0, row_bytes), ylim=(n_rows, 0), yticks=[])
    ax.set_xticks([0, row_bytes / 2, row_bytes], [format_bytes(x) for x in (0, row_bytes / 2, row_bytes)])
    ax.spines["bottom"].set_visible(False)
    all_rows = [_box(left, right, y) for left, right, y in rows_of(0, end - start, row_bytes)]
    ax.add_collection(PolyCollection(all_rows, facecolors=FREE, label="free"))
    inside = np.flatnonzero((runs.starts >= start) & (runs.ends <= end)).tolist()
    # Without this minimum, a small group would be invisible in a large budget.
    least = 0 if n_rows > 1 else row_bytes // 500
    ends = np.maximum(runs.ends, runs.starts + least)
    pieces = [
        (i, *piece) for i in inside for piece in rows_of(int(runs.starts[i]) - start, int(ends[i]) - start, row_bytes)
    ]
    is_coarse = len(pieces) > _MOST_NUMBERS  # With so many pieces, lines between blocks would hide the blocks.
    for label, own in (("used", pieces), ("shared", [piece for piece in pieces if runs.n_owners[piece[0]] > 1])):
        boxes = PolyCollection([_box(left, right, y) for _, left, right, y in own], label=label)
        if label == "used":
            boxes.set(
                facecolors=[runs.colour(i, of_pools) for i, *_ in own],
                edgecolors=(1, 1, 1, 0.6),
                linewidths=0 if is_coarse or least else 0.5,
            )
        else:
            boxes.set(facecolors="none", edgecolors=_SHARED, linewidths=0, hatch="/////")
        ax.add_collection(boxes)
    for i, left, right, y in [] if is_coarse else pieces:
        text, colour = runs.label(i), runs.colour(i, of_pools)
        if (right - left) / row_bytes * _WIDTH_INCHES > _CHARACTER_INCHES * (len(text) + 1.5):
            box = {"facecolor": colour, "edgecolor": "none", "pad": 1}
            ax.text(
                (left + right) / 2,
                y + 0.5,
                text,
                ha="center",
                va="center",
                fontsize=7,
                color=ink_on(colour),
                bbox=box,
                clip_on=True,
            )


def rows_of(start: int, end: int, row_bytes: int) -> list[tuple[int, int, int]]:
    """Split a byte range into rows. Return (left, right, row) of each part."""
    rows = range(start // row_bytes, ceil_div(end, row_bytes))
    return [(max(start - y * row_bytes, 0), min(end - y * row_bytes, row_bytes), y) for y in rows]


def _box(left: float, right: float, y: float) -> list[tuple[float, float]]:
    return [(left, y + 0.06), (right, y + 0.06), (right, y + 0.94), (left, y + 0.94)]


def _explain(figure: Figure, runs: Runs, of_pools: list[str], names: list[str]) -> None:
    from matplotlib.artist import Artist
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Artist] = [
        Patch(color=of_pools[k], label=literal(names[k])) for k in sorted(set(runs.pools.tolist()))
    ]
    if (runs.n_owners > 1).any():
        label = "shared by several (3, …: by sequence 3 and others)"
        handles.append(
            Patch(facecolor=(0.5, 0.5, 0.5, 0.4), edgecolor=_SHARED, linewidth=0, hatch="/////", label=label)
        )
    handles.append(Patch(facecolor=FREE, edgecolor=INK, linewidth=0.5, label="free"))
    if 0 < len(runs) <= _MOST_NUMBERS:
        handles.append(Line2D([], [], linestyle="none", marker="$n$", color=INK, label="id of its sequence"))
    legend(figure, handles)
