"""Shows a simulation: a live view while it runs, and a summary at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hybridmem.chat.simulation.report import Report, nest
from hybridmem.chat.simulation.simulation import Simulation
from hybridmem.memory.views import format_bytes

_REFRESHES_PER_SECOND = 8
_BAR_COLUMNS = 60
_STYLES = ("cyan", "magenta", "green", "yellow", "blue", "red")
_MOST_WRONG = 20

OnStep = Callable[[Simulation], None]


class _Dashboard:
    """Shows counts, a bar of bytes and the last replies.

    It is redrawn between steps, from the counts recorded after the last step.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._drawn_at = 0.0
        self._content: Group | Text = Text("...")

    def watch(self, simulation: Simulation) -> None:
        """Record the counts, as often as the view can show them."""
        now = time.perf_counter()
        if now - self._drawn_at >= 1 / _REFRESHES_PER_SECOND:
            self._drawn_at = now
            self._content = self._draw(simulation)

    def _draw(self, simulation: Simulation) -> Group:
        engine, stats = simulation.engine, simulation.engine.stats
        seconds = max(time.perf_counter() - self._started, 1e-9)
        n_silent = simulation.n_users - simulation.n_generating - simulation.n_paused
        counts = Table.grid(padding=(0, 2))
        counts.add_row(
            Text(f"{engine.load.running} running", style="bold green"),
            Text(f"{engine.load.waiting + engine.load.preempted} waiting", style="yellow"),
            f"{n_silent} silent",
            Text(f"{simulation.n_paused} paused", style="dim"),
            f"{simulation.n_families:,} arrived",
            f"{stats.n_fed / seconds:,.0f} tokens/s",
            f"{stats.n_preempted:,} preempted",
            f"{simulation.seconds:,.1f} s",
        )
        return Group(counts, *_bars(simulation), _replies(simulation))

    def __rich__(self) -> Group | Text:
        return self._content


def _bars(simulation: Simulation) -> list[Text]:
    """Return two lines.

    The first shows the budget by kind of memory; the second explains the colours, and shows the bytes outside of the
    budget.
    """
    by_kind = simulation.memory.counters.bytes_by_pool()
    budget_bytes = simulation.memory.budget_bytes
    bar, legend, n_drawn = Text(), Text(), 0
    for (kind, n_bytes), style in zip(by_kind.items(), _STYLES * len(by_kind), strict=False):
        n_columns = round(_BAR_COLUMNS * n_bytes / budget_bytes)
        bar.append("█" * n_columns, style=style)
        legend.append("■ ", style=style)
        legend.append(f"{kind} {format_bytes(n_bytes)}  ")
        n_drawn += n_columns
    bar.append("░" * max(0, _BAR_COLUMNS - n_drawn), style="dim")
    bar.append(f" of {format_bytes(budget_bytes)}")
    host_bytes, disk_bytes = simulation.memory.counters.swapped_bytes
    legend.append(
        f"swapped out: {format_bytes(host_bytes)} in host memory, {format_bytes(disk_bytes)} in files", style="dim"
    )
    return [bar, legend]


def _replies(simulation: Simulation) -> Table:
    table = Table(box=None, padding=(0, 1))
    for heading in ("", "says", "is told"):
        table.add_column(heading, header_style="dim", no_wrap=True)
    for name, text, reply in list(simulation.latest):
        table.add_row(Text(name, style="bold cyan"), Text(text, style="dim"), Text(reply))
    return table


@contextmanager
def live_dashboard(console: Console, *, is_shown: bool) -> Iterator[OnStep]:
    """Show a simulation while it runs. Show nothing if the console is not a terminal.

    Yields:
        A function to call after each step.
    """
    if not (is_shown and console.is_terminal):
        yield lambda simulation: None
        return
    dashboard = _Dashboard()
    with Live(dashboard, console=console, refresh_per_second=_REFRESHES_PER_SECOND, transient=True):
        yield dashboard.watch


def print_summary(console: Console, report: Report) -> None:
    """Print the events, latency, reuse, swaps, errors, and the verdict."""
    console.print(_actions_line(report))
    console.print(_latency_table(report))
    console.print(_tokens_table(report))
    console.print(_memory_table(report))
    if report.wrong:
        console.print(_wrong_table(report))
    for line, style in _verdict(report):
        console.print(Text(line, style=style))


def _actions_line(report: Report) -> Text:
    timings = report.to_json()["timings"]
    engine = report.tally.engine
    actions = ", ".join(f"{n:,} {action}" for action, n in sorted(report.tally.actions.items()))
    return Text(
        f"{report.n_families:,} users ({actions}) in {engine.n_steps:,} steps and {report.seconds:.1f} s: "
        f"{engine.n_fed:,} tokens fed, {engine.n_generated:,} generated, {timings['fed tokens/s']:,.0f} and "
        f"{timings['generated tokens/s']:,.0f} a second"
    )


def _latency_table(report: Report) -> Table:
    table = Table(title="Latency (ms)" if not report.tally.is_dry else "Latency (ms of the virtual clock)")
    table.add_column("")
    for heading in ("p50", "p95", "p99", "max"):
        table.add_column(heading, justify="right")
    timings = report.to_json()["timings"]
    for name in ("first token", "between tokens"):
        found = timings[f"{name} (s)"]
        table.add_row(name, *(f"{1000 * found[p]:,.1f}" if p in found else "-" for p in ("p50", "p95", "p99", "max")))
    return table


def _tokens_table(report: Report) -> Table:
    table = Table(title="Tokens that were known before")
    for heading, justify in (("action", "left"), ("", "left"), ("tokens", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for what, counts in (("reused", report.tally.reused), ("recomputed", report.tally.recomputed)):
        for action, ways in nest(counts).items():
            for way, n_tokens in ways.items():
                table.add_row(action, f"{what}: {way}", f"{n_tokens:,}")
        table.add_section()
        table.add_row("total", what, f"{counts.total():,}")
        table.add_section()
    return table


def _memory_table(report: Report) -> Table:
    table = Table(title="Memory")
    table.add_column("")
    table.add_column("", justify="right")
    kinds = {kind: max(row.by_kind[kind] for row in report.tally.samples.rows) for kind in _kinds(report)}
    for kind, n_bytes in kinds.items():
        table.add_row(f"{kind}, most seen", format_bytes(n_bytes))
    table.add_row("in use, most", format_bytes(report.peak_bytes))
    table.add_row("in use at the end", format_bytes(report.end_bytes))
    table.add_section()
    for name, value in report.to_json()["scheduling"].items():
        for label, n in value.items() if isinstance(value, dict) else ((None, value),):
            table.add_row(name if label is None else f"swapped out: {label}", f"{n:,}")
    return table


def _kinds(report: Report) -> list[str]:
    rows = report.tally.samples.rows
    return list(rows[0].by_kind) if rows else []


def _wrong_table(report: Report) -> Table:
    table = Table(title="Wrong answers")
    table.add_column("user", no_wrap=True)
    for heading in ("question", "answer", "expected", "alone"):
        table.add_column(heading)
    for answer in sorted(report.wrong, key=lambda a: not (a.is_lost or a.is_leak))[:_MOST_WRONG]:
        alone = "(not asked)" if answer.alone is None else answer.alone
        style = "red" if answer.is_lost or answer.is_leak else None
        table.add_row(
            *(Text(t, style=style or "") for t in (answer.user, answer.question, answer.answer, answer.expected, alone))
        )
    if len(report.wrong) > _MOST_WRONG:
        table.caption = f"and {len(report.wrong) - _MOST_WRONG:,} more"
    return table


def _verdict(report: Report) -> list[tuple[str, str]]:
    """Return lines with their styles. A red line means that the simulation failed."""
    n_answers, bad, lines = len(report.tally.answers), "bold red", list[tuple[str, str]]()
    if report.is_checked and not report.tally.is_dry:
        n_right = n_answers - len(report.wrong)
        lines.append(
            (
                f"{n_right:,} of {n_answers:,} answers are right; {report.n_checked_alone:,} were compared with the "
                "model alone.",
                "",
            )
        )
        if report.lost:
            lines.append((f"{len(report.lost)} answers are wrong here and right when the user is served alone.", bad))
        if report.leaks:
            lines.append((f"{len(report.leaks)} answers name what only other users told.", bad))
    if report.tally.failed:
        failures = "; ".join(f"{n} x {error}" for error, n in report.tally.failed.most_common(3))
        lines.append((f"{report.tally.failed.total()} replies failed: {failures}", bad))
    if report.end_bytes != report.start_bytes:
        lines.append(
            (f"{report.end_bytes:,} bytes are in use at the end, {report.start_bytes:,} were at the start.", bad)
        )
    if report.is_ok:
        checked = (
            "Nobody lost or overheard anything" if report.is_checked and not report.tally.is_dry else "Every reply came"
        )
        lines.append((f"{checked}, all bytes came back, and the memory's books balance.", "bold green"))
    return lines
