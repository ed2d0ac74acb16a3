"""Which bytes of the budget belong to whom."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memory.inspection import Inventory
from memory.interface import Int64s
from memory.pictures.canvas import INK, PALETTE, blend, ink_on, new_figure, plain
from memory.tables import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from memory.hybrid import HybridMemory

_MOST_ROWS = 24
_MOST_LABELS = 400
_SHADES = (0.0, 0.3, 0.55)


@dataclass(frozen=True)
class Runs:
    """Neighbouring blocks of one kind and one owner, in the order of their addresses. All int64 (n,).

    Attributes:
        starts, ends: bytes of the arena.
        pools: index of the kind.
        owners: id of the first sequence that refers to them; -1: an open step has set them aside.
        n_owners: how many refer to them.
    """

    starts: Int64s
    ends: Int64s
    pools: Int64s
    owners: Int64s
    n_owners: Int64s

    @staticmethod
    def of(inventory: Inventory) -> Runs:
        columns: list[Int64s] = []
        pools = [entry[0] for group in inventory.groups for entry in group.pools]
        ids_S = np.array([s.id for s in inventory.sequences], np.int64)
        by_name = {pool.name: np.full(len(pool.counts), np.iinfo(np.int64).max) for pool in pools}
        for group in inventory.groups:
            for h in group.holdings:
                np.minimum.at(by_name[h.pool], h.ids, np.repeat(ids_S, h.counts))
        for i, pool in enumerate(pools):
            used = np.flatnonzero(pool.counts > 0) if pool.block_bytes else np.zeros(0, np.int64)
            owners = by_name[pool.name][used]
            owners = np.where(owners == np.iinfo(np.int64).max, -1, owners)
            starts = pool.addresses[used]
            columns.append(np.stack([starts, starts + pool.block_bytes, np.full_like(used, i), owners, pool.counts[used]]))
        table = np.concatenate([np.zeros((5, 0), np.int64), *columns], axis=1)
        table = table[:, table[0].argsort()]
        begins = np.ones(table.shape[1], np.bool_)
        begins[1:] = (table[0, 1:] != table[1, :-1]) | (table[2:, 1:] != table[2:, :-1]).any(0)
        first = np.flatnonzero(begins)
        last = np.append(first[1:], table.shape[1])[: len(first)] - 1
        return Runs(table[0, first], table[1, last], *table[2:, first])


def arena_map(memory: HybridMemory) -> Figure:
    """Every block of the budget: its colour is its kind, its shade its sequence, hatched where several share it, and what is free.

    Above the whole budget to scale; below, row after row, the bytes in use at its two ends. Cost: O(blocks).
    Raises SpecError without matplotlib.
    """
    inventory = memory.inventory()
    runs, capacity = Runs.of(inventory), inventory.arena.capacity_bytes
    names = [pool.name for group in inventory.groups for pool, _ in group.pools]
    regions = _regions(runs, capacity)
    row_bytes = _row_bytes(sum(end - start for start, end in regions), runs)
    n_rows = [max(1, -(-(end - start) // row_bytes)) for start, end in regions]
    figure = new_figure(9, 1.9 + 0.26 * sum(n_rows) + 0.5 * len(regions))
    heights = [1.2, *(n + 0.4 for n in n_rows)]
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    figure.suptitle(
        f"{format_bytes(inventory.arena.used_bytes)} of {format_bytes(capacity)} in use, "
        f"{len(inventory.sequences):,} sequences and checkpoints", color=INK, fontsize=11,
    )  # fmt: skip
    _draw(axes[0], runs, (0, capacity), capacity, "all bytes")
    for ax, region in zip(axes[1:], regions, strict=True):
        _draw(ax, runs, region, row_bytes, f"{format_bytes(region[0])} …" if len(regions) > 1 else "")
    _legend(figure, runs, names)
    return figure


def _regions(runs: Runs, capacity: int) -> list[tuple[int, int]]:
    """The arena without its largest free range, unless that is small."""
    if not len(runs.starts):
        return []
    starts, ends = np.append(runs.starts, capacity), np.insert(runs.ends, 0, 0)
    gap = int((starts - ends).argmax())
    if starts[gap] - ends[gap] < 0.2 * capacity:
        return [(0, capacity)]
    return [(start, end) for start, end in ((0, int(ends[gap])), (int(starts[gap]), capacity)) if end > start]


def _row_bytes(n_bytes: int, runs: Runs) -> int:
    least = int((runs.ends - runs.starts).min()) if len(runs.starts) else 1
    return max(least, 1 << math.ceil(math.log2(max(1, n_bytes / _MOST_ROWS))))


def _draw(ax: Axes, runs: Runs, region: tuple[int, int], row_bytes: int, title: str) -> None:
    from matplotlib.collections import PolyCollection

    start, end = region
    n_rows = max(1, -(-(end - start) // row_bytes))
    plain(ax)
    ax.set_xlim(0, row_bytes)
    ax.set_ylim(n_rows, 0)
    inside = np.flatnonzero((runs.starts >= start) & (runs.ends <= end))
    pieces = [(i, *piece) for i in inside.tolist() for piece in _rows(int(runs.starts[i]) - start, int(runs.ends[i]) - start, row_bytes)]
    free = PolyCollection(
        [_box(0, min(row_bytes, end - start - y * row_bytes), y) for y in range(n_rows)], facecolors=(0.5, 0.5, 0.5, 0.15), label="free"
    )
    ax.add_collection(free)
    for pool in sorted(set(runs.pools[inside].tolist())):
        own = [piece for piece in pieces if runs.pools[piece[0]] == pool]
        colours = [_colour(runs, piece[0]) for piece in own]
        boxes = [_box(left, right, y) for _, left, right, y in own]
        ax.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors=(1, 1, 1, 0.5), linewidths=0.3, label=f"kind {pool}"))
    shared = [_box(left, right, y) for i, left, right, y in pieces if runs.n_owners[i] > 1]
    if shared:
        ax.add_collection(PolyCollection(shared, facecolors="none", edgecolors=(0, 0, 0, 0.55), linewidths=0, hatch="////", label="shared"))
    if len(pieces) <= _MOST_LABELS:
        for i, left, right, y in pieces:
            text = f"{runs.owners[i]}{'+' if runs.n_owners[i] > 1 else ''}" if runs.owners[i] >= 0 else "step"
            if (right - left) / row_bytes > 0.012 * (len(text) + 1) and n_rows > 0:
                ax.text(
                    (left + right) / 2, y + 0.5, text, ha="center", va="center", fontsize=7, color=ink_on(_colour(runs, i)), clip_on=True
                )
    ax.set_yticks([])
    ax.set_xticks([0, row_bytes / 2, row_bytes], [format_bytes(x) for x in (0, row_bytes // 2, row_bytes)], fontsize=7)
    ax.set_title(title, fontsize=8, loc="left", color=INK)


def _rows(start: int, end: int, row_bytes: int) -> list[tuple[int, int, int]]:
    """(left, right, row) of a range that goes on in the next row."""
    rows = range(start // row_bytes, -(-end // row_bytes))
    return [(max(start - y * row_bytes, 0), min(end - y * row_bytes, row_bytes), y) for y in rows]


def _box(left: float, right: float, y: float) -> list[tuple[float, float]]:
    return [(left, y + 0.06), (right, y + 0.06), (right, y + 0.94), (left, y + 0.94)]


def _colour(runs: Runs, i: int) -> tuple[float, float, float]:
    return blend(PALETTE[runs.pools[i] % len(PALETTE)], _SHADES[runs.owners[i] % len(_SHADES)])


def _legend(figure: Figure, runs: Runs, names: list[str]) -> None:
    from matplotlib.patches import Patch

    kinds = sorted(set(runs.pools.tolist()))
    handles = [Patch(color=PALETTE[k % len(PALETTE)], label=names[k]) for k in kinds]
    handles.append(Patch(facecolor=(0.5, 0.5, 0.5, 0.5), edgecolor="black", hatch="////", label="shared"))
    handles.append(Patch(facecolor=(0.5, 0.5, 0.5, 0.15), label="free"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(4, len(handles)), fontsize=8, frameon=False, labelcolor=INK)
