"""Stores sessions and their nodes. All of the server's calls to the database are made here.

A call makes all of its changes or none, and they are on the disk when it returns. One thread at a time may call. A
store in another place, which servers share, needs only these methods.

A call that finds damage raises FormatError. If the disk refuses, it raises SQLite's OperationalError. Links point from
later rows to earlier ones. So a damaged link may point to no row, but links never form a cycle.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybridmem.chat.stored.database import open_database
from hybridmem.chat.stored.items import text_of
from hybridmem.chat.stored.nodes import OWNER_BYTES, Item, Node, StoredSession, join_tokens
from hybridmem.chat.stored.rows import (
    COMPLETE_NODE,
    INSERT_NODE,
    INSERT_SESSION,
    as_json,
    damaged,
    node_as_row,
    read_items,
    read_node,
    read_session,
    session_as_row,
)
from hybridmem.memory import FormatError
from hybridmem.memory.blocks import Int64s

_UP = """
WITH RECURSIVE up (id, next, number) AS (
    SELECT id, {link}, number FROM nodes WHERE id = ?
    UNION ALL SELECT nodes.id, nodes.{link}, nodes.number FROM nodes JOIN up ON nodes.id = up.next
    WHERE nodes.number < up.number
)
SELECT nodes.* FROM up JOIN nodes ON nodes.id = up.id ORDER BY up.number
"""
_ABOVE = """
SELECT above.* FROM nodes JOIN nodes AS above ON above.id = nodes.parent AND above.number < nodes.number
WHERE nodes.id = ?
"""
_DOWN = """
WITH RECURSIVE down (id) AS (
    SELECT ? UNION SELECT nodes.id FROM nodes JOIN down ON nodes.parent = down.id
)
"""
_ESCAPE = "ESCAPE '\\'"
_SAID = (
    f"EXISTS (SELECT 1 FROM nodes AS said WHERE said.session = sessions.id AND visible(said.items) LIKE ? {_ESCAPE})"
)
_COUNTS = """
SELECT sessions.*, COUNT(nodes.n_bytes) AS n_nodes, COALESCE(SUM(nodes.n_bytes), 0) AS n_bytes,
    COUNT(nodes.pinned_until) AS n_pinned
FROM sessions LEFT JOIN nodes ON nodes.session = sessions.id WHERE {where}
GROUP BY sessions.id ORDER BY sessions.used_at DESC, sessions.id DESC
"""


_OWNED = "sessions.owner BETWEEN ? AND ?"
"""The sessions of an owner, whichever prefixes they use."""


def _range(owner: bytes) -> tuple[bytes, bytes]:
    """Return the first and the last value of the column `owner` that belong to one owner of sessions."""
    begin = owner[:OWNER_BYTES]
    return begin, begin + b"\xff" * (OWNER_BYTES + 1)


@dataclass(frozen=True)
class Counted:
    """Says how much a session has stored. `n_bytes` counts its texts and token ids, but not checkpoints."""

    session: StoredSession
    n_nodes: int
    n_bytes: int
    n_pinned: int


class SessionStore:
    """Holds the sessions of all owners.

    Args:
        folder: the folder of the database. None: it is in host memory and ends with the process.
        model: a signature that identifies the model and its tokenizer, or a function that returns it. For a large
            vocabulary it takes a third of a second, and a database in host memory needs it only for archives.
        now: returns the time in unix seconds.
    Raises:
        FormatError, MismatchError: as `open_database`.
    """

    def __init__(
        self, folder: str | None, model: str | Callable[[], str], *, now: Callable[[], float] = time.time
    ) -> None:
        self.folder = folder
        self._model = model
        self.now = now
        self._database = open_database(folder, "" if folder is None else self.model)
        self._database.create_function("visible", 1, _visible, deterministic=True)

    @cached_property
    def model(self) -> str:
        return self._model if isinstance(self._model, str) else self._model()

    def close(self) -> None:
        """Close the database. What was stored in a folder stays there."""
        self._database.close()

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Commit the changes of the block, or none of them if it raises."""
        with _finding_damage():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
                self._database.execute("COMMIT")
            except BaseException:
                # After some errors, such as a full disk, SQLite has rolled back by itself.
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with _finding_damage():
            return self._database.execute(query, values).fetchall()

    # The methods below are about sessions.

    def session(self, owner: bytes, session_id: str) -> StoredSession | None:
        """Return a session of this owner, or None."""
        rows = self._rows(f"SELECT * FROM sessions WHERE id = ? AND {_OWNED}", session_id, *_range(owner))
        return read_session(rows[0]) if rows else None

    def sessions(self, owner: bytes, search: str = "", *, limit: int, after: str | None = None) -> list[Counted]:
        """Return an owner's sessions and how much they have stored.

        The most recently used come first. A list may begin after a named session.
        """
        pattern = "%" + search.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
        where, values = _OWNED, list[Any](_range(owner))
        if search:
            where += f" AND (sessions.title LIKE ? {_ESCAPE} OR {_SAID})"
            values += [pattern, pattern]
        if after is not None:
            where += (
                f" AND (sessions.used_at, sessions.id) < (SELECT used_at, id FROM sessions WHERE id = ? AND {_OWNED})"
            )
            values += [after, *_range(owner)]
        return [_counted(row) for row in self._rows(_COUNTS.format(where=where) + "LIMIT ?", *values, limit)]

    def count(self, session_id: str) -> Counted:
        """Return a session, which must exist, and how much it has stored."""
        (row,) = self._rows(_COUNTS.format(where="sessions.id = ?"), session_id)
        return _counted(row)

    def add_session(self, session: StoredSession, nodes: list[Node]) -> None:
        """Add a session with its first nodes, each after its parent.

        If another server that answered the same request has stored its reply, which is the last node, only that reply
        is completed.
        """
        with self._changing() as database:
            if nodes and self._complete(nodes[-1]):
                return
            database.execute(INSERT_SESSION, session_as_row(session))
            database.executemany(INSERT_NODE, map(node_as_row, nodes))

    def change_session(self, session_id: str, **values: Any) -> None:
        """Set columns of a session: its title, instructions, metadata or head."""
        values = {name: as_json(value) if name == "metadata" else value for name, value in values.items()}
        names = ", ".join(f"{name} = ?" for name in values)
        with self._changing() as database:
            query = f"UPDATE sessions SET {names}, used_at = ? WHERE id = ?"
            database.execute(query, [*values.values(), self.now(), session_id])

    def delete_session(self, session_id: str) -> None:
        """Delete a session with all of its nodes."""
        with self._changing() as database:
            database.execute("DELETE FROM sessions WHERE id = ?", [session_id])

    # The methods below are about nodes.

    def node(self, owner: bytes, node_id: str) -> Node | None:
        """Return a node of this owner, or None."""
        query = f"SELECT nodes.* FROM nodes JOIN sessions ON sessions.id = session WHERE nodes.id = ? AND {_OWNED}"
        rows = self._rows(query, node_id, *_range(owner))
        return read_node(rows[0]) if rows else None

    def item(self, owner: bytes, item_id: str) -> Item | None:
        """Return an item of this owner, or None. Cost: it looks at the texts of all of the owner's items."""
        query = f"SELECT items FROM nodes JOIN sessions ON sessions.id = session WHERE {_OWNED} AND instr(items, ?)"
        for row in self._rows(query, *_range(owner), json.dumps(item_id)):
            for item in read_items(row["items"]):
                if item["id"] == item_id:
                    return dict(item)
        return None

    def tree(self, session_id: str) -> list[Node]:
        """Return all nodes of a session, each after its parent."""
        return [
            read_node(row) for row in self._rows("SELECT * FROM nodes WHERE session = ? ORDER BY number", session_id)
        ]

    def path(self, node_id: str | None) -> list[Node]:
        """Return the nodes from the first message of a session to this one."""
        return [read_node(row) for row in self._rows(_UP.format(link="parent"), node_id)]

    def tokens(self, reply_id: str) -> Int64s:
        """Return the token ids of a reply, beginning with its prompt. The reply must have token ids."""
        return join_tokens([read_node(row) for row in self._rows(_UP.format(link="base"), reply_id)])

    def add_nodes(self, session_id: str, nodes: list[Node], head: str) -> bool:
        """Add nodes to a session, each after its parent. Return False if the session or the parent is gone by now.

        If another server that answered the same request has stored its reply, which is the last node, only that reply
        is completed.
        """
        with self._changing() as database:
            if self._complete(nodes[-1]):
                return True
            parent = nodes[0].parent
            is_there = bool(self._rows("SELECT 1 FROM sessions WHERE id = ?", session_id))
            if not is_there or (parent and not self._rows("SELECT 1 FROM nodes WHERE id = ?", parent)):
                return False
            database.executemany(INSERT_NODE, map(node_as_row, nodes))
            database.execute("UPDATE sessions SET head = ?, used_at = ? WHERE id = ?", [head, self.now(), session_id])
        return True

    def _complete(self, reply: Node) -> bool:
        """Replace the beginning of a reply by the whole reply. Return False if no beginning was stored."""
        is_there = bool(self._rows("SELECT 1 FROM nodes WHERE id = ? AND session = ?", reply.id, reply.session))
        if is_there:
            self._database.execute(COMPLETE_NODE, node_as_row(reply))
        return is_there

    def pin(self, node_id: str, until: float | None) -> None:
        """Store until when a node is pinned, in unix seconds. None: it is not pinned."""
        with self._changing() as database:
            database.execute("UPDATE nodes SET pinned_until = ? WHERE id = ?", [until, node_id])

    def pinned(self) -> list[tuple[bytes, Node]]:
        """Return all pinned nodes with their owners."""
        query = "SELECT nodes.*, owner FROM nodes JOIN sessions ON sessions.id = session WHERE pinned_until IS NOT NULL"
        return [(row["owner"], read_node(row)) for row in self._rows(query)]

    def replace_items(self, node_id: str, items: list[Item]) -> None:
        """Change a message in place.

        The token ids of all replies after it are forgotten, since they contain the old text.
        """
        with self._changing() as database:
            change = (
                "UPDATE nodes SET n_bytes = n_bytes - LENGTH(CAST(items AS BLOB)) + LENGTH(CAST(? AS BLOB)), items = ? "
                "WHERE id = ?"
            )
            database.execute(change, [as_json(items), as_json(items), node_id])
            forget = (
                "UPDATE nodes SET base = NULL, own_tokens = NULL, n_kept = 0, n_prompt = 0, pinned_until = NULL "
                "WHERE id IN down"
            )
            database.execute(_DOWN + forget, [node_id])

    # The methods below delete sessions and nodes.

    def delete_branch(self, node: Node) -> list[Node]:
        """Delete a node and all nodes after it, and return them.

        A session that a response created is deleted with its last node.
        """
        with self._changing() as database:
            gone = [
                read_node(row) for row in self._rows(_DOWN + "SELECT nodes.* FROM nodes JOIN down USING (id)", node.id)
            ]
            database.execute("DELETE FROM nodes WHERE id = ?", [node.id])
            self._prune(database, node.session, node.parent)
        return gone

    def delete_response(self, reply: Node) -> list[Node]:
        """Delete a reply, and its input if no other reply has it.

        If other messages follow the reply, it stays as their history only.
        """
        if self._rows("SELECT 1 FROM nodes WHERE parent = ?", reply.id):
            with self._changing() as database:
                database.execute("UPDATE nodes SET status = 'deleted', about = '{}' WHERE id = ?", [reply.id])
            return []
        first = reply
        while rows := self._rows(_ABOVE, first.id):
            above = read_node(rows[0])
            n_children = len(self._rows("SELECT 1 FROM nodes WHERE parent = ?", above.id))
            if n_children > 1 or (above.is_reply and above.status != "deleted"):
                break
            first = above
        return self.delete_branch(first)

    def _prune(self, database: sqlite3.Connection, session_id: str, parent: str | None) -> None:
        """Give a session another head if its head is gone.

        Delete a session that a response began and that has no nodes left.
        """
        query = "UPDATE sessions SET head = ? WHERE id = ? AND head NOT IN (SELECT id FROM nodes WHERE session = ?)"
        database.execute(query, [parent, session_id, session_id])
        query = "DELETE FROM sessions WHERE id = ? AND is_implicit AND id NOT IN (SELECT session FROM nodes)"
        database.execute(query, [session_id])

    def overdue(self, used_before: float, most_bytes: int | None) -> list[StoredSession]:
        """Return the sessions to delete.

        These are those not used since `used_before`, and then the least recently used ones, until the remaining
        sessions fit into `most_bytes`.

        Sessions with a pinned node stay.
        """
        n_bytes, found = self.n_bytes(), list[StoredSession]()
        (oldest,) = self._rows("SELECT MIN(used_at) FROM sessions")[0]
        if (oldest is None or oldest >= used_before) and (most_bytes is None or n_bytes <= most_bytes):
            return found
        for counted in map(_counted, reversed(self._rows(_COUNTS.format(where="1")))):
            is_old = counted.session.used_at < used_before
            if not counted.n_pinned and (is_old or (most_bytes is not None and n_bytes > most_bytes)):
                n_bytes -= counted.n_bytes
                found.append(counted.session)
        return found

    def n_bytes(self) -> int:
        """Return the bytes of all texts and token ids. Cost: it reads an index of all nodes."""
        return int(self._rows("SELECT COALESCE(SUM(n_bytes), 0) FROM nodes")[0][0])


@contextmanager
def _finding_damage() -> Iterator[None]:
    """Turn SQLite's errors about a damaged file into FormatError. Errors of the disk are raised as they are."""
    try:
        yield
    except sqlite3.OperationalError as error:
        # SQLite found a text that is not valid: it could not decode the text, or our SQL function `visible` failed.
        if "decode" in str(error) or "user-defined" in str(error):
            raise damaged(str(error)) from None
        raise
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise damaged(str(error)) from None


def _visible(items: str) -> str:
    """Return the text of a message that a search looks through. A damaged message has none."""
    try:
        return text_of(read_items(items))
    except (FormatError, KeyError, TypeError, AttributeError):
        return ""


def _counted(row: sqlite3.Row) -> Counted:
    return Counted(read_session(row), row["n_nodes"], row["n_bytes"], row["n_pinned"])
