"""Prints a capacity plan on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridmem.chat.console import harmless
from hybridmem.chat.planning.report import Choice, Report
from hybridmem.memory.views import format_bytes


def print_plan(console: Console, report: Report) -> None:
    """Print what a session holds, how many sessions fit, and the alternatives. Strings of the config are escaped."""
    question = report.question
    dtype = str(question.spec.dtype).removeprefix("torch.")
    title = f"{question.spec.model} in {dtype} on {question.spec.device}: {question.context_tokens:,} tokens a session"
    console.print(Text(harmless(title), style="bold"))
    console.print(_session_table(report))
    console.print(_answer(report))
    for line in _remarks(report):
        console.print(Text(line))
    for heading, choices in (
        (f"Attention that keeps {question.keep:.0%} of the context", report.policies),
        ("Old rows in few bits", report.storages),
    ):
        if choices:
            console.print(_choices_table(heading, choices, report))
    if report.peers:
        console.print(_peers_table(report))
        for line in [note for peer in report.peers for note in peer.notes] + [
            source for peer in report.peers for source in peer.sources
        ]:
            console.print(Text(line, style="dim"))


def _answer(report: Report) -> Text:
    """Return a text that says how many sessions fit, and how many bytes the weights take in or beside the budget."""
    question = report.question
    whole, weights = format_bytes(question.whole_bytes), format_bytes(question.weight_bytes)
    if not question.model_fits:
        return Text(f"The model does not fit into {whole}: its weights take {weights}.", style="bold red")
    told = f", of which the weights take {weights}" if question.has_weights else f"; the weights take {weights} beside"
    return Text(f"{report.n_sessions:,} sessions fit into {whole}{told}.", style="bold green")


def _session_table(report: Report) -> Table:
    session = report.session
    table = Table(title="A session at its largest")
    for heading, justify in (("kind", "left"), ("blocks", "right"), ("of", "right"), ("bytes", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for kind, n_bytes in session.by_kind.items():
        block_bytes = session.block_bytes[kind]
        roles = f" ({_roles(n_bytes // block_bytes, report.question.window_tokens)})" if kind == "states" else ""
        table.add_row(Text(kind + roles), f"{n_bytes // block_bytes:,}", format_bytes(block_bytes), f"{n_bytes:,}")
    table.add_section()
    table.add_row("total", "", format_bytes(session.most_bytes), f"{session.most_bytes:,}")
    return table


def _roles(n_states: int, window_tokens: int) -> str:
    """Return a text that says what each of a sequence's states is for.

    Their order does not depend on the allocation.
    """
    if n_states == 1:
        return "head" if window_tokens else "body"
    return ", ".join(("body", "head", "next body")[:n_states])


def _remarks(report: Report) -> list[str]:
    question, lines, drafts = report.question, [], report.question.draft_session
    if question.exceeds_context:
        lines.append(
            f"The model was made for {question.own_context_tokens:,} tokens: generate, chat and serve end a reply "
            "there, and what it writes after them is likely wrong."
        )
    if drafts is not None:
        lines.append(f"The memory of what drafts holds {format_bytes(drafts.most_bytes)} more for each session.")
    if report.attention_token_bytes is not None:
        lines.append(f"A token adds {report.attention_token_bytes:,} bytes of keys and values.")
    if report.overtakes_at is not None:
        lines.append(f"From {report.overtakes_at:,} tokens on they hold more than the session's states and tail.")
    small, whole = (format_bytes(n_bytes) for n_bytes in report.checkpoint_bytes)
    more = "" if small == whole else f", or {whole} with its tail"
    lines.append(f"A checkpoint adds {small}{more}, once its session has gone on.")
    if report.session.step_bytes:
        lines.append(f"A prompt's steps need up to {format_bytes(report.session.step_bytes)} of scratch memory.")
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
        table.add_row(
            Text(", ".join(choice.names)), format_bytes(choice.session_bytes), f"{choice.n_sessions:,}", times
        )
    return table


def _peers_table(report: Report) -> Table:
    """Return the table of engines, ours first.

    Each engine takes the window's tokens back in its own way, or not at all.
    """
    question, session = report.question, report.session
    table = Table(title="The same sessions elsewhere, as documented there")
    table.add_column("")
    for name in ("a session", "sessions", f"to take {question.window_tokens:,} tokens back", "sessions"):
        table.add_column(name, justify="right")
    ours = (format_bytes(session.most_bytes), f"{report.n_sessions:,}")
    table.add_row("hybrid-memory", *ours, *ours)
    for peer in report.peers:
        if peer.why_not:
            table.add_row(peer.name, Text(peer.why_not, style="dim"), "", "", "")
            continue
        window = (
            ("not possible", "")
            if peer.window_bytes is None
            else (format_bytes(peer.window_bytes), f"{peer.n_window_sessions:,}")
        )
        table.add_row(peer.name, format_bytes(peer.session_bytes), f"{peer.n_sessions:,}", *window)
    return table
