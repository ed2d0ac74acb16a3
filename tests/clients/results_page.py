"""Writes rows into the tables of the page on clients. Its other text is written by hand, and stays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "results" / "clients.md"
CLIENTS, AGENTS = "client", "agent"
"""The first words of the tables, which name them."""


def write_rows(table: str, rows: Mapping[str, str], page: Path = PAGE) -> None:
    """Replace rows of a table, and add those that it does not have. The table is sorted by the names of its rows.

    Args:
        table: the heading of its first column.
        rows: by name, the other cells of each row.
    """
    before, mark, behind = page.read_text().partition(f"\n| {table} |")
    assert mark, f"{page} has no table whose first column is {table!r}"
    body, end, after = behind.partition("\n\n")
    heading, line, *known = body.rstrip("\n").split("\n")
    cells = {name.strip(): rest for name, _, rest in (row[1:].partition("|") for row in known)}
    cells |= {name: f" {rest} |" for name, rest in rows.items()}
    written = [f"| {name} |{rest}" for name, rest in sorted(cells.items(), key=lambda row: row[0].lower())]
    page.write_text(before + mark + "\n".join([heading, line, *written]) + (end or "\n") + after)
