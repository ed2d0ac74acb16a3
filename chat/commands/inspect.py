"""Declares the options of `hybrid-memory inspect`, and prints its findings. Libraries are imported when it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from hybridmem.chat.commands.inspection import Finding


def inspect(
    file: Annotated[
        Path,
        typer.Argument(help="Name a saved sequence, chat or prefix cache, a server's sessions, a model or its config."),
    ],
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a file or folder holds, and whether it is whole.

    It reads saved sequences, chats and prefix caches, a server's sessions, models and their configs. It loads no model
    and changes nothing.
    """
    from hybridmem.chat.commands.inspection import inspect_path
    from hybridmem.chat.console import make_console

    finding = inspect_path(file)
    if is_json:
        typer.echo(json.dumps(finding.to_json(), indent=1))
    else:
        _show(make_console(), finding)


def _show(console: Console, finding: Finding) -> None:
    """Print a finding as tables.

    Strings from the file are escaped, because the file may be hostile: no markup or control character reaches the
    terminal.
    """
    from rich.table import Table
    from rich.text import Text

    from hybridmem.chat.console import harmless
    from hybridmem.memory.views import format_bytes

    def text(value: object) -> Text:
        if isinstance(value, dict) and all(isinstance(each, int) for each in value.values()):
            return Text("\n".join(harmless(f"{name}: {each:,}") for name, each in value.items()))
        return Text(harmless(value if isinstance(value, str) else json.dumps(value)))

    checked = {True: "its checksum is right", False: "a part of it is damaged", None: "it has no checksum"}
    console.print(Text(f"{harmless(finding.path)}: a {finding.kind}; {checked[finding.is_verified]}", style="bold"))
    facts = Table(box=None, show_header=False)
    for name, value in finding.facts.items():
        facts.add_row(text(name), text(value))
    console.print(facts)
    if finding.by_kind:
        table = Table(title="Bytes")
        table.add_column("kind")
        table.add_column("bytes", justify="right")
        for kind, n_bytes in finding.by_kind.items():
            table.add_row(text(kind), f"{n_bytes:,}")
        table.add_section()
        table.add_row("total", f"{sum(finding.by_kind.values()):,}")
        console.print(table)
    if finding.largest:
        table = Table(title="Largest tensors")
        for heading in ("name", "dtype", "shape"):
            table.add_column(heading)
        table.add_column("bytes", justify="right")
        for tensor in finding.largest:
            table.add_row(
                text(tensor.name), text(tensor.dtype), "×".join(map(str, tensor.shape)), format_bytes(tensor.n_bytes)
            )
        console.print(table)
    if finding.tree:
        table = Table(title="What grew from what")
        table.add_column("")
        table.add_column("tokens", justify="right")
        table.add_column("bytes of its own", justify="right")
        for branch in finding.tree:
            sizes = ("" if n is None else f"{n:,}" for n in (branch.n_tokens, branch.n_bytes))
            table.add_row(text("  " * branch.depth + branch.what), *sizes)
        console.print(table)
    for part in finding.parts:
        _show(console, part)
