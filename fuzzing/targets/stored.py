"""Reads damaged files of servers: databases of sessions, leases, recorded replies, options, traces of simulations."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np

from fuzzing.mutation import EDGES, damage_bytes, damage_json
from hybridmem.chat.commands.option_table import read_file
from hybridmem.chat.commands.serve_options import SERVE
from hybridmem.chat.sampling.defaults import read_defaults
from hybridmem.chat.simulation.traces import read_trace
from hybridmem.chat.stored.database import FILE
from hybridmem.chat.stored.items import text_item
from hybridmem.chat.stored.nodes import Node, StoredSession
from hybridmem.chat.stored.store import SessionStore
from hybridmem.cluster.serving.idempotency import Idempotency, name_of
from hybridmem.cluster.serving.request import ForwardedRequest
from hybridmem.cluster.store.leases import Leases, Stand
from hybridmem.cluster.store.place import Place

_OWNER, _MODEL = b"owner", "model weights vocabulary"


class SessionDatabase:
    """Opens databases with damaged bytes or damaged values in rows, and makes the server's queries."""

    def __init__(self, folder: Path) -> None:
        self._seed, self._place = folder / "seed", folder / "sessions"
        store = SessionStore(str(self._seed), _MODEL, now=lambda: 5.0)
        first = Node("msg_1", "sess_1", None, "user", [text_item("user", "a")], n_tokens=2, created_at=1.0)
        tokens = np.arange(6)
        reply = Node("resp_1", "sess_1", "msg_1", "assistant", [text_item("assistant", "b")], about={"model": "m"},
            n_prompt=4, n_tokens=4, own_tokens=tokens, created_at=2.0)  # fmt: skip
        more = Node("msg_2", "sess_1", "resp_1", "user", [text_item("user", "c")], n_tokens=2, created_at=3.0)
        last = Node("resp_2", "sess_1", "msg_2", "assistant", [text_item("assistant", "d")], base="resp_1", n_kept=6,
            n_prompt=8, n_tokens=4, own_tokens=tokens[:4], created_at=4.0)  # fmt: skip
        session = StoredSession("sess_1", _OWNER, "t", metadata={"a": "b"}, head="resp_2", created_at=1.0, used_at=4.0)
        store.add_session(session, [first, reply, more, last])
        store.pin("resp_2", 1e9)
        store.close()
        self._bytes = (self._seed / FILE).read_bytes()
        with closing(sqlite3.connect(self._seed / FILE)) as database:
            self._columns = [
                (table, str(row[1])) for table in ("sessions", "nodes", "meta")
                for row in database.execute(f"PRAGMA table_info({table})")
            ]  # fmt: skip

    def draw(self, random: Random) -> bytes:
        if random.random() < 0.4:
            return b"bytes\n" + damage_bytes(self._bytes, random)
        changes = [
            (*random.choice(self._columns), random.randrange(4), _value(random))
            for _ in range(random.choice((1, 1, 3)))
        ]
        return b"rows\n" + json.dumps(changes).encode()

    def read(self, data: bytes) -> None:
        kind, _, content = data.partition(b"\n")
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir()
        path = self._place / FILE
        path.write_bytes(content if kind == b"bytes" else self._bytes)
        if kind == b"rows":
            self._change(path, json.loads(content))
        store = SessionStore(str(self._place), _MODEL, now=lambda: 5.0)
        try:
            self._ask(store)
        except sqlite3.OperationalError:  # SQLite itself refuses, for example because the disk is full.
            pass
        finally:
            store.close()

    def _change(self, path: Path, changes: list[Any]) -> None:
        with closing(sqlite3.connect(path)) as database:
            for table, column, number, value in changes:
                query = f"UPDATE {table} SET {column} = ? WHERE rowid IN (SELECT rowid FROM {table} LIMIT 1 OFFSET ?)"
                if table == "meta":
                    query = f"UPDATE meta SET {column} = ?1 WHERE ?2 >= 0"
                try:
                    database.execute(query, (value, number))
                # SQLite cannot store such a value, so no file can contain it.
                except (sqlite3.IntegrityError, OverflowError):
                    continue
            database.commit()

    def _ask(self, store: SessionStore) -> None:
        for counted in store.sessions(_OWNER, "a", limit=5):
            store.count(counted.session.id)
        store.session(_OWNER, "sess_1")
        store.pinned()
        store.tree("sess_1")
        for name in ("resp_2", "resp_1"):
            store.path(name)
            store.item(_OWNER, "msg_1")
            if (node := store.node(_OWNER, name)) is not None and node.own_tokens is not None:
                store.tokens(name)
        after = Node("msg_3", "sess_1", "resp_2", "user", [text_item("user", "e")], created_at=5.0)
        store.add_nodes("sess_1", [after], "msg_3")
        store.replace_items("msg_1", [text_item("user", "f")])
        if (node := store.node(_OWNER, "resp_2")) is not None:
            store.delete_response(node)
        store.delete_session("sess_1")


def _value(random: Random) -> Any:
    """Draw a value for a column: an extreme number, another row's id, or JSON of a wrong shape."""
    kind = random.random()
    if kind < 0.3:
        return random.choice(("msg_1", "resp_1", "resp_2", "sess_1"))
    value = random.choice(EDGES)
    if kind < 0.6 or isinstance(value, list | dict):
        return json.dumps([{"id": value}] if random.random() < 0.5 else value)
    return value


class SharedFiles:
    """Reads damaged leases and recorded replies from a store that replicas share."""

    def __init__(self, folder: Path) -> None:
        self._place = Place(str(folder / "store"))
        leases = Leases(self._place, "fleet/one", 9.0, lambda: 5.0)
        lease = leases.take("session")
        assert lease is not None, "nobody else has it"
        leases.release(lease, Stand("ab" * 32, 7))
        self._lease_name = f"sessions/se/session/{lease.number}.json"
        self._lease = json.loads(self._place.read(self._lease_name) or b"")
        self._request = ForwardedRequest("POST", "/v1/responses", b"", (), None, b"{}")
        name = name_of(self._request, "key")
        self._reply_name = f"replies/{name[:2]}/{name}.json"
        self._reply = {
            "request": sha256(self._request.body).hexdigest(), "status": 200,
            "headers": [["content-type", "application/json"]], "body": "e30=",
        }  # fmt: skip

    def draw(self, random: Random) -> bytes:
        name, seed = random.choice((("lease", self._lease), ("reply", self._reply)))
        if random.random() < 0.3:
            return name.encode() + b"\n" + damage_bytes(json.dumps(seed).encode(), random)
        return name.encode() + b"\n" + json.dumps(damage_json(seed, random)).encode()

    def read(self, data: bytes) -> None:
        name, _, content = data.partition(b"\n")
        if name == b"lease":
            self._place.write(self._lease_name, content)
            leases = Leases(self._place, "fleet/two", 9.0, lambda: 6.0)
            leases.look("session")
            if (lease := leases.take("session", ["one", "two"])) is not None:
                leases.release(lease)
                self._place.remove(f"sessions/se/session/{lease.number}.json")
            return
        self._place.write(self._reply_name, content)
        asyncio.run(self._replay())

    async def _replay(self) -> None:
        async def answer() -> AsyncIterator[list[Any]]:
            yield [{"type": "http.response.start", "status": 200, "headers": []}]

        async for messages in Idempotency(self._place).play(self._request, "key", answer):
            for message in messages:
                assert isinstance(message.get("status", 200), int), "ASGI wants a number"


_DEFAULTS = {
    "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0, "repetition_penalty": 1.1, "eos_token_id": [1, 2],
    "exponential_decay_length_penalty": [4, 1.5],
}  # fmt: skip
_TOML = b"""port = 8001
host = 'localhost'
api_key = ['a', 'b']
budget = '1GiB'
max_running = 4
"""
_TRACE = [
    {"at": 0.0, "user": "anna", "action": "arrive", "opening": [{"role": "system", "content": "Be brief."}]},
    {"at": 1.5, "user": "anna", "action": "say", "text": "My cat is called Milo.", "value": "Milo"},
    {"at": 4.0, "user": "anna", "action": "edit", "turn": 0, "text": "My cat is called Luna.", "value": "Luna"},
    {"at": 6.0, "user": "anna", "action": "branch", "into": "anna 2"},
]


class OptionFiles:
    """Reads damaged files of options: generation_config.json, server.toml, and traces of simulations."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def draw(self, random: Random) -> bytes:
        kind = random.random()
        if kind < 0.3:
            return b"toml\n" + damage_bytes(_TOML, random)
        name, seed = random.choice(((b"defaults", _DEFAULTS), (b"trace", _TRACE)))
        if kind < 0.5:
            text = "\n".join(map(json.dumps, seed)) if isinstance(seed, list) else json.dumps(seed)
            return name + b"\n" + damage_bytes(text.encode(), random)
        value = damage_json(seed, random)
        text = "\n".join(map(json.dumps, value)) if isinstance(value, list) else json.dumps(value)
        return name + b"\n" + text.encode()

    def read(self, data: bytes) -> None:
        name, _, content = data.partition(b"\n")
        if name == b"toml":
            path = self._folder / "server.toml"
            path.write_bytes(content)
            try:
                read_file(SERVE, path)
            except ValueError as error:  # The command line prints this error, with the name of the file and the remedy.
                assert str(path) in str(error)
        elif name == b"trace":
            path = self._folder / "trace.jsonl"
            path.write_bytes(content)
            read_trace(path)
        else:
            (self._folder / "generation_config.json").write_bytes(content)
            read_defaults(SimpleNamespace(name_or_path=str(self._folder)))
