"""Measures the web page: its bytes, first paint, what the memory view costs a server, and ten thousand sequences."""

from __future__ import annotations

import gzip
import json
import os
import statistics
import threading
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness import Report
from benchmarks.page_trees import tree
from benchmarks.page_watching import slow_down
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.engine.scheduling import Load
from hybridmem.chat.engine.stats import EngineStats
from hybridmem.chat.prompts import load_tokenizer
from hybridmem.chat.server import ServerOptions, bind, make_app
from hybridmem.chat.server.listening import Server, url_of
from hybridmem.chat.server.memory_view.snapshot import snapshot
from hybridmem.chat.server.page_files import read_files
from hybridmem.memory import HybridMemory
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import EMBEDDED, load_model

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
_ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()


def require_browser() -> None:
    """Exit with a message if Playwright or a browser is missing."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        raise typer.BadParameter("this needs Playwright; install it with: pip install 'hybridmem[browser]'") from None
    if not Path(CHROMIUM).exists():
        raise typer.BadParameter(f"there is no browser at {CHROMIUM}: apt-get install chromium, or set CHROMIUM")


def page(*, quick: bool) -> Report:
    """Measure everything about the page. The targets are 250 KB, 300 ms, 2 %, 50 ms and 16 ms."""
    report = Report("page")
    _weigh(report)
    with _serving() as (url, engine):
        for n_replies, n_rounds in ((1, 4),) if quick else ((1, 72), (8, 40)):
            slow_down(report, url, engine, n_replies=n_replies, n_rounds=n_rounds)
    with _serving() as (url, _), _browsing() as browser:
        _paint(report, url, browser, n_loads=5 if quick else 15)
        tree(report, url, browser, n_nodes=4096, n_rounds=5 if quick else 15)
        _many(report, url, browser, n_rounds=5 if quick else 21)
    return report


@contextmanager
def _browsing() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=_ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def _serving() -> Iterator[tuple[str, Engine]]:
    """Run a server of the embedded model in a thread inside a `with` block, after a first reply has warmed it up."""
    model, tokenizer = load_model("embedded", progress=False), load_tokenizer(EMBEDDED)
    memory = HybridMemory(model.memory_spec, "256MiB")
    engine = Engine(model, memory, tokenizer, prefixes=PrefixCache(memory))
    engine.submit([0], max_tokens=2)
    engine.run()
    app = make_app(engine, tokenizer, "embedded", ServerOptions(grace_seconds=0.2))
    with bind("127.0.0.1", 0, has_key=False) as listener:
        server = Server(app)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            while not app.state.service.is_open:
                time.sleep(0.01)
            yield url_of(listener), engine
        finally:
            server.should_exit = True
            thread.join()


def _weigh(report: Report) -> None:
    files = {name: content for name, (content, _) in read_files().items()}
    report.add("weight of the page", {
        "files": len(files), "KB": sum(map(len, files.values())) / 1e3,
        "of it marked, KB": len(files["marked.js"]) / 1e3,
        "KB if compressed": sum(len(gzip.compress(content)) for content in files.values()) / 1e3, "asked, KB": 250,
    })  # fmt: skip


def _paint(report: Report, url: str, browser: Any, *, n_loads: int) -> None:
    """Measure from the navigation to the first contentful paint, each time in a new profile with nothing cached."""
    first_ms, ready_ms = [], []
    for _ in range(n_loads + 1):
        context = browser.new_context(viewport={"width": 1360, "height": 860})
        shown = context.new_page()
        started = time.perf_counter()
        shown.goto(url)
        shown.wait_for_selector("#model:not([hidden])")
        ready_ms.append((time.perf_counter() - started) * 1e3)
        paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        shown.wait_for_function(f"() => {paint}")
        first_ms.append(float(shown.evaluate(paint)))
        context.close()
    report.add("first paint from a local server, ms", {
        "median": statistics.median(first_ms[1:]), "slowest": max(first_ms[1:]),
        "usable, median": statistics.median(ready_ms[1:]), "loads": n_loads, "asked": 300,
    })  # fmt: skip


def large_snapshots(n_sequences: int, n_rounds: int = 1) -> tuple[list[dict[str, Any]], list[dict[str, float]]]:
    """Return snapshots of a dry run with `n_sequences` sequences, half of them checkpoints, and the time of each.

    Between two snapshots, a hundred sequences are fed one token each.
    """
    spec = load_model("embedded", progress=False).memory_spec
    memory = HybridMemory(spec, "64GiB", device="meta", rollback_window=32)
    sequences = [memory.open() for _ in range(n_sequences // 2)]
    memory.run(None, {s: [1] * (20 + i % 380) for i, s in enumerate(sequences)}, max_tokens=10**7)
    kept = [memory.checkpoint(sequence) for sequence in sequences]
    engine: Any = types.SimpleNamespace(
        memory=memory, lock=threading.RLock(), stats=EngineStats(), load=Load(64, len(kept), 0)
    )
    snapshots, costs = list[dict[str, Any]](), list[dict[str, float]]()
    for _ in range(n_rounds):
        memory.run(None, {s: [1] for s in sequences[::50]})
        started = time.thread_time()
        snapshots.append(snapshot(engine, "embedded", "newest"))
        costs.append({**snapshots[-1]["cost"], "processor": time.thread_time() - started})
    return snapshots, costs


def _many(report: Report, url: str, browser: Any, *, n_rounds: int) -> None:
    snapshots, costs = large_snapshots(10_000, n_rounds)
    body = "".join(f"data: {json.dumps(one, separators=(',', ':'))}\n\n" for one in snapshots)
    shown = browser.new_context(viewport={"width": 1360, "height": 860}).new_page()
    shown.add_init_script(
        "window.took = []; document.addEventListener('memory', (event) => took.push(event.detail.took));"
    )
    events = "**/v1/memory/events*"
    shown.route(events, lambda route: route.fulfill(content_type="text/event-stream", body=body))
    shown.goto(url)
    shown.wait_for_function(f"() => took.length >= {n_rounds}")
    took = shown.evaluate("took").copy()[1:n_rounds]
    shown.context.close()
    report.add("a refresh with 10,000 sequences and checkpoints, ms", {
        "on the server": statistics.median(cost["seconds"] for cost in costs) * 1e3,
        "of it the processor's": statistics.median(cost["processor"] for cost in costs) * 1e3,
        "of it steps wait": statistics.median(cost["held_seconds"] for cost in costs) * 1e3, "asked on the server": 50,
        "script in the page": statistics.median(took), "slowest in the page": max(took), "asked in the page": 16,
        "KB sent": len(body) / 1e3 / n_rounds, "rounds": n_rounds,
    })  # fmt: skip
