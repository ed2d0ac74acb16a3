"""The tests use the store of sessions alone: what calls leave, what limits delete, and what a failed call changes."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest

from hybridmem.chat.stored import Node, SessionStore, StoredSession
from hybridmem.chat.stored.ancestors import Ancestors
from hybridmem.chat.stored.database import FILE, is_same_model
from hybridmem.chat.stored.items import make_nodes, text_item
from hybridmem.chat.stored.nodes import OWNER_BYTES, new_id, prefix_owner
from hybridmem.memory import FormatError

DAY = 86400.0


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("Jamba a float32:1 v", "Jamba my b float32:1 v", True),
        ("Jamba a float32:1 v", "Jamba a float32:2 v", False),
        ("Jamba a float32:1 v", "Jamba a float32:1 w", False),
        ("Jamba a None v", "Jamba b None v", False),
        ("Jamba a None v", "Jamba a None v", True),
        ("model", "model", True),
        ("model", "another", False),
    ],
)
def test_a_model_may_be_renamed_where_its_weights_are_known(one: str, other: str, is_same: bool) -> None:
    assert is_same_model(one, other) == is_same_model(other, one) == is_same


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


def reply_to(parent: Node, base: Node | None = None, n_kept: int = 0) -> Node:
    return Node(
        new_id("resp"), parent.session, parent.id, "assistant", [text_item("assistant", "yes")], about={"model": "m"},
        base=None if base is None else base.id, n_kept=n_kept, n_prompt=2, own_tokens=np.arange(3) + 10 * n_kept,
    )  # fmt: skip


def fill(store: SessionStore, owner: bytes, text: str, clock: Clock) -> tuple[StoredSession, list[Node]]:
    session = StoredSession(new_id("sess"), owner, used_at=clock.now)
    (question,) = make_nodes(session.id, None, [text_item("user", text)])
    first = reply_to(question)
    (more,) = make_nodes(session.id, first.id, [text_item("user", "more")])
    nodes = [question, first, more, reply_to(more, first, n_kept=2)]
    store.add_session(session, nodes)
    return session, nodes


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> SessionStore:
    return SessionStore(str(tmp_path), "model", now=clock)


def test_token_ids_are_joined_from_those_of_the_replies_before(store: SessionStore, clock: Clock) -> None:
    _, nodes = fill(store, b"a", "hello", clock)
    assert store.tokens(nodes[1].id).tolist() == [0, 1, 2]
    assert store.tokens(nodes[3].id).tolist() == [0, 1, 20, 21, 22]
    assert [node.id for node in store.path(nodes[3].id)] == [node.id for node in nodes]
    store.replace_items(nodes[0].id, [text_item("user", "another")])
    assert all(node.own_tokens is None and node.base is None for node in store.path(nodes[3].id))


def test_a_call_changes_all_or_nothing(store: SessionStore, clock: Clock) -> None:
    session, nodes = fill(store, b"a", "hello", clock)
    first, last = (make_nodes(session.id, nodes[3].id, [text_item("user", "x")])[0] for _ in range(2))
    with pytest.raises(Exception, match="UNIQUE"):
        store.add_nodes(session.id, [first, nodes[3], last], last.id)
    assert [node.id for node in store.tree(session.id)] == [node.id for node in nodes]
    store.delete_branch(nodes[1])
    assert not store.add_nodes(session.id, make_nodes(session.id, nodes[1].id, [text_item("user", "x")]), "turn_0")
    assert [node.id for node in store.tree(session.id)] == [nodes[0].id]


@pytest.mark.parametrize(
    ("change", "asks"),
    [
        ("items = '{}'", "tree"), ("items = '[\"5\"]'", "item"), ("items = 'x'", "path"), ("about = '[]'", "path"),
        ("n_kept = 'x'", "path"), ("own_tokens = x'01'", "tokens"), ("own_tokens = NULL", "tokens"),
        ("items = CAST(x'ff' AS TEXT)", "tree"),
    ],
)  # fmt: skip
def test_a_damaged_row_is_named(store: SessionStore, clock: Clock, tmp_path: Path, change: str, asks: str) -> None:
    session, nodes = fill(store, b"a", "hello", clock)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as database:
        database.execute(f"UPDATE nodes SET {change}")
    ask: dict[str, Callable[[], object]] = {
        "tree": lambda: store.tree(session.id), "path": lambda: store.path(nodes[3].id),
        "tokens": lambda: store.tokens(nodes[3].id), "item": lambda: store.item(b"a", "5"),
    }  # fmt: skip
    with pytest.raises(FormatError, match=r"damaged|not all stored"):
        ask[asks]()
    assert len(store.sessions(b"a", limit=5)) == 1
    with suppress(FormatError):
        store.sessions(b"a", "hello", limit=5)


def test_links_that_lead_in_a_circle_end(store: SessionStore, clock: Clock, tmp_path: Path) -> None:
    session, nodes = fill(store, b"a", "hello", clock)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as database:
        database.execute("UPDATE nodes SET parent = ?, base = ? WHERE number <= 2", [nodes[3].id, nodes[3].id])
    assert [node.id for node in store.path(nodes[3].id)] == [node.id for node in nodes[1:]]
    with pytest.raises(FormatError, match="not all stored"):
        store.tokens(nodes[3].id)
    assert len(store.delete_response(nodes[3])) in (0, 4)
    store.delete_session(session.id)
    assert store.sessions(b"a", limit=5) == []


def test_old_sessions_go_and_then_those_used_longest_ago_but_pinned_ones_stay(
    store: SessionStore, clock: Clock
) -> None:
    sessions = []
    for day in range(4):
        clock.now = 1e9 + day * DAY
        sessions.append(fill(store, b"a", "word " * 1000, clock))
    store.pin(sessions[0][1][0].id, clock.now + DAY)
    assert store.overdue(1e9 + 1.5 * DAY, None) == [sessions[1][0]]
    store.delete_session(sessions[1][0].id)
    assert store.overdue(0, store.n_bytes()) == []
    assert store.overdue(0, store.n_bytes() - 1) == [sessions[2][0]]
    store.delete_session(sessions[2][0].id)
    left = [counted.session.id for counted in store.sessions(b"a", limit=9)]
    assert left == [sessions[3][0].id, sessions[0][0].id] and store.sessions(b"b", limit=9) == []
    assert store.node(b"b", sessions[3][1][0].id) is None and store.session(b"b", left[0]) is None


def test_only_the_owner_of_a_file_reads_it_and_what_is_deleted_is_not_in_it_any_more(
    store: SessionStore, tmp_path: Path, clock: Clock
) -> None:
    session, _ = fill(store, b"a", "a secret that nobody may find", clock)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    store.delete_session(session.id)
    store.close()
    assert not any(b"a secret that nobody" in path.read_bytes() for path in tmp_path.iterdir())


@pytest.mark.parametrize("reach", [1, 3, 100], ids=["chain", "narrow", "wide"])
def test_what_is_above_a_node_is_found_as_by_lists_of_all_above_each(reach: int) -> None:
    draw, known, above = random.Random(reach), Ancestors(), dict[str, set[str]]()
    for i in range(100):
        parent = draw.choice([*above][-reach:]) if above else None
        known.add(str(i), parent)
        above[str(i)] = {str(i)} | (above[parent] if parent else set())
    for node, over in ((str(i), str(j)) for i in range(100) for j in range(100)):
        assert known.has(node, over=over) == (node in above[over])
    assert "99" in known and "100" not in known
    assert not known.has("100", over="99") and not known.has("0", over="100") and not known.has("0", over=None)


def test_another_owner_finds_no_session(store: SessionStore) -> None:
    """Clients with the same owner find its sessions, whichever prefixes a request shares."""
    owner, prefixes = b"o" * OWNER_BYTES, b"p" * OWNER_BYTES
    node = Node("turn_one", "sess_one", None, "user", [])
    store.add_session(StoredSession("sess_one", owner + prefixes), [node])
    for asking in (owner + prefixes, owner + b"q" * OWNER_BYTES):
        assert [counted.session.id for counted in store.sessions(asking, limit=9)] == ["sess_one"]
        assert store.session(asking, "sess_one") is not None and store.node(asking, "turn_one") is not None
    other = b"o" * (OWNER_BYTES - 1) + b"p" + prefixes
    assert store.sessions(other, limit=9) == [] and store.node(other, "turn_one") is None
    assert prefix_owner(owner + prefixes) == prefixes
