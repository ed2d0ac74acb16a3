"""Measures functions side by side, and reports the results with the machine on which they were measured."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import typer
from rich.console import Console
from rich.table import Table

Cell = str | int | float
Row = dict[str, Cell]


@dataclass(frozen=True)
class Samples:
    """Holds the seconds of all measurements of one function."""

    seconds: list[float]

    @property
    def median_ms(self) -> float:
        return statistics.median(self.seconds) * 1e3

    @property
    def mean_ms(self) -> float:
        return statistics.mean(self.seconds) * 1e3

    @property
    def spread(self) -> str:
        """Return the range of the middle eighty per cent of the measurements, in milliseconds."""
        ordered = sorted(self.seconds)
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        return f"{low * 1e3:.3g} … {high * 1e3:.3g}"


def interleave(runs: Mapping[str, Callable[[], object]], n_rounds: int, *, n_warm_up: int = 1) -> dict[str, Samples]:
    """Time each of `runs` once a round, one after the other.

    So all functions are equally affected if the machine becomes slower for a while.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(n_warm_up + n_rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if i >= n_warm_up:
                seconds[name].append(time.perf_counter() - started)
    return {name: Samples(samples) for name, samples in seconds.items()}


def rounded(value: Cell) -> Cell:
    """Return a number with three significant digits."""
    return float(f"{value:.3g}") if isinstance(value, float) else value


@dataclass
class Report:
    """Holds the results of a benchmark: tables of rows with the same columns, and notes."""

    name: str
    tables: dict[str, list[Row]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, table: str, row: Row) -> None:
        self.tables.setdefault(table, []).append({name: rounded(value) for name, value in row.items()})
        Console(stderr=True).print(f"[dim]{self.name} · {table}: {row}[/dim]", highlight=False)

    def keep(self, folder: Path | None, *names: str) -> None:
        """Add the rows of other cases from the report in a folder, so that a long command can be run in pieces.

        They must have been measured on the same machine with the same versions. The columns `names` identify a row and
        order the rows.
        """
        path = None if folder is None else folder / f"{self.name}.json"
        if path is None or not path.exists():
            return
        known = json.loads(path.read_text())
        if known["machine"] != machine():
            return
        for title, rows in known["tables"].items():
            own = self.tables.setdefault(title, [])
            new = {tuple(row[name] for name in names) for row in own}
            own += [row for row in rows if tuple(row[name] for name in names) not in new]
            own.sort(key=lambda row: tuple(row[name] for name in names))

    def keep_tables(self, folder: Path | None) -> None:
        """Add the tables of the report in a folder that were not measured now, if machine and versions are the same."""
        path = None if folder is None else folder / f"{self.name}.json"
        if path is None or not path.exists():
            return
        known = json.loads(path.read_text())
        if known["machine"] == machine():
            self.tables |= {title: rows for title, rows in known["tables"].items() if title not in self.tables}

    def show(self) -> None:
        console = Console()
        for title, rows in self.tables.items():
            table = Table(title=title)
            for name in rows[0]:
                table.add_column(name, justify="left" if isinstance(rows[0][name], str) else "right")
            for row in rows:
                table.add_row(*(_text(value) for value in row.values()))
            console.print(table)
        for note in self.notes:
            console.print(note, highlight=False)

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        content = {"benchmark": self.name, "machine": machine(), "tables": self.tables, "notes": self.notes}
        (folder / f"{self.name}.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
        (folder / f"{self.name}.md").write_text(self._markdown())
        Console(stderr=True).print(f"written to {folder / self.name}.json and .md")

    def _markdown(self) -> str:
        lines = [f"# {self.name}", "", ", ".join(f"{name}: {value}" for name, value in machine().items()), ""]
        for title, rows in self.tables.items():
            lines += [f"## {title}", "", "| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
            lines += ["| " + " | ".join(_text(value) for value in row.values()) + " |" for row in rows] + [""]
        return "\n".join([*lines, *self.notes]) + "\n"


def _text(value: Cell) -> str:
    return f"{value:,}" if isinstance(value, int | float) else value


def machine() -> Row:
    """Return the processor, the number of threads, and the versions of the libraries that were measured."""
    found: Row = {"processor": _processor(), "cores": os.cpu_count() or 0, "torch threads": torch.get_num_threads()}
    found["python"] = platform.python_version()
    for package in ("hybridmem", "torch", "numba", "transformers"):
        try:
            found[package] = version("hybridmem" if package == "hybrid-memory" else package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def require_green(*tests: str, only: str | None = None) -> None:
    """Run the tests of the code that is about to be measured, or only those that match `only`.

    If one fails, nothing is measured: a wrong result has no speed.
    """
    console = Console(stderr=True)
    console.print(f"[dim]tests first: {' '.join(tests)}[/dim]")
    root = Path(__file__).parent.parent
    outcome = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *tests, *(() if only is None else ("-k", only))],
        cwd=root,
        capture_output=True,
        text=True,
    )
    if outcome.returncode != 0:
        console.print(outcome.stdout[-3000:] + outcome.stderr[-1000:], highlight=False, markup=False)
        console.print(
            "[red]the tests of this benchmark fail (they need the repository and its dev extra): no speed is "
            "measured[/red]"
        )
        raise typer.Exit(1)
