"""Draws which tokens of one sequence each layer of a model holds, as body and tail."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybridmem.memory.blocks.holdings import Holding, Part
from hybridmem.memory.hybrid import require_memory
from hybridmem.memory.interface import Sequence
from hybridmem.memory.pictures.canvas import FREE, INK, legend, literal, need_matplotlib, new_figure, plain
from hybridmem.memory.specs import AttentionSpec, CrossAttentionSpec, LayerSpec, MemorySpec, RecurrentSpec
from hybridmem.memory.views.palette import COLOURS
from hybridmem.memory.views.text_tables import format_bytes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hybridmem.memory.hybrid import HybridMemory

_HATCH = "////"


@dataclass(frozen=True)
class Stretch:
    """Describes the tokens [start, end) that a layer keeps as one part of a sequence. [-1, -1) means a stale state.

    Attributes:
        n_bytes: the bytes of this part.
        fold_tokens: the distance between the positions at which the layer's rows fold. None: they do not fold.
        is_folded: True if the rows are no longer kept unchanged.
    """

    part: Part
    start: int
    end: int
    n_bytes: int
    fold_tokens: int | None
    is_folded: bool


@dataclass(frozen=True)
class LayerRow:
    """Describes what one attention or recurrence of a layer keeps of a sequence.

    `memory` is None if a layer has none.
    """

    layer: int
    memory: LayerSpec | None = None
    stretches: list[Stretch] = field(default_factory=list)

    def bytes_of(self, part: str) -> int:
        """Return the bytes of a part: "body", "tail", "head" or "all"."""
        return sum(s.n_bytes for s in self.stretches if part in ("all", s.part))

    @property
    def label(self) -> str:
        memory = self.memory
        if memory is None:
            return f"nothing  {self.layer}"
        details = [memory.name] if memory.name != MemorySpec.kind_of(memory).replace("-", "_") else []
        if isinstance(memory, RecurrentSpec):
            details.append(memory.family)
        if isinstance(memory, AttentionSpec):
            details += [what.label for what in (memory.policy, memory.storage) if what is not None]
            details += [] if memory.window is None else [f"over {memory.window:,} tokens"]
        return literal(f"{', '.join([MemorySpec.kind_of(memory), *details])}  {self.layer}")


def layer_rows(memory: HybridMemory, sequence: Sequence) -> list[LayerRow]:
    """Return what each attention and recurrence of each layer holds of one sequence, in order.

    The bytes of all rows sum to those of the blocks to which the sequence refers.
    """
    groups, length = {group.name: group for group in memory.counters.inventory(sequence).groups}, sequence.length
    if (on_host := memory.counters.host_inventory(sequence)) is not None and on_host.sequences:
        groups |= {group.name: group for group in on_host.groups}  # The sequence's pages are only in host memory.
    rows: dict[tuple[int, str], LayerRow] = {}
    for group in groups.values():
        folds = any(h.part == "tail" for h in group.holdings)
        for number, (layer, spec) in enumerate(group.members):
            held = [_stretch(h, length, group.shares[h.pool][number], folds) for h in group.holdings if h.counts[0]]
            rows[layer, spec.name] = LayerRow(layer, spec, held)
    return [
        row
        for layer, specs in enumerate(memory.spec.layers)
        for row in ([rows[layer, spec.name] for spec in specs] if specs else [LayerRow(layer)])
    ]


def _stretch(holding: Holding, length: int, block_bytes: int, folds: bool) -> Stretch:
    end = length if holding.ends is None else int(holding.ends[0])
    start = int(holding.starts[0]) if end >= 0 else -1
    return Stretch(
        holding.part,
        start,
        end,
        int(holding.counts[0]) * block_bytes,
        holding.fold_tokens,
        folds and holding.part == "body",
    )


def layer_map(memory: HybridMemory, sequence: Sequence) -> Figure:
    """Draw which tokens of a sequence each layer holds as body and tail, and in how many bytes.

    White lines in a tail are positions at which rows fold into the body. The dashed line is the horizon, the earliest
    position that a rollback reaches without a checkpoint. A hollow diamond is a state that a rollback has made stale:
    its bytes are held, and the next step computes it again. If all tails are short compared with the sequence, a second
    picture shows the newest tokens.

    Raises SpecError without matplotlib, and SequenceError if the sequence is closed or belongs to another memory.
    """
    require_memory(memory, "layer_map(memory, sequence)")
    need_matplotlib()
    from matplotlib.ticker import MaxNLocator

    rows = layer_rows(memory, sequence)
    length, horizon = sequence.length, sequence.horizon
    name = f"{'Checkpoint' if sequence.is_checkpoint else 'Sequence'} {sequence.id}"
    held = f"swapped out, {format_bytes(int(memory.counters.inventory(sequence).away_bytes[0]))} wait elsewhere"
    if not sequence.is_swapped:
        held = f"{format_bytes(sum(row.bytes_of('all') for row in rows))} in all layers"
        held += ", keys and values in host memory" * sequence.is_on_host
    figure = new_figure(
        9.5, 1.5 + 0.27 * max(1, len(rows)), f"{name} of {memory.spec.model}: {length:,} tokens, {held}"
    )
    spans = _spans(rows, length)
    axes = figure.subplots(1, len(spans), sharey=True, squeeze=False)[0]
    for ax, span in zip(axes, spans, strict=True):
        plain(ax)
        for y, row in enumerate(rows):
            _draw(ax, y, row, length)
        ax.axvline(horizon, color=INK, linestyle=(0, (4, 3)), linewidth=1.2, label="horizon")
        ax.set_xlim(*span)
        ax.set_xlabel("token position" if span[0] == 0 else "the newest tokens")
        ax.xaxis.set_major_locator(MaxNLocator(8 if len(spans) == 1 else 3, integer=True))
        ax.xaxis.set_major_formatter("{x:,.0f}")
    axes[0].set_yticks(range(len(rows)), [row.label for row in rows])
    axes[0].set_ylim(len(rows) - 0.4, -0.6)
    _write_bytes(axes[-1], rows)
    _explain(figure, rows, horizon)
    return figure


def _spans(rows: list[LayerRow], length: int) -> list[tuple[int, int]]:
    """Return the token ranges to draw: all tokens and, if all tails are short in comparison, the newest ones."""
    tails = [s.start for row in rows for s in row.stretches if s.part == "tail"]
    n_newest = length - min(tails, default=0)
    if not tails or n_newest > length / 8:
        return [(0, max(1, length))]
    return [(0, length), (max(0, length - max(2, 2 * n_newest)), length)]


def _draw(ax: Axes, y: int, row: LayerRow, length: int) -> None:
    first = min((s.start for s in row.stretches if s.part != "head"), default=0)
    if isinstance(row.memory, CrossAttentionSpec):
        n_rows = sum(s.end for s in row.stretches)
        ax.barh(y, max(1, length), height=0.7, color=COLOURS["body"], alpha=0.35, linewidth=0, gid=f"{y} body")
        ax.annotate(
            f"{n_rows:,} tokens of the encoder",
            (0, y),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color=INK,
        )
        return
    if first > 0:
        ax.barh(y, first, height=0.7, color=FREE, linewidth=0)
    for s in row.stretches:
        colour = COLOURS[s.part]
        if s.part == "head":
            at, edge, fill = (s.end, "white", colour) if s.end >= 0 else (length, colour, "none")
            ax.plot(
                [at],
                [y],
                marker="D",
                color=colour,
                markeredgecolor=edge,
                markerfacecolor=fill,
                markersize=6,
                clip_on=False,
                zorder=5,
            )
            continue
        hatch = _HATCH if s.is_folded else None
        ax.barh(
            y, s.end - s.start, left=s.start, height=0.7, color=colour, hatch=hatch, edgecolor=(1, 1, 1, 0.55),
            linewidth=0, gid=f"{y} {s.part}",
        )  # fmt: skip
        if s.fold_tokens and s.end - s.start > s.fold_tokens > 1:
            grid = range(s.start - s.start % s.fold_tokens + s.fold_tokens, s.end, s.fold_tokens)
            ax.vlines(grid, y - 0.35, y + 0.35, color="white", linewidth=0.8)
    if isinstance(row.memory, AttentionSpec) and row.memory.window is not None and length:
        ax.plot(
            [max(0, length - row.memory.window), length], [y, y], color="white", linewidth=1.5, marker="|", markersize=5
        )


def _write_bytes(ax: Axes, rows: list[LayerRow]) -> None:
    """Write the bytes of each part in columns to the right of the bars."""
    parts = [
        part
        for part in ("body", "tail", "head", "all")
        if part in ("body", "all") or any(row.bytes_of(part) for row in rows)
    ]
    for i, part in enumerate(parts):
        offset: dict[str, Any] = {
            "xytext": (62 + 52 * i, 0),
            "textcoords": "offset points",
            "ha": "right",
            "va": "center",
            "fontsize": 8,
            "color": INK,
        }
        ax.annotate(part, (1, -0.9), xycoords=ax.get_yaxis_transform(), weight="bold", annotation_clip=False, **offset)
        for y, row in enumerate(rows):
            text = format_bytes(n_bytes) if (n_bytes := row.bytes_of(part)) else "–"
            ax.annotate(text, (1, y), xycoords=ax.get_yaxis_transform(), gid=f"{y} {part} bytes", **offset)


def _explain(figure: Figure, rows: list[LayerRow], horizon: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    stretches = [s for row in rows for s in row.stretches]
    handles: list[Artist] = []
    if any(s.part == "body" and not s.is_folded for s in stretches):
        handles.append(Patch(color=COLOURS["body"], label="body: rows as they came"))
    if any(s.is_folded for s in stretches):
        label = "body: folded into less"
        handles.append(
            Patch(facecolor=COLOURS["body"], hatch=_HATCH, edgecolor=(1, 1, 1, 0.55), linewidth=0, label=label)
        )
    if any(s.part == "tail" for s in stretches):
        handles.append(Patch(color=COLOURS["tail"], label="tail: the newest rows"))
    for is_stale, label in (
        (False, "head: a state kept ready"),
        (True, "head: stale, computed again by the next step"),
    ):
        if any(s.part == "head" and (s.end < 0) == is_stale for s in stretches):
            colour, fill = COLOURS["head"], "none" if is_stale else COLOURS["head"]
            handles.append(
                Line2D([], [], linestyle="none", marker="D", color=colour, markerfacecolor=fill, label=label)
            )
    if any(isinstance(row.memory, AttentionSpec) and row.memory.window for row in rows):
        handles.append(Line2D([], [], color=INK, marker="|", label="what the newest token sees"))
        handles.append(Patch(color=FREE, label="no longer kept"))
    handles.append(Line2D([], [], color=INK, linestyle=(0, (4, 3)), label=f"horizon: rollback reaches {horizon:,}"))
    legend(figure, handles)
