"""Draws sequences and checkpoints as a tree of forks, with the bytes that they share.

Forks are not recorded, and a sequence may be closed while its forks are open. So the tree of each family is computed
from the present state: from the leading tokens that sequences have in common, and the blocks to which several of them
refer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.hybrid import require_memory
from hybridmem.memory.interface import Sequence
from hybridmem.memory.pictures.canvas import INK, legend, need_matplotlib, new_figure, plain
from hybridmem.memory.views.text_tables import count, format_bytes
from hybridmem.memory.views.usage import Inventory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hybridmem.memory.hybrid import HybridMemory

_MOST_SEQUENCES = 40
"""The most sequences that are drawn. `share_out` needs fewer sequences than an int64 has bits."""


@dataclass
class Node:
    """Holds tokens [start, end) that all sequences below have in common, or that one sequence has beyond the others.

    Attributes:
        sequence: the sequence that ends at this node. Then there are no nodes below.
        n_bytes: the bytes of blocks to which only sequences below refer, in more than one branch. For a node at which a
            sequence ends, the bytes to which only this sequence refers.
    """

    start: int
    end: int
    sequence: Sequence | None = None
    below: list[Node] = field(default_factory=list)
    n_bytes: int = 0

    @property
    def sequences(self) -> list[Sequence]:
        return [self.sequence] if self.sequence else [s for node in self.below for s in node.sequences]


def grow(sequences: list[Sequence], tokens: dict[int, Int64s], start: int = 0) -> Node:
    """Return the tree of sequences that agree on tokens [0, start). Cost: O(tokens) for each branching."""
    first = tokens[sequences[0].id]
    if len(sequences) == 1:
        return Node(start, len(first), sequences[0])
    end = min(_n_common(first, tokens[s.id]) for s in sequences)
    branches: dict[int, list[Sequence]] = {}
    for s in sequences:
        if len(tokens[s.id]) > end:
            branches.setdefault(int(tokens[s.id][end]), []).append(s)
    ending = [Node(end, end, s) for s in sequences if len(tokens[s.id]) == end]
    return Node(start, end, below=ending + [grow(branch, tokens, end) for branch in branches.values()])


def _n_common(a: Int64s, b: Int64s) -> int:
    """Return the number of leading tokens that are equal."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    return int(differs.argmax()) if differs.any() else n


def share_out(root: Node, inventory: Inventory) -> None:
    """Add the bytes of each block to the lowest node below which are all sequences that refer to the block.

    A block to which sequences outside of the tree refer as well counts at the root.
    """
    bits = {s.id: 1 << i for i, s in enumerate(root.sequences)}
    bits_S = np.array([bits[s.id] for s in inventory.sequences], np.int64)
    for group in inventory.groups:
        for pool, _ in group.pools:
            owners, n_owners = np.zeros(len(pool.counts), np.int64), np.zeros(len(pool.counts), np.int64)
            for holding in (h for h in group.holdings if h.pool == pool.name):
                np.bitwise_or.at(owners, holding.ids, np.repeat(bits_S, holding.counts))
                np.add.at(n_owners, holding.ids, 1)
            root.n_bytes += int(((owners > 0) & (n_owners < pool.counts)).sum()) * pool.block_bytes
            patterns, n_blocks = np.unique(owners[(owners > 0) & (n_owners == pool.counts)], return_counts=True)
            for pattern, n in zip(patterns.tolist(), n_blocks.tolist(), strict=True):
                _lowest(root, pattern, bits).n_bytes += n * pool.block_bytes


def _lowest(node: Node, pattern: int, bits: dict[int, int]) -> Node:
    """Return the lowest node below which are all sequences of a bit pattern."""
    for below in node.below:
        if not pattern & ~sum(bits[s.id] for s in below.sequences):
            return _lowest(below, pattern, bits)
    return node


def trees_of(memory: HybridMemory, most_sequences: int = _MOST_SEQUENCES) -> tuple[list[Node], str]:
    """Return the trees of the families with the most sequences, and a title that says how many are left out."""
    with memory.counters.lock:  # The lock is held because other threads may be taking steps.
        sequences = memory.sequences
        families: dict[int, list[Sequence]] = {}
        for s in sequences:
            families.setdefault(s.lineage, []).append(s)
        roots: list[Node] = []
        n_left = most_sequences
        for family in sorted(families.values(), key=len, reverse=True):
            if shown := family[:n_left]:
                roots.append(grow(shown, {s.id: s.tokens for s in shown}))
                for inventory in (memory.counters.inventory(*shown), memory.counters.host_inventory(*shown)):
                    if inventory is not None:
                        share_out(roots[-1], inventory)
                n_left -= len(shown)
    n_hidden = len(sequences) - sum(len(root.sequences) for root in roots)
    title = count(len(sequences), "sequence or checkpoint", "sequences and checkpoints")
    return roots, title + (f"; {n_hidden:,} of them are not shown" if n_hidden else "")


def fork_tree(memory: HybridMemory) -> Figure:
    """Draw sequences and checkpoints as a tree along their tokens, with the bytes that each branch adds.

    Sequences are one line as far as their tokens agree. The bytes of all branches sum to those that the memory uses,
    host memory included. Families with the most sequences come first. If there are more than 40 sequences, the others
    are only counted. Cost: O(blocks and tokens of the drawn sequences). Raises SpecError without matplotlib.
    """
    require_memory(memory, "fork_tree(memory)")
    need_matplotlib()
    from matplotlib.ticker import MaxNLocator

    roots, title = trees_of(memory)
    n_rows = sum(map(n_rows_of, roots))
    figure = new_figure(9, 1.1 + 0.27 * max(1, n_rows), title)
    ax = figure.subplots()
    plain(ax)
    ax.set(ylim=(max(1, n_rows) - 0.4, -0.6), yticks=[], xlabel="token position")
    y = 0
    for root in roots:
        _draw(ax, memory, root, y)
        y += n_rows_of(root)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.xaxis.set_major_formatter("{x:,.0f}")
    ax.set_xlim(0, max([1, *(len(s.tokens) for root in roots for s in root.sequences)]) * 1.02)
    _explain(figure, roots)
    return figure


def n_rows_of(node: Node) -> int:
    """Return how many rows a node and all nodes below it take."""
    return 1 + sum(map(n_rows_of, node.below))


def _draw(ax: Axes, memory: HybridMemory, node: Node, y: int) -> None:
    """Draw a node in row `y`, and the nodes below it in the rows below."""
    ax.plot([node.start, node.end], [y, y], color=INK, linewidth=1.5 if node.sequence else 3, solid_capstyle="butt")
    if s := node.sequence:
        fill = "none" if s.is_swapped else INK
        ax.plot([node.end], [y], marker=_marker(s), color=INK, markerfacecolor=fill, markersize=6, clip_on=False)
    ax.annotate(
        label_of(node, memory), (node.end, y), (8, 0), textcoords="offset points", va="center", color=INK, fontsize=8
    )
    row = y + 1
    for below in node.below:
        ax.plot([node.end, node.end], [y, row], color=INK, linewidth=1)
        _draw(ax, memory, below, row)
        row += n_rows_of(below)


def label_of(node: Node, memory: HybridMemory) -> str:
    """Return the text next to a node."""
    s = node.sequence
    if s is None:
        n_here = sum(not leaf.is_swapped for leaf in node.sequences)  # A swapped-out sequence shares no blocks.
        return f"{format_bytes(node.n_bytes) if node.n_bytes else 'nothing'} shared among {n_here}"
    name = f"{'checkpoint' if s.is_checkpoint else 'sequence'} {s.id}, {node.end:,} tokens: "
    if s.is_swapped:
        return f"{name}{format_bytes(int(memory.counters.inventory(s).away_bytes[0]))} swapped out"
    return f"{name}{format_bytes(node.n_bytes)} of its own"


def _marker(sequence: Sequence) -> str:
    return "D" if sequence.is_checkpoint else "o"


def _explain(figure: Figure, roots: list[Node]) -> None:
    from matplotlib.artist import Artist
    from matplotlib.lines import Line2D

    shown = [s for root in roots for s in root.sequences]
    handles: list[Artist] = []
    for is_checkpoint, name in ((False, "sequence"), (True, "checkpoint")):
        for is_swapped in (False, True):
            found = [s for s in shown if s.is_checkpoint == is_checkpoint and s.is_swapped == is_swapped]
            if found:
                fill, label = ("none", f"{name}, swapped out") if is_swapped else (INK, name)
                handles.append(
                    Line2D(
                        [], [], linestyle="none", marker=_marker(found[0]), color=INK, markerfacecolor=fill, label=label
                    )
                )
    if any(root.below for root in roots):
        handles.append(Line2D([], [], color=INK, linewidth=3, label="tokens on which several agree"))
    legend(figure, handles)
