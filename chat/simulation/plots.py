"""Plots a simulation, as figures and as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybridmem.chat.simulation.report import STEP_SECONDS, Report, Sample
from hybridmem.memory.pictures import INK, entitle, literal, need_matplotlib, new_figure, plain
from hybridmem.memory.views import COLOURS, pool_colours, shades

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH_INCHES, _HEIGHT_INCHES, _DOTS_PER_INCH = 8.0, 4.5, 120
_MIB = 1 << 20


def write_plots(report: Report, folder: Path) -> list[Path]:
    """Write latency.png, bytes.png, tokens.png and users.png.

    Raises SpecError if matplotlib is not installed, and OSError.
    """
    need_matplotlib()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, draw in (
        ("latency", _draw_latency),
        ("bytes", _draw_bytes),
        ("tokens", _draw_tokens),
        ("users", _draw_users),
    ):
        figure = new_figure(_WIDTH_INCHES, _HEIGHT_INCHES)
        draw(figure.subplots(), report)
        written.append(folder / f"{name}.png")
        figure.savefig(written[-1], dpi=_DOTS_PER_INCH, facecolor="white")
    return written


def timeline(report: Report) -> Figure:
    """Plot how many conversations are in each state, tokens and bytes, over the time of a simulation.

    Raises SpecError if matplotlib is not installed.
    """
    figure = new_figure(_WIDTH_INCHES, 2 * _HEIGHT_INCHES)
    for axes, draw in zip(figure.subplots(3, 1, sharex=True), (_draw_users, _draw_tokens, _draw_bytes), strict=True):
        draw(axes, report)
        axes.label_outer()
    return figure


def _draw_latency(axes: Axes, report: Report) -> None:
    tally = report.tally
    series: list[tuple[str, Any]] = [("first token", tally.first_seconds), ("between tokens", tally.gap_seconds)]
    if tally.is_dry:
        series = [
            ("first token", np.asarray(tally.first_steps) * STEP_SECONDS),
            ("between tokens", np.asarray(tally.gap_steps) * STEP_SECONDS),
        ]
    for label, values in series:
        seconds = np.sort(np.asarray(values, np.float64))
        if len(seconds):
            shares = np.arange(1, len(seconds) + 1) / len(seconds)
            axes.step(
                seconds, shares, where="post", label=f"{label} (median {1000 * float(np.median(seconds)):.3g} ms)"
            )
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("seconds" + (f", at {STEP_SECONDS} s a step" if tally.is_dry else ""))
    axes.set_ylabel("share of tokens that came within")
    entitle(axes, "Latency")
    _finish(axes)


def _draw_bytes(axes: Axes, report: Report) -> None:
    rows = report.tally.samples.rows
    seconds = _seconds(rows)
    kinds = list(rows[0].by_kind) if rows else []
    axes.stackplot(
        seconds,
        [[row.by_kind[kind] / _MIB for row in rows] for kind in kinds],
        labels=[*map(literal, kinds)],
        colors=[shades()[name] for name in pool_colours(kinds)],
        step="post",
    )
    for label, values, style in (
        ("swapped to host memory", [row.host_bytes / _MIB for row in rows], "--"),
        ("swapped to files", [row.disk_bytes / _MIB for row in rows], ":"),
    ):
        if any(values):
            axes.plot(seconds, values, style, color=INK, label=label)
    _label(axes, report, "MiB", "Bytes of the memory by kind, and swapped out of it")


def _draw_tokens(axes: Axes, report: Report) -> None:
    rows = report.tally.samples.rows
    seconds = _seconds(rows)
    for label, colour in (("reused", COLOURS["reused"]), ("recomputed", COLOURS["computed"]), ("generated", INK)):
        axes.step(seconds, [getattr(row, label) for row in rows], where="post", color=colour, label=label)
    _label(axes, report, "tokens so far", "Tokens that were reused, computed again, and generated")


def _draw_users(axes: Axes, report: Report) -> None:
    rows = report.tally.samples.rows
    seconds = _seconds(rows)
    for label in ("running", "waiting", "silent", "paused", "swapped"):
        axes.step(seconds, [getattr(row, label) for row in rows], where="post", label=label)
    _label(axes, report, "conversations", "What conversations were doing")


def _seconds(rows: Sequence[Sample]) -> list[float]:
    return [row.seconds for row in rows]


def _label(axes: Axes, report: Report, what: str, title: str) -> None:
    axes.set_xlabel(f"seconds ({report.clock} clock)")
    axes.set_ylabel(what)
    axes.set_ylim(bottom=0)
    entitle(axes, title)
    _finish(axes)


def _finish(axes: Axes) -> None:
    plain(axes)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", frameon=False, labelcolor=INK)
