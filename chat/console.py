"""Prints to a terminal or a pipe: replies while they grow, and texts from files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

MOST_CHARACTERS = 2000
"""At most this many characters of a text from a file are shown."""
_PIPED_WIDTH = 120
"""An output without a width, such as a pipe, gets this many columns. Most rows fit on one line then."""
REFRESHES_PER_SECOND = 12


def make_console() -> Console:
    """Return the console of standard output."""
    console = Console()
    return console if console.is_terminal else Console(width=_PIPED_WIDTH)


def harmless(text: str) -> str:
    """Return text from an untrusted file in a form that a terminal may show.

    Control characters are replaced by their names, and long text is cut.
    """
    shown = "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text[:MOST_CHARACTERS]
    )
    return shown + "…" * (len(text) > MOST_CHARACTERS)


@dataclass
class Reply:
    """Holds a reply that grows."""

    text: str = ""
    is_complete: bool = False


def show_replies(console: Console, stream: Iterator[list[Reply]]) -> None:
    """Show replies in order.

    A terminal shows them while they grow. Any other output gets each as plain text once it and all before it are
    complete.

    Args:
        stream: yields all replies, again and again, until every one is complete. A single reply is shown without a
            number.
    """
    if console.is_terminal:
        _show_live(console, stream)
        return
    n_printed = 0
    for replies in stream:
        while n_printed < len(replies) and replies[n_printed].is_complete:
            number = f"[{n_printed + 1}] " if len(replies) > 1 else ""
            console.file.write(f"{number}{replies[n_printed].text}\n")
            console.file.flush()
            n_printed += 1


def _show_live(console: Console, stream: Iterator[list[Reply]]) -> None:
    """Show replies while they grow. Text that exceeds the screen is cut meanwhile, and written in full at the end."""
    table = Table.grid()
    try:
        with Live(table, console=console, refresh_per_second=REFRESHES_PER_SECOND, transient=True) as live:
            for replies in stream:
                table = _replies_table(replies)
                live.update(table)
    finally:
        console.print(table)


def _replies_table(replies: list[Reply]) -> Table:
    table = Table.grid(padding=(0, 1))
    for i, reply in enumerate(replies):
        number = [Text(f"[{i + 1}]", style="bold cyan" if reply.is_complete else "dim")] if len(replies) > 1 else []
        table.add_row(*number, Text(reply.text))
    return table
