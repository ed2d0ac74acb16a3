"""Saves a session as a folder: its messages as JSON, and its sequence as a file of the memory.

    session.json                 messages, options, the name of the other file, and a checksum over all of this
    memory-<number>.safetensors  what `HybridMemory.save` writes; none if nothing was computed yet

The JSON is written last and replaced in one go: a reader finds either the old session or the new one, never half of
each. Only their owner can read the files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from chat.decoding.sampling import Sampling
from chat.session.history import Utterance
from memory import FormatError, HybridMemory, Sequence, SpecError
from memory.storage.files import read_path
from memory.storage.local_files import remove_abandoned, written_whole

_FORMAT, _VERSION = "hybrid-memory chat", 1
SESSION_FILE = "session.json"
_MEMORY_FILE = re.compile(r"memory-[0-9a-f]{32}\.safetensors")


@dataclass(frozen=True)
class SavedSession:
    """Holds what is saved of a session beside its memory; see `ChatSession`."""

    messages: tuple[Utterance, ...]
    n_heard: int
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]


def write_session(folder: Path, saved: SavedSession, memory: HybridMemory, live: Sequence | None) -> None:
    """Write a session, whole or not at all. Raises OSError; SpecError: a dry run."""
    folder.mkdir(parents=True, exist_ok=True)
    name = None if live is None else f"memory-{uuid4().hex}.safetensors"
    try:
        with written_whole(folder / SESSION_FILE) as file:
            if live is not None and name is not None:
                memory.save(live, folder / name)
            about = {
                "format": _FORMAT,
                "version": _VERSION,
                "model": memory.spec.model,
                "memory": name,
                **asdict(saved),
            }
            file.write(json.dumps({**about, "sha256": _digest(about)}, indent=1).encode())
    except BaseException:
        if name is not None:
            (folder / name).unlink(missing_ok=True)
        raise
    _remove_others(folder)


def _remove_others(folder: Path) -> None:
    """Remove the files of sessions that were saved there before, and those of a process killed while saving.

    Files are listed before other writers are looked for, and the session is read last: what another process has just
    written stays.
    """
    found = [path for path in folder.iterdir() if _MEMORY_FILE.fullmatch(path.name)]
    if not remove_abandoned(folder, f"{re.escape(SESSION_FILE)}|{_MEMORY_FILE.pattern}"):
        kept = _memory_file_of(folder)
        for path in found:
            if path.name != kept:
                path.unlink(missing_ok=True)


def read_session(folder: Path, memory: HybridMemory) -> tuple[SavedSession, Callable[[], Sequence | None]]:
    """Read what was saved; returns it with a function that loads its memory.

    Raises FormatError; loading raises it as well, and CapacityError.
    """
    path = folder / SESSION_FILE
    about = read_about(path)
    try:
        messages = tuple(
            Utterance(str(m["role"]), str(m["content"]), tuple(map(int, m["token_ids"]))) for m in about["messages"]
        )
        ids = [i for m in messages for i in m.token_ids]
        if ids and not 0 <= min(ids) <= max(ids) < memory.spec.vocab_size:
            n_vocab = memory.spec.vocab_size
            raise FormatError(
                f"{path} has token ids {min(ids)} ... {max(ids)}, this model has {n_vocab}; resume it with its own"
            )
        name = about["memory"]
        options = (int(about["max_tokens"]), Sampling(**about["sampling"]), tuple(map(str, about["stop"])))
        saved = SavedSession(messages, int(about["n_heard"]), *options)
        if not (name is None or _MEMORY_FILE.fullmatch(name)) or not 0 <= saved.n_heard <= len(messages):
            raise ValueError(f"memory {name!r}, {saved.n_heard} messages heard")
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path} contradicts itself ({error!r}); save the session again") from error
    return saved, lambda: None if name is None else memory.load(folder / name)


def read_about(path: Path) -> dict[str, Any]:
    """Read the JSON of a saved session. Raises FormatError, also if its checksum is wrong."""
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path} cannot be read ({error}); give the folder of a saved session") from error
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise FormatError(f"{path} holds no saved session; give a folder that ChatSession.save wrote")
    if about.get("version") != _VERSION:
        raise FormatError(
            f"{path} has format version {about.get('version')!r}, this library reads {_VERSION}; use the one that "
            "wrote it"
        )
    if about.pop("sha256", None) != _digest(about):
        raise FormatError(f"{path} is damaged: its checksum is not that of its content; save the session again")
    return about


def _memory_file_of(folder: Path) -> str | None:
    """Return the memory file of the session that is saved there now."""
    try:
        name = read_about(folder / SESSION_FILE)["memory"]
    except (FormatError, KeyError):
        return None
    return name if isinstance(name, str) and _MEMORY_FILE.fullmatch(name) else None


def _digest(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def read_folder(folder: Any, error: type[SpecError | FormatError]) -> Path:
    """Return the folder of a saved session. Raises `error` if it cannot be one."""
    path = Path(read_path("folder", folder, "the folder of a saved session", error))
    if path.is_file():
        raise error(f"{path} is a file; give the folder of a saved session")
    return path
