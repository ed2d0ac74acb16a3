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
_CODE = '''def read_rows(path, separator=","):
    """Return the rows of a file as lists of texts."""
    rows = []
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line:
                continue
            rows.append([field.strip() for field in line.split(separator)])
    return rows


def count_fields(rows):
    """Return how many fields each row has."""
    return [len(row) for row in rows]
'''


def compare(report: Report, path: Path, tokenizer: Any, text: str, n_rounds: int) -> None:
    """Add the speedup by drafts and the share of accepted drafts to the report, for 1 and 8 requests."""
    model = load_model(path, progress=False)
    again = f"Repeat this code, with `rows` renamed to `lines`:\n\n{_CODE}\n\nHere is the code again:\n\n"
    book = [text[at : at + 2000] for at in range(4000, 4000 + 8 * 6000, 6000)]
    for name, prompts in (("a book goes on", book), ("code is said again", [again + "\n" * i for i in range(8)])):
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
