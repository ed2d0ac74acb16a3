"""Opens the database of stored sessions, makes its tables, and checks their version."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from contextlib import ExitStack
from pathlib import Path

from hybridmem.chat.prompts import Tokenizer
from hybridmem.memory import FormatError, MemorySpec, MismatchError

FILE = "sessions.sqlite"
PREFIXES = "prefixes"
"""The folder beside the database that holds the checkpoints of a server's last save."""
_UNKNOWN = str(None)
"""Stands for the weights in a signature, if the model does not identify them."""
VERSION = 1
"""The version of the tables. A later release writes a higher one."""
_LONGEST_WAIT_SECONDS = 10.0
"""For so long a server that starts waits while others write to its database."""

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
    """Open the database in a folder, or in host memory. Make it if there is none.

    A committed transaction survives a crash of the process or the machine. One that was not committed leaves no
    changes. Deleted data is overwritten with zeros.

    Args:
        model: a signature that identifies the model and its tokenizer. Another model could not use the token ids.
    Raises:
        FormatError: the file is not a database, is damaged, or comes from a later release; or the folder cannot be
            written.
        MismatchError: the database belongs to another model.
    """
    place = ":memory:" if folder is None else str(Path(folder) / FILE)
    with ExitStack() as opened:
        try:
            if folder is not None:
                Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
                # Only the owner of the file may read the users' texts. SQLite's log file gets the same mode.
                Path(place).touch(mode=0o600)
            # One thread at a time uses the database, but not always the same one.
            connection = sqlite3.connect(
                place, isolation_level=None, check_same_thread=False, timeout=_LONGEST_WAIT_SECONDS
            )
            opened.callback(connection.close)
            connection.row_factory = sqlite3.Row
            _use_write_ahead_log(connection)
            for setting in ("synchronous = FULL", "foreign_keys = ON", "secure_delete = ON"):
                connection.execute(f"PRAGMA {setting}")
            _prepare(connection, place, model)
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            message = f"{place} is no database of sessions that can be used ({error}); name another folder"
            raise FormatError(message) from None
        opened.pop_all()
        return connection


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switch to SQLite's write-ahead log. While another process writes, SQLite raises at once here, so this waits."""
    until = time.monotonic() + _LONGEST_WAIT_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _prepare(connection: sqlite3.Connection, place: str, model: str) -> None:
    # All tables are made in one transaction. A process that is killed in it leaves no tables, and a process that starts
    # at the same time waits for them.
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
    """Return whether two signatures belong to one model and tokenizer.

    If the weights are known, the model may be renamed.
    """
    known = signature.rsplit(" ", 2)[1:]
    return signature == other or (len(known) == 2 and known[0] != _UNKNOWN and known == other.rsplit(" ", 2)[1:])


def model_signature(spec: MemorySpec, tokenizer: Tokenizer) -> str:
    """Return a text that identifies a model and its tokenizer, by its name, its weights and its vocabulary."""
    tokens = tokenizer.get_vocab()
    names = dict(zip(tokens.values(), tokens, strict=True))
    if len(names) == len(tokens):  # Integers are sorted faster than the names for which they stand.
        numbers = sorted(names)
        ordered = list(map(names.__getitem__, numbers))
    else:
        numbers, ordered = sorted(tokens.values()), sorted(tokens, key=tokens.__getitem__)
    ids = ",".join(map(str, numbers))
    vocabulary = hashlib.sha256("\0".join([*ordered, ids]).encode(errors="surrogatepass"))
    return f"{spec.model} {str(spec.weights)[:16]} {vocabulary.hexdigest()[:16]}"
