"""Which sequences and checkpoints come from each other, and what they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from memory.inspection import Inventory
from memory.interface import Int64s, Sequence
from memory.pictures.canvas import INK, PALETTE, new_figure, plain
from memory.tables import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memory.hybrid import HybridMemory

_MOST_LEAVES = 40


@dataclass
class Node:
    """Tokens up to `end` that all sequences below have in common.

    Attributes:
        sequence: that stands here; then there is nothing below.
        n_bytes: that these sequences share, and nobody else: of a sequence, its own.
    """

    start: int
    end: int
    sequence: Sequence | None = None
    below: list[Node] = field(default_factory=list)
    n_bytes: int = 0

    @property
    def leaves(self) -> list[Sequence]:
        return [self.sequence] if self.sequence else [leaf for node in self.below for leaf in node.leaves]


def grow(sequences: list[Sequence], tokens: dict[int, Int64s], start: int = 0) -> Node:
    """The tree of sequences that agree on tokens [0, start)."""
    if len(sequences) == 1:
        return Node(start, len(tokens[sequences[0].id]), sequences[0])
    first = tokens[sequences[0].id]
    end = min(_common(first, tokens[s.id]) for s in sequences)
    node = Node(start, end)
    groups: dict[int, list[Sequence]] = {}
    for s in sequences:
        own = tokens[s.id]
        if len(own) == end:
            node.below.append(Node(end, end, s))
        else:
            groups.setdefault(int(own[end]), []).append(s)
    node.below += [grow(group, tokens, end) for group in groups.values()]
    return node


def _common(a: Int64s, b: Int64s) -> int:
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def share_out(root: Node, inventory: Inventory) -> None:
    """Give each block's bytes to the node that all who refer to it are below."""
    index = {s.id: i for i, s in enumerate(inventory.sequences)}
    chosen = {s.id for s in root.leaves}
    for group in inventory.groups:
        for pool, _ in group.pools:
            owners: dict[int, set[int]] = {}
            for h in group.holdings:
                if h.pool == pool.name:
                    bounds = np.concatenate([[0], h.counts.cumsum()])
                    for s in chosen:
                        for block in h.ids[bounds[index[s]] : bounds[index[s] + 1]].tolist():
                            owners.setdefault(block, set()).add(s)
            for who in owners.values():
                _lowest(root, who).n_bytes += pool.block_bytes


def _lowest(node: Node, who: set[int]) -> Node:
    for below in node.below:
        if who <= {s.id for s in below.leaves}:
            return _lowest(below, who)
    return node


def fork_tree(memory: HybridMemory) -> Figure:
    """Sequences and checkpoints along their tokens, drawn together as far as they agree, with the bytes that each stretch holds alone.

    Raises SpecError without matplotlib.
    """
    inventory = memory.inventory()
    families: dict[int, list[Sequence]] = {}
    for s in inventory.sequences:
        families.setdefault(s.lineage, []).append(s)
    ordered = sorted(families.values(), key=len, reverse=True)
    figure = new_figure(9, 6)
    ax = figure.subplots()
    plain(ax)
    y = 0
    for i, family in enumerate(ordered):
        if y >= _MOST_LEAVES:
            break
        shown = family[: _MOST_LEAVES - y]
        root = grow(shown, {s.id: s.tokens for s in shown})
        share_out(root, inventory)
        y = _draw(ax, root, y, PALETTE[i % len(PALETTE)])[1]
    ax.set_ylim(max(1, y) - 0.4, -0.6)
    ax.set_yticks([])
    ax.set_xlabel("token position")
    figure.suptitle(f"{len(inventory.sequences):,} sequences and checkpoints", color=INK, fontsize=11)
    figure.set_figheight(1.3 + 0.3 * max(1, y))
    return figure


def _draw(ax, node: Node, y: int, colour: str) -> tuple[float, int]:  # type: ignore[no-untyped-def]
    """Draw a node from row `y` on: (where its own line is, the next free row)."""
    if node.sequence:
        s = node.sequence
        ax.plot([node.start, node.end], [y, y], color=colour)
        ax.plot([node.end], [y], marker="D" if s.is_checkpoint else "o", color=colour)
        ax.annotate(
            f"{s.id}: {format_bytes(node.n_bytes)}", (node.end, y), (8, 0), textcoords="offset points", va="center", color=INK, fontsize=8
        )
        return y, y + 1
    ys = []
    for below in node.below:
        at, y = _draw(ax, below, y, colour)
        ys.append(at)
    ax.plot([node.end, node.end], [ys[0], ys[-1]], color=colour)
    ax.plot([node.start, node.end], [ys[0], ys[0]], color=colour)
    return ys[0], y
