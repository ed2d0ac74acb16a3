"""Writes sessions and nodes as rows of the database, and reads them."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace
from typing import Any

import numpy as np

from hybridmem.chat.stored.nodes import Item, Node, StoredSession
from hybridmem.memory import FormatError
from hybridmem.memory.blocks import Int64s

_ROW_BYTES = 200
"""The bytes that a row takes beside its texts and tokens, with its entries in the indices."""
_SESSION = ("id", "owner", "title", "instructions", "metadata", "head", "is_implicit", "created_at", "used_at")
_NODE = (
    "id", "session", "parent", "role", "items", "status", "about", "base", "n_kept", "n_prompt", "n_tokens",
    "own_tokens", "created_at", "pinned_until", "n_bytes",
)  # fmt: skip
INSERT_SESSION = f"INSERT INTO sessions ({', '.join(_SESSION)}) VALUES ({', '.join(f':{name}' for name in _SESSION)})"
INSERT_NODE = f"INSERT INTO nodes ({', '.join(_NODE)}) VALUES ({', '.join(f':{name}' for name in _NODE)})"
_MADE = ("items", "status", "about", "base", "n_kept", "n_prompt", "n_tokens", "own_tokens", "n_bytes")
COMPLETE_NODE = (
    f"UPDATE nodes SET {', '.join(f'{name} = :{name}' for name in _MADE)} WHERE id = :id AND n_tokens < :n_tokens"
)
"""Replaces the beginning of a reply, stored when its client went away, by the whole reply."""


def session_as_row(session: StoredSession) -> dict[str, Any]:
    return {name: getattr(session, name) for name in _SESSION} | {"metadata": as_json(session.metadata)}


def read_session(row: sqlite3.Row) -> StoredSession:
    """Return the session of a row. Raises FormatError for a damaged one."""
    try:
        values = {name: row[name] for name in _SESSION}
        metadata, is_implicit = json.loads(row["metadata"]), bool(row["is_implicit"])
    except _DAMAGE as error:
        raise damaged(f"a session: {error}") from None
    if not isinstance(metadata, dict) or not all(isinstance(row[name], float) for name in ("created_at", "used_at")):
        raise damaged(f"the session {row['id']!r:.80}")
    return StoredSession(**values | {"metadata": metadata, "is_implicit": is_implicit})


def node_as_row(node: Node) -> dict[str, Any]:
    row = {name: getattr(node, name) for name in _NODE}
    row |= {"items": as_json(node.items), "about": as_json(node.about), "own_tokens": _as_blob(node.own_tokens)}
    row["n_bytes"] = (
        _ROW_BYTES + len(row["items"].encode()) + len(row["about"].encode()) + len(row["own_tokens"] or b"")
    )
    return row


def read_node(row: sqlite3.Row) -> Node:
    """Return the node of a row. Raises FormatError for a damaged one."""
    try:
        values, own = {name: row[name] for name in _NODE}, row["own_tokens"]
        tokens = None if own is None else _tokens_in(own)
        items, about = read_items(row["items"]), json.loads(row["about"])
    except _DAMAGE as error:
        raise damaged(f"a message: {error}") from None
    counts = ("n_kept", "n_prompt", "n_tokens", "n_bytes")
    if not isinstance(about, dict) or not all(isinstance(row[name], int) and row[name] >= 0 for name in counts):
        raise damaged(f"the message {row['id']!r:.80}")
    return Node(**values | {"items": items, "about": about, "own_tokens": tokens})


def read_items(text: str) -> list[Item]:
    """Return the items of a node from their JSON. Raises FormatError."""
    try:
        items = json.loads(text)
    except _DAMAGE as error:
        raise damaged(f"the items of a message: {error}") from None
    named = isinstance(items, list) and all(
        isinstance(item, dict) and isinstance(item.get("id"), str) for item in items
    )
    if not named:
        raise damaged("the items of a message")
    return list(items)


def damaged(what: str) -> FormatError:
    """Return the error of a database in which something cannot be read."""
    return FormatError(f"the database of sessions is damaged ({what}); restore a copy of it, or name another folder")


_WIDE = b"\xff\xff\xff\xff"
"""Begins token ids of 8 bytes each. As 4 bytes it would be -1, which is no token."""
_DAMAGE = (ValueError, TypeError, KeyError, IndexError, RecursionError)
"""The errors that reading a damaged row may raise."""


def without_tokens(node: Node) -> Node:
    """Return a node whose token ids are not known any more, because its history was changed."""
    return replace(node, base=None, n_kept=0, n_prompt=0, own_tokens=None)


def as_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _as_blob(tokens: Int64s | None) -> bytes | None:
    """Return token ids as bytes, 4 for each id.

    If there are ids of pictures, which need more, return `_WIDE` and 8 bytes for each id.
    """
    if tokens is None or tokens.max(initial=0) < 1 << 31:
        return None if tokens is None else tokens.astype("<i4").tobytes()
    return _WIDE + tokens.astype("<i8").tobytes()


def _tokens_in(blob: bytes) -> Int64s:
    if blob.startswith(_WIDE):
        return np.frombuffer(blob, "<i8", offset=len(_WIDE)).astype(np.int64)
    return np.frombuffer(blob, "<i4").astype(np.int64)
