"""The server tells a page about the running memory only while somebody listens. It also serves the page's files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions
from hybridmem.chat.server.page_files import read_files
from hybridmem.memory import HybridMemory
from hybridmem.memory.pictures.cells import MOST_RANGES, SEVERAL, arena_of
from hybridmem.models import LanguageModel
from tests.chat.servers import Running, running, wait_until


@pytest.fixture(scope="module")
def server(embedded: LanguageModel, tokenizer: Tokenizer) -> Iterator[Running]:
    with running(embedded, tokenizer, ServerOptions(api_key="secret")) as server:
        yield server


def in_use(arena: dict[str, Any]) -> float:
    sizes = np.array(arena["ends"]) - np.array(arena["starts"])
    return float(sizes @ np.array(arena["used_percent"]) / 100)


def test_a_snapshot_says_what_usage_says(server: Running) -> None:
    assert server.chat().status == 200
    wait_until(lambda: server.engine.is_idle)
    usage = server.memory.usage()
    chosen = next(iter(usage.by_sequence))
    shown = server.call("GET", f"/v1/memory?sequence={chosen}").json
    assert shown["bytes"]["used"] == usage.used_bytes == sum(kind["total"] for kind in shown["kinds"])
    assert in_use(shown["arena"]) == usage.used_bytes
    rows = [dict(zip(shown["sequences"]["columns"], row, strict=True)) for row in shown["sequences"]["rows"]]
    assert {row["id"]: (row["n_tokens"], row["body"] + row["tail"] + row["head"]) for row in rows} == {
        id: (one.n_tokens, one.total_bytes) for id, one in usage.by_sequence.items()
    }
    assert shown["last_request"]["hybrid_memory"]["computed_tokens"] == shown["last_request"]["prompt_tokens"]
    layers = shown["sequence"]["layers"]
    assert sum(part["n_bytes"] for layer in layers for part in layer["parts"]) == usage.by_sequence[chosen].total_bytes
    assert [layer["layer"] for layer in layers] == list(range(len(server.memory.spec.layers)))


def test_a_sequence_that_is_not_there_is_said(server: Running) -> None:
    assert server.call("GET", "/v1/memory?sequence=99999").error["code"] == "sequence_not_found"
    assert server.call("GET", "/v1/memory?sequence=x").error["param"] == "sequence"


def test_nothing_is_counted_while_nobody_listens(server: Running) -> None:
    view = server.service.memory_view
    connection = server.connect()
    connection.request("GET", "/v1/memory/events", headers=server.headers)
    response = connection.getresponse()
    first = json.loads(response.readline().decode().removeprefix("data: "))
    server.chat("My dog is called Rex.")
    lines = iter(response.readline, b"")  # Reading a line fails if nothing comes for as long as a test waits.
    events = (json.loads(line[6:]) for line in lines if line.startswith(b"data: "))
    assert any(event["engine"]["n_steps"] > first["engine"]["n_steps"] for event in events)
    response.close()
    connection.close()
    wait_until(lambda: view.n_listeners == 0)
    counted = view.n_snapshots
    assert server.chat("My bird is called Kit.").status == 200
    assert view.n_snapshots == counted


def test_an_arena_of_many_ranges_is_drawn_in_cells(embedded: LanguageModel) -> None:
    """The cells have the bytes of all ranges.

    A cell has an owner only if one sequence has all of it.
    """
    memory = HybridMemory(embedded.memory_spec, "4GiB", device="meta")
    sequences = [memory.open() for _ in range(3 * MOST_RANGES)]
    memory.run(None, {sequence: [1] * 20 for sequence in sequences}, max_tokens=10**6)
    inventory = memory.counters.inventory().frozen()
    used = memory.counters.used_bytes
    for sequence in sequences[::2]:
        memory.close(sequence)  # Frozen data stays as it is.
    arena = arena_of(inventory)
    assert not arena["is_exact"] and len(arena["starts"]) <= MOST_RANGES + 2
    assert in_use(arena) == pytest.approx(used, rel=0.01) and SEVERAL in arena["owners"]


def test_the_page_opens_without_a_key_and_runs_nothing_but_its_own(server: Running) -> None:
    server_headers = {"Authorization": ""}
    page = server.call("GET", "/", headers=server_headers)
    policy = page.headers["Content-Security-Policy"]
    assert page.status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
    for name, (content, tag) in read_files().items():
        file = server.call("GET", f"/page/{name}", headers=server_headers)
        assert (file.status, file.body, file.headers["Content-Security-Policy"]) == (200, content, policy)
        assert server.call("GET", f"/page/{name}", headers={"If-None-Match": tag}).status == 304
    assert server.call("GET", "/page/..%2fapp.py", headers=server_headers).status == 404
    assert server.call("GET", "/v1/memory", headers=server_headers).status == 401


def test_the_page_weighs_little_and_names_no_other_place() -> None:
    files = read_files()
    assert sum(len(content) for content, _ in files.values()) <= 250 << 10
    code = b"".join(content for name, (content, _) in files.items() if name.endswith((".html", ".css", ".js")))
    assert b"innerHTML" not in code and b" style=" not in files["index.html"][0] and b'src="http' not in code


def test_the_page_of_the_server_itself_may_send(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    with running(embedded, tokenizer) as server:
        own, other = {"Origin": server.url}, {"Origin": "http://127.0.0.1:1"}
        assert server.call("GET", "/v1/models", headers=own).status == 200
        assert server.call("GET", "/v1/models", headers=other).error["code"] == "origin_not_allowed"
