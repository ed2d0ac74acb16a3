"""Shows the demo in the terminal: the conversations while they run, and the right and wrong answers at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from hybridmem.chat.commands.demo import Report
from hybridmem.chat.console import REFRESHES_PER_SECOND
from hybridmem.chat.simulation.conversation import Conversation, OnWord
from hybridmem.memory.views import Usage, format_bytes

MOST_ROWS = 40
"""The table lists at most this many rows. It only counts the right answers beyond these."""
_MOST_LIVE_ROWS = 12


class _Stage:
    """Shows the replies of the users who spoke first, as they grow, above a progress line."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("replies", total=None)
        self._rows: dict[str, tuple[str, str]] = {}

    def hear(self, conversation: Conversation, text: str, reply: str, is_last: bool) -> None:
        if conversation.name in self._rows or len(self._rows) < _MOST_LIVE_ROWS:
            self._rows[conversation.name] = (text, reply)
        if is_last:
            self._bar.advance(self._task)

    def __rich__(self) -> Group:
        table = Table(box=None, padding=(0, 1))
        for heading in ("", "says", "is told"):
            table.add_column(heading, header_style="dim", no_wrap=True)
        # Another thread draws. It iterates over a copy, since a row may be added meanwhile.
        for name, (text, reply) in list(self._rows.items()):
            table.add_row(Text(name, style="bold cyan"), Text(text, style="dim"), Text(reply))
        return Group(table, self._bar)


@contextmanager
def live_stage(console: Console) -> Iterator[OnWord]:
    """Show conversations while they run. Show nothing if the console is not a terminal.

    Yields:
        A function to call after each new token.
    """
    if not console.is_terminal:
        yield lambda conversation, text, reply, is_last: None
        return
    columns = (TextColumn("{task.completed} {task.description}"), BarColumn(), TimeElapsedColumn())
    stage = _Stage(Progress(*columns, console=console))
    with Live(stage, console=console, refresh_per_second=REFRESHES_PER_SECOND, transient=True):
        yield stage.hear


def print_report(console: Console, report: Report) -> None:
    """Print the answers, the reuse, the bytes, the speed and the verdict."""
    console.print(_answers_table(report))
    console.print(_reuse_table(report))
    console.print(_usage_table(report.usage))
    console.print(Text(str(report.speed)))
    n_right, n_answers = len(report.answers) - len(report.wrong), len(report.answers)
    if report.wrong:
        console.print(Text(f"{len(report.wrong)} of {n_answers} answers are wrong.", style="bold red"))
    elif not report.is_ok:
        console.print(Text("All answers are right, but history was computed a second time.", style="bold red"))
    else:
        console.print(Text(f"All {n_right} answers are right, and the memory's books balance.", style="bold green"))


def _answers_table(report: Report) -> Table:
    """Return a table of the answers.

    It has all wrong ones; if there are too many rows, it leaves out the first right ones.
    """
    table = Table(title="Every question that was asked")
    table.add_column("user", no_wrap=True)
    for heading in ("question", "answer", "expected", ""):
        table.add_column(heading)
    n_left_out = max(0, len(report.answers) - MOST_ROWS)
    skipped = {id(a) for a in [a for a in report.answers if a.is_right][:n_left_out]}
    scene = ""
    for answer in report.answers:
        if id(answer) in skipped:
            continue
        if answer.scene != scene:
            scene = answer.scene
            table.add_section()
            table.add_row("", Text(scene, style="bold"))
        mark = Text("✓", style="green") if answer.is_right else Text("✗", style="bold red")
        table.add_row(*map(Text, (answer.user, answer.question, answer.answer, answer.expected)), mark)
    if skipped:
        table.caption = f"and {len(skipped):,} more right answers"
    return table


def _reuse_table(report: Report) -> Table:
    table = Table(title="History that was not computed again (tokens)")
    for heading in ("scene", "by"):
        table.add_column(heading)
    for heading in ("reused", "recomputed", "new"):
        table.add_column(heading, justify="right")
    for reuse in report.reuses:
        counts = (reuse.n_reused, reuse.n_recomputed, reuse.n_new)
        table.add_row(Text(reuse.scene), Text(reuse.means), *(f"{n:,}" for n in counts))
    totals = (
        sum(column) for column in zip(*((r.n_reused, r.n_recomputed, r.n_new) for r in report.reuses), strict=True)
    )
    table.add_section()
    table.add_row("total", "", *(f"{n:,}" for n in totals))
    return table


def _usage_table(usage: Usage) -> Table:
    table = Table(title=f"Memory of {usage.by_sequence.counted}, each block counted once")
    table.add_column("kind")
    table.add_column("bytes", justify="right")
    for kind, n_bytes in usage.by_kind.items():
        table.add_row(Text(kind), format_bytes(n_bytes))
    table.add_section()
    table.add_row("total", format_bytes(usage.used_bytes))
    return table
