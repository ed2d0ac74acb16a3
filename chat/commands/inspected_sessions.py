"""Describes the stored sessions of a server, and checks its database against itself and against the files."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridmem.chat.commands.inspected_trees import Branch
from hybridmem.chat.stored.database import FILE, VERSION
from hybridmem.chat.stored.items import text_of
from hybridmem.chat.stored.nodes import Node, join_tokens, prefix_owner
from hybridmem.chat.stored.rows import read_node
from hybridmem.memory import FormatError
from hybridmem.memory.blocks import Int64s

_MOST_BRANCHES = 200
_MOST_FAULTS = 20


@dataclass(frozen=True)
class Sessions:
    """Holds the contents of a database of sessions.

    Attributes:
        faults: the contradictions in the database, in words. A whole database has none.
    """

    facts: dict[str, Any]
    by_kind: dict[str, int]
    tree: tuple[Branch, ...]
    faults: list[str]


def read_sessions(folder: Path, checkpoints: dict[str, Any] | None) -> Sessions:
    """Read the database of a folder, which a server may be using.

    Args:
        checkpoints: the list of saved checkpoints. None: there is no such list.
    Raises:
        FormatError: the file is not a database of sessions, or it is too damaged to be read.
    """
    path = folder / FILE
    try:
        # If there is no log, no server writes to the database. SQLite then needs no files beside it to read it.
        is_quiet = not (folder / f"{FILE}-wal").exists()
        uri = f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if is_quiet else ''}"
        with closing(sqlite3.connect(uri, uri=True)) as database:
            database.row_factory = sqlite3.Row
            version = int(database.execute("PRAGMA user_version").fetchone()[0])
            if version > VERSION:
                raise FormatError(f"{path} has version {version}; this release reads up to {VERSION}")
            faults = [row[0] for row in database.execute("PRAGMA integrity_check") if row[0] != "ok"]
            faults += [f"{row[0]} {row[1]} refers to nothing" for row in database.execute("PRAGMA foreign_key_check")]
            (model,) = database.execute("SELECT value FROM meta WHERE name = 'model'").fetchone()
            sessions = database.execute("SELECT id, owner, title, head FROM sessions ORDER BY used_at DESC").fetchall()
            nodes = [read_node(row) for row in database.execute("SELECT * FROM nodes ORDER BY number")]
    except (sqlite3.Error, ValueError, TypeError, KeyError) as error:
        raise FormatError(f"{path} is no database of sessions that can be read ({error})") from error
    faults += _find_faults(nodes, {row["id"]: row["head"] for row in sessions})
    owners, replies = {row["id"]: row["owner"] for row in sessions}, [node for node in nodes if node.is_reply]
    facts = {
        "format": f"hybrid-memory sessions, version {version}", "model": model, "sessions": len(sessions),
        "owners": len({*owners.values()}), "messages": len(nodes), "replies": len(replies),
        "replies with token ids": sum(reply.own_tokens is not None for reply in replies),
        "replies with a saved checkpoint": _count_saved(nodes, owners, checkpoints),
        "pinned": sum(node.pinned_until is not None for node in nodes), "faults": faults[:_MOST_FAULTS],
    }  # fmt: skip
    by_kind = {FILE: sum(file.stat().st_size for file in folder.glob(f"{FILE}*"))}
    return Sessions(facts, by_kind, _branches(sessions, nodes), faults)


def _find_faults(nodes: list[Node], heads: dict[str, str | None]) -> list[str]:
    """Return all contradictions: a parent, a base or a head that does not exist, and impossible token ids."""
    known, faults = dict[str, Node](), list[str]()
    for node in nodes:
        parent, base = known.get(node.parent or ""), known.get(node.base or "")
        is_first = node.parent is None and node.session in heads
        if not is_first and (parent is None or parent.session != node.session):
            faults.append(f"{node.id} stands behind a message that is not there")
        if node.is_reply and node.status != "deleted" and not node.about:
            faults.append(f"{node.id} is a reply without its response")
        n_base = 0 if base is None or base.own_tokens is None else base.n_kept + len(base.own_tokens)
        n_own = node.n_kept + (0 if node.own_tokens is None else len(node.own_tokens))
        if (node.base is not None and base is None) or node.n_kept > n_base or node.n_prompt > n_own:
            faults.append(f"{node.id} has token ids that go on from nothing")
        known[node.id] = node
    lost = [session for session, head in heads.items() if head is not None and head not in known]
    return faults + [f"the current message of {session} is not there" for session in lost]


def _count_saved(nodes: list[Node], owners: dict[str, bytes], checkpoints: dict[str, Any] | None) -> int:
    """Count the replies at whose end a checkpoint was saved.

    Such a checkpoint lacks the last token of the reply, which was never fed.
    """
    if checkpoints is None:
        return 0
    saved = set(_keys_of(checkpoints))
    by_id, n_saved = {node.id: node for node in nodes}, 0
    for node in nodes:
        if node.own_tokens is None or node.session not in owners:
            continue
        chain = [node]
        while chain[-1].base is not None and chain[-1].base in by_id:
            chain.append(by_id[chain[-1].base])
        tokens = join_tokens(chain[::-1])
        n_saved += any(
            _key(prefix_owner(owners[node.session]), tokens[:n]) in saved for n in (len(tokens), len(tokens) - 1)
        )
    return n_saved


def _keys_of(checkpoints: dict[str, Any]) -> Iterable[bytes]:
    tokens, at, paths = checkpoints["tokens"], 0, list[Int64s]()
    for entry in checkpoints["entries"]:
        parent, n_tokens = int(entry["parent"]), int(entry["n_tokens"])
        before = paths[parent] if parent >= 0 else tokens[:0]
        n_new = n_tokens - len(before)
        paths.append(np.concatenate([before, tokens[at : at + n_new]]))
        at += n_new
        kind, owner = entry["label"]
        yield _key(bytes.fromhex(owner) if kind == "bytes" else repr(owner).encode(), paths[-1])


def _key(owner: bytes, tokens: Int64s) -> bytes:
    return hashlib.sha256(owner + tokens.astype("<i8").tobytes()).digest()


def _branches(sessions: list[sqlite3.Row], nodes: list[Node]) -> tuple[Branch, ...]:
    """Describe the most recently used sessions, with the messages of each."""
    found, depths = list[Branch](), dict[str, int]()
    of_session: dict[str, list[Node]] = {row["id"]: [] for row in sessions}
    for node in nodes:
        of_session.get(node.session, []).append(node)
    for row in sessions:
        own = of_session[row["id"]]
        found.append(Branch(f"{row['id']} {row['title']:.60}", 0, None, sum(node.n_bytes for node in own)))
        for node in own:
            depths[node.id] = depths.get(node.parent or "", 0) + 1
            what = json.dumps(text_of(node.items), ensure_ascii=False)
            found.append(Branch(f"{node.role} {what:.60}", depths[node.id], node.n_tokens, node.n_bytes))
        if len(found) > _MOST_BRANCHES:
            break
    return tuple(found[:_MOST_BRANCHES])
