"""Stored sessions survive a kill in the middle of traffic, and another server on the same folder."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from hybridmem.chat.cli import app
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions, make_app
from hybridmem.chat.stored.database import FILE, PREFIXES
from hybridmem.chat.stored.store import SessionStore
from hybridmem.memory import FormatError, HybridMemory, MismatchError
from hybridmem.models import LanguageModel
from tests.chat.servers import MODEL, running

CAT, ASK = "My cat is called Zoe.", "What is my cat called?"
N_CLIENTS = int(os.environ.get("TEST_KILLS_CLIENTS", "4"))
N_KILLS = int(os.environ.get("TEST_KILLS", "1"))
"""Servers that are killed one after the other, on one folder."""
BUSY_SECONDS = 600.0
N_TURNS = 3
"""Turns of each client that are acknowledged before the kill, at least."""


def client_of(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=BUSY_SECONDS)


def talk(url: str, key: str, said: list[Any], enough: threading.Barrier) -> None:
    """Talk until the server dies, and stream every other reply. `said` gets what was acknowledged."""
    previous = None
    with client_of(url, key) as client:
        try:
            for turn in range(1000):
                options: dict[str, Any] = {"model": MODEL, "temperature": 0, "previous_response_id": previous}
                text = CAT if turn == 0 else ASK
                if turn % 2:
                    with client.responses.stream(input=text, **options) as stream:
                        reply: Any = stream.get_final_response()
                else:
                    reply = client.responses.create(input=text, **options)
                said.append(reply)
                previous = reply.id
                if turn == N_TURNS:
                    enough.wait(BUSY_SECONDS)
        except Exception:  # The server is gone, and clients report that in different ways.
            pass


def inspect(folder: Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["inspect", str(folder), "--json"])
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.stdout))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Any]]]:
    """Return the folder of a server that was killed while several clients talked, and what it had acknowledged."""
    folder, said = tmp_path_factory.mktemp("killed") / "sessions", dict[str, list[Any]]()
    for kill in range(N_KILLS):
        own: dict[str, list[Any]] = {f"client {kill}.{n}": [] for n in range(N_CLIENTS)}
        talk_and_kill(folder, own, wait_seconds=random.Random(kill).uniform(0, 3) if kill else 0)
        said |= own
        if N_KILLS > 1:
            assert inspect(folder)["facts"]["faults"] == []
    return folder, said


def talk_and_kill(folder: Path, said: dict[str, list[Any]], wait_seconds: float) -> None:
    """Start a server, talk to it, and kill it some time after each client has had its turns."""
    command = [
        sys.executable,
        "-c",
        "from hybridmem.chat.cli import app; app()",
        "serve",
        "--port",
        "0",
        "--budget",
        "32MiB",
    ]
    command += ["--sessions", str(folder), "--save-every", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if " answers at " in line)
            url = re.search(r"http://127\.0\.0\.1:\d+/v1", line)
            assert url is not None
            enough = threading.Barrier(N_CLIENTS + 1)
            threads = [threading.Thread(target=talk, args=(url[0], key, own, enough)) for key, own in said.items()]
            for thread in threads:
                thread.start()
            enough.wait(BUSY_SECONDS)
            time.sleep(wait_seconds)
            process.send_signal(signal.SIGKILL)
            for thread in threads:
                thread.join(BUSY_SECONDS)
        finally:
            process.kill()
    assert all(len(own) > N_TURNS for own in said.values())


def test_after_a_kill_all_that_was_acknowledged_is_there_and_nothing_is_half(
    killed: tuple[Path, dict[str, list[Any]]], embedded: LanguageModel, tokenizer: Tokenizer, tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    folder, said = tmp_path / "sessions", killed[1]
    shutil.copytree(killed[0], folder)
    found = inspect(folder)
    assert found["is_verified"] and found["facts"]["faults"] == [] and found["kind"] == "server's sessions"
    n_said, n_clients = sum(map(len, said.values())), len(said)
    record_property("acknowledged", n_said)
    record_property("stored", found["facts"]["replies"])
    assert n_said <= found["facts"]["replies"] <= n_said + n_clients and found["facts"]["sessions"] == n_clients
    assert found["facts"]["replies"] == found["facts"]["replies with token ids"]
    with running(embedded, tokenizer, ServerOptions(sessions=str(folder))) as server:
        for key, own in said.items():
            with client_of(f"{server.url}/v1", key) as client:
                for reply in own:
                    kept = client.responses.retrieve(reply.id)
                    assert (kept.output_text, kept.status, kept.usage) == (reply.output_text, "completed", reply.usage)
                again = client.responses.create(model=MODEL, input=ASK, previous_response_id=own[0].id, temperature=0)
                assert (again.output_text, again.usage.input_tokens) == (  # type: ignore[union-attr]
                    own[1].output_text, own[1].usage.input_tokens
                )  # fmt: skip
        server.settle()


def test_checkpoints_that_were_saved_are_read_again_and_pinned(
    embedded: LanguageModel, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    options, saved = ServerOptions(sessions=str(tmp_path)), tmp_path / PREFIXES
    with (
        running(embedded, tokenizer, options) as server,
        client_of(f"{server.url}/v1", "a") as client,
    ):
        told = client.responses.create(model=MODEL, input=CAT, temperature=0)
        asked = client.responses.create(model=MODEL, input=ASK, previous_response_id=told.id, temperature=0)
        session = told.hybrid_memory["session"]  # type: ignore[attr-defined]
        client.post(f"/sessions/{session}/nodes/{told.id}/pin", body={}, cast_to=object)
        server.settle()
        with server.engine.lock:
            server.prefixes.save(saved)
    facts = inspect(tmp_path)["facts"]
    assert (facts["replies with a saved checkpoint"], facts["pinned"], facts["faults"]) == (2, 1, [])
    with (
        running(embedded, tokenizer, options, saved=saved) as server,
        client_of(f"{server.url}/v1", "a") as client,
    ):
        nodes: Any = client.get(f"/sessions/{session}/tree", cast_to=object)
        assert [(n["cost"]["from"], n["pinned"]) for n in nodes["nodes"]] == [
            ("disk", False), ("disk", True), ("disk", False), ("disk", False),
        ]  # fmt: skip
        again = client.responses.create(model=MODEL, input=CAT, previous_response_id=asked.id, temperature=0)
        assert again.usage is not None and asked.usage is not None
        assert again.usage.input_tokens_details.cached_tokens == asked.usage.total_tokens - 1
        assert server.prefixes.stats().n_returned == 1


def test_a_database_of_something_else_is_refused(tmp_path: Path, embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    engine = Engine(embedded, HybridMemory(embedded.memory_spec, "16MiB"), tokenizer)
    options = ServerOptions(sessions=str(tmp_path))
    make_app(engine, tokenizer, MODEL, options).state.sessions.close()
    for statement, error in (
        ("UPDATE meta SET value = 'another'", MismatchError), ("PRAGMA user_version = 99", FormatError),
    ):  # fmt: skip
        with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as database:
            database.execute(statement)
        with pytest.raises(error, match=r"another|version 99"):
            make_app(engine, tokenizer, MODEL, options)
    (tmp_path / FILE).write_bytes(b"no database" * 1000)
    with pytest.raises(FormatError, match="no database"):
        make_app(engine, tokenizer, MODEL, options)


def test_servers_that_start_at_once_make_one_database(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as threads:
        stores = list(threads.map(lambda _: SessionStore(str(tmp_path), "model"), range(8)))
    assert [store.sessions(b"", limit=1) for store in stores] == [[]] * 8
    for store in stores:
        store.close()


def test_a_server_that_starts_waits_for_one_that_makes_the_database(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        with ThreadPoolExecutor(1) as thread:
            store = thread.submit(SessionStore, str(tmp_path), "model")
            time.sleep(0.2)
            other.execute("COMMIT")
            store.result().close()


def test_inspect_finds_what_contradicts_itself(killed: tuple[Path, dict[str, list[Any]]], tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    shutil.copytree(killed[0], folder)
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as database:
        database.execute("UPDATE nodes SET n_prompt = 10000 WHERE number = 2")
        database.execute("UPDATE sessions SET head = 'resp_0' WHERE rowid = 1")
    found = inspect(folder)
    assert not found["is_verified"] and len(found["facts"]["faults"]) == 2
    assert "token ids" in found["facts"]["faults"][0] and "is not there" in found["facts"]["faults"][1]
    (folder / FILE).write_bytes(b"no database" * 1000)
    result = CliRunner().invoke(app, ["inspect", str(folder)])
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1 and "no database" in result.stderr
