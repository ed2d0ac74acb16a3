"""Measures the server under load: throughput, and the time to the first token, beside an earlier commit of this tree.

Servers of both commits run at the same time, each in a process of its own, and get requests in turns, so that other
work of the machine slows both. A second server of the earlier commit shows how far ratios differ from 1 by chance.
"""

from __future__ import annotations

import io
import random
import statistics
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Report
from benchmarks.http_load import Load, ask
from benchmarks.servers import running
from hybridmem.chat.prompts import load_tokenizer
from hybridmem.models import EMBEDDED

LOADS = (1, 8, 32, 64, 128)
BEFORE = "369f9fc"
"""The commit before structured output, tools, stored responses and the rest of what the server is today."""
_ROOT = Path(__file__).parent.parent
_ROUND_SECONDS = 5.0
_N_PROMPT, _N_REPLY = 96, 24
_TABLE = "chat completions, streamed"
_OPTIONS = ("--max-requests", "256")
_NOTES = [
    f"The embedded model, servers with their defaults; prompts of {_N_PROMPT} random tokens, greedy replies of up to "
    f"{_N_REPLY}. Throughput: tokens of replies a second, medians of the rounds' ratios. First token: p99 of all "
    "requests of all rounds, and medians of the rounds' ratios. before again: another server of the earlier tree. "
    "/metrics: read by a process that does nothing else. stolen: the share of processor time that the host of this "
    "machine gave to others.",
]


@dataclass
class Served:
    """Holds a running server and the measurements of its replies."""

    url: str
    loads: list[Load] = field(default_factory=list)

    @property
    def first_tokens(self) -> list[float]:
        return [seconds for load in self.loads for seconds in load.first_token_seconds]


def serving(
    *, quick: bool = False, before: str = BEFORE, loads: Sequence[int] = LOADS, rounds: int | None = None,
    out: Path | None = None,
) -> Report:  # fmt: skip
    """Measure servers of this version and of an earlier commit. Rows of other loads in the report in `out` are kept.

    Raises RuntimeError if a server does not start or does not answer.
    """
    rounds = rounds or (2 if quick else 7)
    report = Report("serving", notes=[f"before: commit {before}.", *_NOTES])
    with ExitStack() as stack:
        tree = stack.enter_context(_tree_of(before))
        servers = {
            name: Served(stack.enter_context(running(_OPTIONS, tree=folder)))
            for name, folder in (("now", _ROOT), ("before", tree), ("before again", tree))
        }
        for n_at_once in loads:
            _measure(servers, n_at_once, rounds)
            report.add(_TABLE, _row(servers, n_at_once))
    report.keep(out, "at once")
    return report


def _measure(servers: dict[str, Served], n_at_once: int, rounds: int) -> None:
    bodies, rng = _Bodies(n_at_once), random.Random(n_at_once)
    n_requests = max(2, 2 * n_at_once)
    for server in servers.values():  # These requests warm up kernels, buffers and connections.
        load = ask(server.url, bodies.draw(n_requests), n_at_once)
        server.loads.clear()
    n_requests = max(3 * n_at_once, int(n_requests * _ROUND_SECONDS / load.seconds))
    for _ in range(rounds):
        asked = bodies.draw(n_requests)
        for name in rng.sample(sorted(servers), len(servers)):
            servers[name].loads.append(ask(servers[name].url, asked, n_at_once))


def _row(servers: dict[str, Served], n_at_once: int) -> dict[str, Any]:
    before, row = servers["before"], dict[str, Any]({"at once": n_at_once})
    row["requests"] = len(before.first_tokens)
    for name in ("now", "before"):
        loads = servers[name].loads
        row[f"tokens/s {name}"] = statistics.median(load.tokens_per_second for load in loads)
    for name in ("now", "before again"):
        pairs = list(zip(servers[name].loads, before.loads, strict=True))
        row[f"throughput, {name}"] = statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs)
    for name in ("now", "before"):
        row[f"first token p99 {name}, ms"] = 1e3 * _p99(servers[name].first_tokens)
    for name in ("now", "before again"):
        pairs = list(zip(servers[name].loads, before.loads, strict=True))
        row[f"p99, {name}"] = statistics.median(
            _p99(a.first_token_seconds) / _p99(b.first_token_seconds) for a, b in pairs
        )
    for name in ("now", "before"):
        probes = [seconds for load in servers[name].loads for seconds in load.metrics.seconds]
        row[f"/metrics median {name}, ms"] = 1e3 * statistics.median(probes)
        row[f"/metrics p99 {name}, ms"] = 1e3 * _p99(probes)
    row["stolen, %"] = 100 * statistics.fmean(load.metrics.stolen for load in servers["now"].loads)
    row["p50, now"] = statistics.median(servers["now"].first_tokens) / statistics.median(before.first_tokens)
    return row


def _p99(seconds: list[float]) -> float:
    return sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))]


class _Bodies:
    """Draws random chats that no server has seen before."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._tokenizer = load_tokenizer(EMBEDDED)
        self._ids = [i for i in range(len(self._tokenizer)) if i not in self._tokenizer.added_tokens_decoder]

    def draw(self, n: int) -> list[dict[str, object]]:
        return [
            {
                "model": "embedded", "temperature": 0, "max_tokens": _N_REPLY,
                "messages": [{"role": "user", "content": self._text()}],
            }
            for _ in range(n)
        ]  # fmt: skip

    def _text(self) -> str:
        return str(self._tokenizer.decode(self._rng.choices(self._ids, k=_N_PROMPT)))


@contextmanager
def _tree_of(commit: str) -> Iterator[Path]:
    """Write a commit of this repository into a temporary folder, which is removed after the `with` block."""
    command = ["git", "archive", "--format=tar", commit, "hybridmem", "chat", "memory", "models"]
    archive = subprocess.run(command, cwd=_ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder)
