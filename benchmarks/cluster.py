"""Measures a fleet on a local Ray: how much each router reuses, what failures cost, and what moving a session takes."""

from __future__ import annotations

import os
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
import psutil

from benchmarks.fleet_users import Outcome, play, write_scripts
from benchmarks.harness import Report
from benchmarks.moving import move
from hybridmem.chat.commands.fleet_options import FLEET
from hybridmem.chat.commands.serve_options import SERVE
from hybridmem.cluster.commands.serve import fleet
from hybridmem.cluster.serving.fleet_options import FleetOptions

PARTS = ("move", "routers", "failures")
_AT_ONCE = 12


def cluster(*, quick: bool, parts: Collection[str] = PARTS, kept: Path | None = None) -> Report:
    """Measure three parts: replies with each router, a replica's failure during a run, and the move of a session.

    Args:
        kept: a folder with an earlier report. It gives the tables of the parts that are not measured now.
    """
    report = Report("cluster")
    n_users, n_turns = (12, 6) if quick else (60, 8)
    if "move" in parts:
        move(report, n_rounds=5 if quick else 61)
    if "routers" in parts:
        _compare_routers(report, n_users, n_turns)
    if "failures" in parts:
        _fail(report, 2 * n_users, n_turns)
    report.keep_tables(kept)
    return report


def _compare_routers(report: Report, n_users: int, n_turns: int) -> None:
    scripts, ideal = write_scripts(n_users, n_turns)
    for router in ("round-robin", "consistent-hash", "resumable"):
        outcome = Outcome()
        with _fleet(router=router, store=None) as url:
            play(url, scripts, outcome, _AT_ONCE)
        share = outcome.reused_tokens / outcome.prompt_tokens
        seconds = [1000 * second for second in outcome.first_seconds]
        report.add(f"{n_users} users x {n_turns} turns, 2 replicas, no store", {
            "router": router, "reused": share, "one memory reuses": ideal, "share of that": share / ideal,
            "wrong": outcome.wrong, "failed": outcome.failed, "first token p50, ms": statistics.median(seconds),
            "p99, ms": float(np.percentile(seconds, 99)),
        })  # fmt: skip


def _options(**given: object) -> FleetOptions:
    options = {"replicas": 2, "cpus": 0.5, "budget": "256MiB", "lease": 10.0, "grace": 5.0}
    return FleetOptions.of({row.name: row.default for row in SERVE + FLEET} | options | given)


class _fleet:
    """Runs a fleet inside a `with` block, which gets the fleet's address. `restart` replaces the fleet's replicas."""

    def __init__(self, **given: object) -> None:
        self.options = _options(**given)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            self.port = listener.getsockname()[1]
        self._running = fleet(self.options, "127.0.0.1", self.port)

    def __enter__(self) -> str:
        self._running.__enter__()
        return f"http://127.0.0.1:{self.port}"

    def __exit__(self, *error: object) -> None:
        self._running.__exit__(None, None, None)

    def restart(self) -> None:
        """Deploy the application anew: its replicas are replaced one after the other."""
        from ray import serve

        from hybridmem.cluster.serving.application import make_application

        serve.run(make_application(FleetOptions.of(self.options.values)), name="hybrid-memory", route_prefix="/")


def _fail(report: Report, n_users: int, n_turns: int) -> None:
    """While users send requests, kill replicas twice, let the store fail for ten seconds, and restart all replicas."""
    scripts, _ = write_scripts(n_users, n_turns, seed=1)
    n_requests = sum(map(len, scripts))
    outcome, in_flight = Outcome(), dict[str, int]()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        running = _fleet(store=str(store))
        with running as url:
            users = threading.Thread(target=play, args=(url, scripts, outcome, _AT_ONCE))
            users.start()
            steps: list[tuple[str, Callable[[], None]]] = [
                ("a replica killed", _kill_one), ("the store down for 10 s", lambda: _refuse(store, 10.0)),
                ("another replica killed", _kill_one), ("a rolling restart", running.restart),
            ]  # fmt: skip
            for i, (name, step) in enumerate(steps):
                while users.is_alive() and len(outcome.first_seconds) < (i + 1) * n_requests // 6:
                    time.sleep(0.05)
                before = outcome.failed
                in_flight[name] = outcome.in_flight
                step()
                _settle(outcome, users)
                report.add("failures, in order", {
                    "what": name, "requests in flight": in_flight[name], "tries failed": outcome.failed - before,
                    "answered by then": len(outcome.first_seconds),
                })  # fmt: skip
            users.join()
    report.add("failures, in all", {
        "requests": n_requests, "wrong": outcome.wrong, "lost": outcome.lost, "tries failed": outcome.failed,
        "in flight at these moments": sum(in_flight.values()), "fetched from the store": outcome.moved,
    })  # fmt: skip


def _settle(outcome: Outcome, users: threading.Thread) -> None:
    """Wait until no attempt at a request has failed for three seconds, or until all users are done."""
    answered, failed, since = len(outcome.first_seconds), outcome.failed, time.monotonic()
    while users.is_alive() and (time.monotonic() - since < 3.0 or len(outcome.first_seconds) < answered + _AT_ONCE):
        if outcome.failed != failed:
            failed, since = outcome.failed, time.monotonic()
        time.sleep(0.1)


def _kill_one() -> None:
    found = psutil.Process().children(recursive=True)
    name = "ServeReplica:hybrid-memory:replica"
    replicas = [process for process in found if name in " ".join(process.cmdline())]
    os.kill(replicas[0].pid, signal.SIGKILL)


def _refuse(store: Path, seconds: float) -> None:
    away = store.with_name("away")
    store.rename(away)
    store.write_text("no folder")
    time.sleep(seconds)
    store.unlink()
    away.rename(store)
