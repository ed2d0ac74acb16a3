"""On the page of a fleet, one replica answers one browser, and all replicas find what one has stored."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest

from hybridmem.chat.commands.fleet_options import FLEET
from hybridmem.chat.commands.option_table import Chosen
from hybridmem.chat.commands.serve_options import SERVE
from hybridmem.cluster.commands.serve import shared_sessions
from tests.ray.fleets import PATIENCE_SECONDS, replicas_of

JSON = {"Content-Type": "application/json", "Authorization": "Bearer a key"}
PINNED = "x-hybrid-memory-replica"


def ask(url: str, body: Any = None, **headers: str) -> tuple[Any, str]:
    """Return the answer, and the name of the replica that gave it."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, JSON | headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        found = re.search(r"replica=(\S+)", response.headers["x-hybrid-memory-route"])
        assert found is not None
        read = response.readline() if "event" in response.headers["content-type"] else response.read()
        return read, found[1]


@pytest.mark.parametrize("browser", ["one", "two", "three"])
def test_one_replica_answers_a_browser_and_all_find_what_it_has_stored(url: str, browser: str) -> None:
    of_browser = {"x-session-id": browser}
    body = {"model": "embedded", "input": "My cat is called Milo.", "store": True, "temperature": 0}
    made, replica = ask(f"{url}/v1/responses", body, **of_browser)
    session = json.loads(made)["hybrid_memory"]["session"]
    for path in ("/v1/sessions", f"/v1/sessions/{session}/tree", "/v1/memory", "/v1/models"):
        assert ask(url + path, **of_browser)[1] == replica
    for name in replicas_of(url):
        tree, answered = ask(f"{url}/v1/sessions/{session}/tree", **of_browser, **{PINNED: name})
        assert answered == name and len(json.loads(tree)["nodes"]) == 2
        event, answered = ask(f"{url}/v1/memory/events", **{PINNED: name})
        assert answered == name and json.loads(event.removeprefix(b"data: "))["object"] == "memory"
    page, _ = ask(f"{url}/")
    assert b"/page/app.js" in page and b"hybrid-memory.client" in ask(f"{url}/page/api.js")[0]


def test_a_fleet_without_a_folder_of_sessions_has_one_while_it_runs() -> None:
    rows = SERVE + FLEET
    chosen = Chosen(rows, {row.name: row.default for row in rows})
    with shared_sessions(chosen) as options:
        assert options["sessions"] is not None and options["prefix_bytes"] == "0"
    kept = Chosen(rows, {**chosen, "sessions": "kept"})
    with shared_sessions(kept) as options:
        assert (options["sessions"], options["prefix_bytes"]) == ("kept", None)
