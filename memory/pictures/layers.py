"""What each layer of a model remembers of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memory.interface import Holding, Part, Sequence
from memory.pictures.canvas import INK, new_figure, plain
from memory.specs import AttentionSpec, LayerSpec, MemorySpec
from memory.tables import PART_COLOURS, format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from memory.hybrid import HybridMemory


@dataclass(frozen=True)
class Stretch:
    """Tokens [start, end) that a memory holds as one part, in `n_bytes`. Without tokens: a stale state."""

    part: Part
    start: int
    end: int
    n_bytes: int
    fold_tokens: int | None
    is_folded: bool


@dataclass(frozen=True)
class LayerRow:
    """One memory of a layer, or none."""

    layer: int
    memory: LayerSpec | None = None
    stretches: list[Stretch] = field(default_factory=list)

    @property
    def n_bytes(self) -> int:
        return sum(s.n_bytes for s in self.stretches)


def layer_rows(memory: HybridMemory, sequence: Sequence) -> list[LayerRow]:
    """The memories of all layers in order, and what they hold of one sequence; their bytes sum to those that it refers to."""
    inventory, length = memory.inventory(sequence), sequence.length
    rows: dict[tuple[int, str], LayerRow] = {}
    for group in inventory.groups:
        folds = any(h.part == "tail" for h in group.holdings)
        for number, (layer, spec) in enumerate(group.members):
            row = rows[layer, spec.name] = LayerRow(layer, spec)
            row.stretches.extend(_stretch(h, length, group.shares[h.pool][number], folds) for h in group.holdings if h.counts[0])
    return [
        row
        for layer, specs in enumerate(memory.spec.layers)
        for row in ([rows[layer, spec.name] for spec in specs] if specs else [LayerRow(layer)])
    ]


def _stretch(holding: Holding, length: int, block_bytes: int, folds: bool) -> Stretch:
    end = length if holding.ends is None else int(holding.ends[0])
    start = int(holding.starts[0]) if end >= 0 else -1
    return Stretch(holding.part, start, end, int(holding.counts[0]) * block_bytes, holding.fold_tokens, folds and holding.part == "body")


def layer_map(memory: HybridMemory, sequence: Sequence) -> Figure:
    """The layers of a model in order, and for each of its memories which tokens are body and tail, and how many bytes they take.

    Raises SpecError without matplotlib; SequenceError: a closed sequence, or one of another memory.
    """
    rows, length = layer_rows(memory, sequence), sequence.length
    figure = new_figure(9, 1.4 + 0.28 * len(rows))
    ax = figure.subplots()
    plain(ax)
    for y, row in enumerate(rows):
        for s in row.stretches:
            if s.part == "head":
                if s.end >= 0:
                    ax.plot([s.end], [y], marker="D", color=PART_COLOURS["head"], markersize=5, clip_on=False)
                continue
            hatch = "////" if s.is_folded else None
            ax.barh(y, s.end - s.start, left=s.start, height=0.7, color=PART_COLOURS[s.part], hatch=hatch, edgecolor="white", linewidth=0)
        ax.text(
            1.01, y, format_bytes(row.n_bytes) if row.memory else "", transform=ax.get_yaxis_transform(), va="center", fontsize=8, color=INK
        )
    ax.axvline(sequence.horizon, color=INK, linestyle="--", linewidth=1)
    ax.set_yticks(range(len(rows)), [_label(row) for row in rows], fontsize=8)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, max(1, length))
    ax.set_xlabel("token position")
    figure.suptitle(f"Sequence {sequence.id}: {length:,} tokens, {format_bytes(sum(row.n_bytes for row in rows))}", color=INK, fontsize=11)
    return figure


def _label(row: LayerRow) -> str:
    if row.memory is None:
        return f"{row.layer}  nothing"
    kind = MemorySpec.kind_of(row.memory)
    window = f" over {row.memory.window:,}" if isinstance(row.memory, AttentionSpec) and row.memory.window else ""
    return f"{row.layer}  {kind}{window}"
