"""Measures drafts by prompt lookup on a real model, which continues one text and repeats another."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Report, interleave
from benchmarks.real.programs import Server, our_server
from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.engine.engine import Engine
from hybridmem.memory import HybridMemory
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import LanguageModel, load_model

NOTE = (
    "Drafts by lookup: greedy replies of 160 tokens in turns with and without drafts. Prompts were computed before, as "
    "those of earlier turns are, so the time is that of the replies. Code is said again: the prompt holds two copies "
    "of the code, each with another name, and the beginning of a third."
)
_LOADS = (1, 8, 32)
_N_TOKENS = 160
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

    A model as small as these does not repeat the code when asked in words, or after one example. It does after two.
    """
    files = [f"# {of.lower()}.py\n\n{_CODE.replace('Table', of)}\n\n" for of in ("Table", "Board", name)]
    return "".join(files[:2]) + files[2][: files[2].index("        self.path")]


def compare(report: Report, path: Path, tokenizer: Any, text: str, n_rounds: int) -> None:
    """Add the speedup by drafts and the share of accepted drafts to the report, in the engine and over HTTP."""
    model, reproducible = load_model(path, progress=False), load_model(path, progress=False, reproducible=True)
    book = [text[at : at + 2000] for at in range(4000, 4000 + _LOADS[-1] * 4000, 4000)]
    with ExitStack() as stack:
        servers = {
            looks_up: stack.enter_context(our_server(path, "--speculation", drafts, n_threads=torch.get_num_threads()))
            for looks_up, drafts in ((False, "none"), (True, "prompt-lookup"))
        }
        for name, prompts in (("a book goes on", book), ("code is said again", [_again(name) for name in _COPIES])):
            ids = [tokenizer.encode(prompt) for prompt in prompts]
            plain, drafted = (_decode(engine, ids[:2]) for engine in _engines(reproducible).values())
            assert plain == drafted, "drafts have changed a reply"
            for load in (n for n in _LOADS if n <= len(prompts)):
                ratio, engine = _in_engine(model, ids[:load], n_rounds)
                report.add(f"drafts by lookup, {path.name}", {
                    "text": name, "requests": load, "time without / with": ratio,
                    "over HTTP": _over_http(servers, path.stem, prompts[:load], n_rounds),
                    "drafted a token": engine.stats.n_drafted / engine.stats.n_generated,
                    "right": engine.stats.n_accepted / engine.stats.n_drafted if engine.stats.n_drafted else 0.0,
                })  # fmt: skip


def _in_engine(model: LanguageModel, ids: list[list[int]], n_rounds: int) -> tuple[float, Engine]:
    """Return the time without drafts as a multiple of the time with them, and the engine with drafts."""
    engines = _engines(model)
    runs = {looks_up: partial(_decode, engine, ids) for looks_up, engine in engines.items()}
    return _ratio(runs, n_rounds), engines[True]


def _engines(model: LanguageModel) -> dict[bool, Engine]:
    """Return an engine without lookup, and one with it."""
    memories = {looks_up: HybridMemory(model.memory_spec, "1GiB", rollback_window=32) for looks_up in (False, True)}
    return {
        looks_up: Engine(
            model, memory, None, stop_ids=(), prefixes=PrefixCache(memory), speculation=Speculation(looks_up=looks_up)
        )
        for looks_up, memory in memories.items()
    }


def _decode(engine: Engine, ids: list[list[int]]) -> list[list[int]]:
    generations = [engine.submit(prompt, max_tokens=_N_TOKENS) for prompt in ids]
    engine.run()
    return [list(generation.token_ids) for generation in generations]


def _over_http(servers: dict[bool, Server], model: str, prompts: list[str], n_rounds: int) -> float:
    def complete(server: Server) -> None:
        def ask(prompt: str) -> None:
            server.post(
                "/v1/completions", model=model, prompt=prompt, max_tokens=_N_TOKENS, temperature=0, ignore_eos=True
            )  # fmt: skip

        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(ask, prompts))

    return _ratio({looks_up: partial(complete, server) for looks_up, server in servers.items()}, n_rounds)


def _ratio(runs: dict[bool, Callable[[], object]], n_rounds: int) -> float:
    """Return the median of the ratios of both runs' times, which take turns.

    Four rounds warm up: kernels are compiled and steps are recorded in them.
    """
    times = interleave({str(looks_up): run for looks_up, run in runs.items()}, n_rounds, n_warm_up=4)
    return statistics.median(
        without / with_drafts
        for without, with_drafts in zip(times["False"].seconds, times["True"].seconds, strict=True)
    )
