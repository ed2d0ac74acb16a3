"""Measures drafts by prompt lookup on a real model, which continues one text and repeats another."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import Report
from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine
from hybridmem.memory import HybridMemory
from hybridmem.models import load_model

_N_TOKENS = 128
_CODE = '''import csv


class Table:
    """A table of numbers that is read from a file."""

    def __init__(self, path):
        self.path = path
        self.rows = []

    def read(self):
        """Read all rows of the file."""
        with open(self.path) as file:
            for row in csv.reader(file):
                self.rows.append([float(cell) for cell in row])
        return self.rows

    def mean(self):
        """Return the mean of each row."""
        return [sum(row) / len(row) for row in self.rows]

    def largest(self):
        """Return the largest number of each row."""
        return [max(row) for row in self.rows]

    def smallest(self):
        """Return the smallest number of each row."""
        return [min(row) for row in self.rows]
'''
_COPIES = ("Sheet", "Grid", "Matrix", "Frame", "Ledger", "Numbers", "Measures", "Samples")


def _again(name: str) -> str:
    """Return a prompt whose continuation is the code with another name of the class.

    Asked in words, a model as small as these does not repeat the code.
    """
    begin = _CODE[: _CODE.index("        self.path")].replace("Table", name)
    return f"# table.py\n\n{_CODE}\n\n# The same as table.py, but the class is called {name}\n\n{begin}"


def compare(report: Report, path: Path, tokenizer: Any, text: str, n_rounds: int) -> None:
    """Add the speedup by drafts and the share of accepted drafts to the report, for 1 and 8 requests."""
    model = load_model(path, progress=False)
    book = [text[at : at + 2000] for at in range(4000, 4000 + 8 * 6000, 6000)]
    for name, prompts in (("a book goes on", book), ("code is said again", [_again(name) for name in _COPIES])):
        ids = [tokenizer.encode(prompt) for prompt in prompts]
        for load in (1, 8):
            engines = {
                looks_up: Engine(
                    model, HybridMemory(model.memory_spec, "512MiB", rollback_window=32), None, stop_ids=(),
                    speculation=Speculation(looks_up=looks_up),
                )
                for looks_up in (False, True)
            }  # fmt: skip
            seconds: dict[bool, list[float]] = {False: [], True: []}
            said = dict[bool, list[list[int]]]()
            for _ in range(1 + n_rounds):
                for looks_up, engine in engines.items():
                    started = time.perf_counter()
                    generations = [engine.submit(prompt, max_tokens=_N_TOKENS) for prompt in ids[:load]]
                    engine.run()
                    seconds[looks_up].append(time.perf_counter() - started)
                    said[looks_up] = [list(generation.token_ids) for generation in generations]
            assert said[False] == said[True], "drafts have changed a reply"
            stats = engines[True].stats
            ratio = statistics.median(a / b for a, b in zip(seconds[False][1:], seconds[True][1:], strict=True))
            report.add(f"drafts by lookup, {path.name}", {
                "text": name, "requests": load, "time without / with": ratio,
                "drafted a token": stats.n_drafted / stats.n_generated,
                "right": stats.n_accepted / stats.n_drafted if stats.n_drafted else 0.0,
            })  # fmt: skip
