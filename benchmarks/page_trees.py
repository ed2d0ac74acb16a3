"""Measures a conversation of thousands of messages in the page: reading it, and the page's script that draws it."""

from __future__ import annotations

import json
import random
import statistics
import time
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.harness import Report


def archive(n_nodes: int) -> dict[str, Any]:
    """Return an exported conversation that was often edited: half of the messages are not on the current path."""
    draw, nodes = random.Random(0), list[dict[str, Any]]()
    replies: list[str | None] = [None]
    path = 0
    for i in range(n_nodes // 2):
        at = path if i % 2 == 0 else draw.randrange(len(replies))
        for role, name, parent in (("user", f"turn_{i}", replies[at]), ("assistant", f"resp_{i}", f"turn_{i}")):
            item = {"type": "message", "role": role, "content": f"{role} says number {i}"}
            nodes.append({"id": name, "parent": parent, "role": role, "items": [item]})
        replies.append(f"resp_{i}")
        path = len(replies) - 1 if i % 2 == 0 else path
    about = {"format": "hybrid-memory.session", "version": 1, "model": "embedded", "title": "Large"}
    return about | {"head": replies[path], "nodes": nodes}


def tree(report: Report, url: str, browser: Any, *, n_nodes: int, n_rounds: int) -> None:
    """Measure importing and reading the tree, and the page's script when one moves in the tree or scrolls it."""
    body = json.dumps(archive(n_nodes)).encode()
    request = Request(f"{url}/v1/sessions/import", body, {"Content-Type": "application/json"})
    made, import_ms = _timed(lambda: json.load(urlopen(request)))
    read_ms = [_timed(lambda: urlopen(f"{url}/v1/sessions/{made['id']}/tree").read())[1] for _ in range(n_rounds)]
    shown = browser.new_context(viewport={"width": 1360, "height": 860}).new_page()
    shown.goto(f"{url}/#{made['id']}")
    shown.wait_for_selector("#tree .head")
    session = shown.context.new_cdp_session(shown)
    session.send("Performance.enable")

    def busy_ms() -> float:
        found = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
        return 1e3 * float(sum(found[name] for name in ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration")))

    scrolled, moved = list[float](), list[float]()
    two_frames = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    for i in range(n_rounds):
        before = busy_ms()
        shown.evaluate(f"document.querySelector('#tree-panel').scrollTop = {(i + 1) * n_nodes * 30 // n_rounds}")
        shown.evaluate(two_frames)
        scrolled.append(busy_ms() - before)
        chosen = shown.locator("#tree [role=treeitem]:not(.head)").nth(6)
        name, before = chosen.get_attribute("data-node"), busy_ms()
        chosen.dispatch_event("click")
        shown.wait_for_selector(f"#tree .head[data-node='{name}']")
        shown.evaluate(two_frames)
        moved.append(busy_ms() - before)
    report.add("a conversation of many messages, ms", {
        "messages": n_nodes, "import": import_ms, "the tree from the server": statistics.median(read_ms),
        "script, layout and style to scroll": statistics.median(scrolled), "slowest": max(scrolled),
        "to go to another message": statistics.median(moved), "elements drawn": shown.locator("#tree *").count(),
    })  # fmt: skip
    shown.context.close()


def _timed(run: Any) -> tuple[Any, float]:
    started = time.perf_counter()
    result = run()
    return result, (time.perf_counter() - started) * 1e3
