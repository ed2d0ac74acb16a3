"""A plan on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from chat.planning.report import Choice, Report
from memory.inspection import format_bytes


def print_plan(console: Console, report: Report) -> None:
    """What a session holds, how many fit, and what else could be done. Strings of the config are shown as they are."""
    question = report.question
    dtype = str(question.spec.dtype).removeprefix("torch.")
    title = f"{question.spec.model} in {dtype} on {question.spec.device}: {question.context_tokens:,} tokens a session"
    console.print(Text(title, style="bold"))
    console.print(_session_table(report))
    console.print(Text(f"{report.n_sessions:,} sessions fit into {format_bytes(question.budget_bytes)}.", style="bold green"))
    for line in _remarks(report):
        console.print(Text(line))
    for heading, choices in (
        (f"Attention that keeps {question.keep:.0%} of the context", report.policies),
        ("Old rows in few bits", report.storages),
    ):
        if choices:
            console.print(_choices_table(heading, choices, report))


def _session_table(report: Report) -> Table:
    session = report.session
    table = Table(title="A session at its largest")
    for heading, justify in (("kind", "left"), ("blocks", "right"), ("of", "right"), ("bytes", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for kind, n_bytes in session.by_kind.items():
        block_bytes = session.block_bytes[kind]
        table.add_row(Text(kind), f"{n_bytes // block_bytes:,}", format_bytes(block_bytes), f"{n_bytes:,}")
    table.add_section()
    table.add_row("total", "", format_bytes(session.most_bytes), f"{session.most_bytes:,}")
    return table


def _remarks(report: Report) -> list[str]:
    lines = []
    if report.attention_token_bytes is not None:
        lines.append(f"A token adds {report.attention_token_bytes:,} bytes of keys and values.")
    if report.overtakes_at is not None:
        lines.append(f"From {report.overtakes_at:,} tokens on they hold more than the session's states and tail.")
    if report.session.step_bytes:
        lines.append(f"Steps of a prompt take up to {format_bytes(report.session.step_bytes)} more while they run.")
    return lines


def _choices_table(heading: str, choices: tuple[Choice, ...], report: Report) -> Table:
    table = Table(title=heading)
    table.add_column("")
    for name in ("a session", "sessions", "times as many"):
        table.add_column(name, justify="right")
    for choice in choices:
        if choice.why_not:
            table.add_row(Text(", ".join(choice.names)), Text(choice.why_not, style="dim"), "", "")
            continue
        times = f"{choice.n_sessions / report.n_sessions:.2f}" if report.n_sessions else ""
        table.add_row(Text(", ".join(choice.names)), format_bytes(choice.session_bytes), f"{choice.n_sessions:,}", times)
    return table
