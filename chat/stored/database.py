"""Opens the database of stored sessions: its tables, their version, and what a crash may cost."""

from __future__ import annotations

import hashlib
import sqlite3
from contextlib import ExitStack
from pathlib import Path

from hybridmem.chat.prompts import Tokenizer
from hybridmem.memory import FormatError, MemorySpec, MismatchError

FILE = "sessions.sqlite"
PREFIXES = "prefixes"
"""The folder beside the database with the checkpoints of a server's last save."""
_UNKNOWN = str(None)
"""Weights in a signature, of a model that says nothing of them."""
VERSION = 1
"""Of the tables; a database with a higher one was written by a later release."""

_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, owner BLOB NOT NULL, title TEXT NOT NULL, instructions TEXT, metadata TEXT NOT NULL,
    head TEXT, is_implicit INTEGER NOT NULL, created_at REAL NOT NULL, used_at REAL NOT NULL
);
CREATE INDEX sessions_of_owner ON sessions (owner, used_at);
CREATE INDEX sessions_by_use ON sessions (used_at);
CREATE TABLE nodes (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    session TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    parent TEXT REFERENCES nodes (id) ON DELETE CASCADE,
    role TEXT NOT NULL, items TEXT NOT NULL, status TEXT NOT NULL, about TEXT NOT NULL,
    base TEXT REFERENCES nodes (id), n_kept INTEGER NOT NULL, n_prompt INTEGER NOT NULL, n_tokens INTEGER NOT NULL,
    own_tokens BLOB, created_at REAL NOT NULL, pinned_until REAL, n_bytes INTEGER NOT NULL
);
CREATE INDEX nodes_of_session ON nodes (session, number);
CREATE INDEX nodes_counted ON nodes (session, n_bytes, pinned_until);
CREATE INDEX nodes_of_parent ON nodes (parent);
CREATE INDEX nodes_of_base ON nodes (base);
CREATE INDEX nodes_pinned ON nodes (pinned_until) WHERE pinned_until IS NOT NULL;
"""


def open_database(folder: str | None, model: str) -> sqlite3.Connection:
    """Open the database in a folder, or one in host memory; make it if there is none.

    A transaction that was committed survives the end of the process and of the machine; one that was not leaves
    nothing. What is deleted is overwritten with zeros.

    Args:
        model: tells the model and its tokenizer from others: token ids mean nothing to another one.
    Raises:
        FormatError: no database, a damaged one, one of a later release, or a folder that cannot be written.
        MismatchError: one of another model.
    """
    place = ":memory:" if folder is None else str(Path(folder) / FILE)
    with ExitStack() as opened:
        try:
            if folder is not None:
                Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
                Path(place).touch(mode=0o600)  # texts of others; the log beside it gets the same mode
            # One thread at a time uses it, but not always the same one.
            connection = sqlite3.connect(place, isolation_level=None, check_same_thread=False, timeout=10)
            opened.callback(connection.close)
            connection.row_factory = sqlite3.Row
            for setting in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON", "secure_delete = ON"):
                connection.execute(f"PRAGMA {setting}")
            _prepare(connection, place, model)
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            message = f"{place} is no database of sessions that can be used ({error}); name another folder"
            raise FormatError(message) from None
        opened.pop_all()
        return connection


def _prepare(connection: sqlite3.Connection, place: str, model: str) -> None:
    # One transaction: a process that is killed in it leaves no tables, and one that starts beside it waits for them.
    connection.execute("BEGIN IMMEDIATE")
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > VERSION:
        raise FormatError(f"{place} has version {version}; this release reads up to {VERSION}: install a later one")
    if version == 0:
        for statement in _TABLES.split(";")[:-1]:
            connection.execute(statement)
        connection.execute("INSERT INTO meta VALUES ('model', ?)", (model,))
        connection.execute(f"PRAGMA user_version = {VERSION}")
    connection.execute("COMMIT")
    row = connection.execute("SELECT value FROM meta WHERE name = 'model'").fetchone()
    known = row[0] if row is not None else None
    if not isinstance(known, str):
        raise FormatError(f"{place} is damaged: it does not say of which model it is; restore a copy of it")
    if not is_same_model(known, model):
        raise MismatchError(f"{place} is of another model or tokenizer ({known}, not {model}); name another folder")


def is_same_model(signature: str, other: str) -> bool:
    """True if two signatures are of one model and tokenizer. Where the weights are known, a model may be renamed."""
    known = signature.rsplit(" ", 2)[1:]
    return signature == other or (len(known) == 2 and known[0] != _UNKNOWN and known == other.rsplit(" ", 2)[1:])


def model_signature(spec: MemorySpec, tokenizer: Tokenizer) -> str:
    """Return what tells a model and its tokenizer from others: its name, its weights and its vocabulary."""
    vocabulary = hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode(errors="surrogatepass"))
    return f"{spec.model} {str(spec.weights)[:16]} {vocabulary.hexdigest()[:16]}"
