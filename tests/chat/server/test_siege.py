"""Clients get their answers while somebody holds connections half open, trickles bodies and sends large ones.

By default a short form runs, which only counts. `SIEGE_SECONDS=30` runs the long form, which measures how long others
wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions
from hybridmem.models import LanguageModel
from tests.chat import siege
from tests.chat.servers import MODEL, running, wait_until
from tests.chat.siege import exchange, post

SECONDS = float(os.environ.get("SIEGE_SECONDS", "0"))
N_HEADS, N_TRICKLING, N_LARGE, N_CLIENTS = (200, 64, 40, 4) if SECONDS else (20, 12, 4, 2)
MOST_SLOWER = 3.0
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "My cat is called Zoe."}], "temperature": 0}


async def ask(port: int, end: float, least: int) -> list[float]:
    """Send one client's requests one after the other. Check that all are answered rightly, and return their seconds."""
    seconds: list[float] = []
    while len(seconds) < least or time.monotonic() < end:
        started = time.perf_counter()
        status, body = await exchange(port, post(json.dumps(HELLO).encode()))
        seconds.append(time.perf_counter() - started)
        assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "Okay, noted."
    return seconds


def ask_all(port: int, seconds: float, least: int = 5) -> list[float]:
    async def ask_at_once() -> list[list[float]]:
        end = time.monotonic() + seconds
        return await asyncio.gather(*(ask(port, end, least) for _ in range(N_CLIENTS)))

    return [seconds for each in asyncio.run(ask_at_once()) for seconds in each]


@contextmanager
def siege_of(port: int, said: Path) -> Iterator[Callable[[], Counter[str]]]:
    """Start a process that besieges a server. Return a function that counts how large bodies were answered."""
    numbers = map(str, (port, N_HEADS, N_TRICKLING, N_LARGE))
    with said.open("w") as file, subprocess.Popen([sys.executable, siege.__file__, *numbers], stdout=file) as process:
        try:
            yield lambda: Counter(said.read_text().split())
        finally:
            process.kill()


def p99(seconds: list[float]) -> float:
    return statistics.quantiles(seconds, n=100)[98]


def test_a_siege(embedded: LanguageModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with running(embedded, tokenizer, ServerOptions(max_tokens=512, max_requests=16)) as server:
        ask_all(server.port, 0)
        before = ask_all(server.port, SECONDS)
        with siege_of(server.port, tmp_path / "statuses") as count:
            wait_until(lambda: len(server.server.connections) >= (N_HEADS + N_TRICKLING) * 0.8)
            during = ask_all(server.port, SECONDS)
            wait_until(lambda: count().total() >= N_LARGE)
            refused = count()
        server.settle()
        assert set(refused) <= {"400", "429"}
        if SECONDS:
            before += ask_all(server.port, SECONDS)
            numbers = {"p50": (statistics.median(before), statistics.median(during)), "p99": (p99(before), p99(during))}
            logging.info("%d and %d requests: %s; large ones: %s", len(before), len(during), numbers, dict(refused))
            assert p99(during) <= MOST_SLOWER * p99(before), numbers
