"""Prints small tables of text and numbers: as plain text, in a terminal by rich, and as HTML in a notebook.

The HTML is self-contained: it loads no script and no style sheet. It takes the text colour of the page around it and
lays translucent grey over the page's background, so it can be read on dark and on light pages. Every string is escaped.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from hybridmem.memory.views.palette import COLOURS

if TYPE_CHECKING:
    from rich.console import Group

_LINE = "1px solid rgba(128,128,128,.35)"


def format_bytes(n_bytes: float) -> str:
    """Write a number of bytes with three significant digits in a binary unit: "1.5 MiB"."""
    step = int(min(np.log2(max(n_bytes, 1)) // 10, 4))
    number = n_bytes / 1024**step
    return f"{number:{'.0f' if number >= 999.5 else '.3g'}} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[step]}"


def count(n: int, one: str, several: str) -> str:
    """Write a number with its noun: "1 page", "2,000 pages"."""
    return f"{n:,} {one if n == 1 else several}"


@dataclass(frozen=True)
class Table:
    """Holds the rows of a table as text.

    Attributes:
        columns: the titles. The first column is aligned to the left. The others are numbers, aligned to the right.
        n_hidden: how many rows are left out. A note below the table says so.
    """

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    n_hidden: int = 0

    @property
    def note(self) -> str:
        return f"… and {self.n_hidden:,} more" if self.n_hidden else ""

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.columns, *self.rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in (self.columns, *self.rows)
        ]
        return "\n".join([line.rstrip() for line in lines] + [self.note] * bool(self.note))

    def html(self) -> str:
        aligns = ("left", *["right"] * (len(self.columns) - 1))
        cell = (
            f"padding:.15em .7em;border:0;border-bottom:{_LINE};background:transparent;white-space:nowrap;text-align:"
        )
        head = "".join(
            f'<th style="{cell}{a};opacity:.75">{escape(name)}</th>'
            for a, name in zip(aligns, self.columns, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(f'<td style="{cell}{a}">{escape(text)}</td>' for a, text in zip(aligns, row, strict=True))
            + "</tr>"
            for row in self.rows
        )
        note = f'<div style="opacity:.75">{escape(self.note)}</div>' if self.note else ""
        style = (
            "border-collapse:collapse;margin:.4em 0;color:inherit;font-size:inherit;font-variant-numeric:tabular-nums"
        )
        return f'<table style="{style}"><tr>{head}</tr>{body}</table>{note}'


def as_rich(heading: str, tables: list[Table]) -> Group:
    """Return a heading and tables for `__rich__`, which only rich calls. Needs rich."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    shown: list[Text | RichTable] = [Text(heading, style="bold")]
    for table in tables:
        rich_table = RichTable(
            box=box.SIMPLE_HEAD, caption=Text(table.note) if table.note else None, caption_justify="left"
        )
        for i, name in enumerate(table.columns):
            rich_table.add_column(Text(name), justify="right" if i else "left", no_wrap=True)
        for row in table.rows:
            rich_table.add_row(*map(Text, row))
        shown.append(rich_table)
    return Group(*shown)


def as_html(title: str, lines: list[str], bar: dict[str, int], total_bytes: int, tables: list[Table]) -> str:
    """Return a view for notebooks: a title, lines of text, a bar of bytes by part, and tables.

    Args:
        lines: text below the title.
        bar: part -> bytes, drawn to the scale of `total_bytes`. The remaining bytes are an empty part of the bar.
    """
    pieces, keys = [], []
    for part, n_bytes in bar.items():
        if not n_bytes:
            continue
        colour, label = COLOURS[part], f"{part} {format_bytes(n_bytes)}"
        pieces.append(
            f'<div title="{escape(label)}" style="width:{100 * n_bytes / total_bytes:.3f}%;background:{colour}"></div>'
        )
        keys.append(
            f'<span style="white-space:nowrap;margin-right:1em">'
            f'<span style="display:inline-block;width:.7em;height:.7em;'
            f'margin-right:.35em;background:{colour}"></span>{escape(label)}</span>'
        )
    frame = (
        f"display:flex;height:.8em;max-width:40em;margin:.4em 0 .2em;border:{_LINE};background:rgba(128,128,128,.15)"
    )
    return (
        '<div style="color:inherit;font-size:.9em;line-height:1.5;overflow-x:auto">'
        f"<b>{escape(title)}</b>{''.join(f'<div>{escape(line)}</div>' for line in lines)}"
        f'<div style="{frame}">{"".join(pieces)}</div><div>{"".join(keys)}</div>'
        f"{''.join(t.html() for t in tables)}</div>"
    )
