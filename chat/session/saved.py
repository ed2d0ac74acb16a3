"""Saves a session and its branches to a folder: the messages as JSON, and the sequences as one file of the memory.

    session.json                 messages, options, the name of the other file, and a checksum over all of this
    memory-<number>.safetensors  what `HybridMemory.save` writes, what branches share once; none if nothing was computed
    drafts-<number>.safetensors  what a drafter remembers of the same texts; none if it remembers nothing

The JSON is written last and replaced in one go, so a reader finds either the old session or the new one, never half of
each. Only the user who owns the files can read them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from operator import index
from pathlib import Path
from typing import Any
from uuid import uuid4

from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.session.history import Utterance
from hybridmem.memory import CapacityError, FormatError, HybridMemory, Sequence, SpecError
from hybridmem.memory.storage import read_path, remove_abandoned, written_whole

_FORMAT, _VERSION = "hybridmem chat", 1
SESSION_FILE, DRAFTS = "session.json", "drafts"
_MEMORY_FILE = re.compile(r"(memory|drafts)-[0-9a-f]{32}\.safetensors")


@dataclass(frozen=True)
class SavedSession:
    """Holds what is saved of a session, except its memory; see `ChatSession`.

    Attributes:
        parent: the number of the session from which it branched, among those saved together.
        pictures: the pictures in the form that `Album.load` reads. The first session has those of all sessions that are
            saved together.
    """

    messages: tuple[Utterance, ...]
    n_heard: int
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    parent: int | None = None
    pictures: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Remembered:
    """Holds the sequences and checkpoints of saved sessions.

    Attributes:
        lives: the live sequence of each session, in the order of the sessions. None: nothing was computed, or the file
            is damaged.
        checkpoints: the checkpoints along the sessions' messages.
    """

    lives: list[Sequence | None]
    checkpoints: list[Sequence]


def write_sessions(
    folder: Path, sessions: list[SavedSession], memory: HybridMemory, own: Remembered,
    save_drafts: Callable[[Path], bool],
) -> None:  # fmt: skip
    """Write a session and its branches, whole or not at all. Raises OSError, or SpecError in a dry run.

    Args:
        save_drafts: writes what a drafter remembers of the sequences to a file, and returns False if there is nothing.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    first = next((i for i, live in enumerate(own.lives) if live is not None), None)
    number = uuid4().hex
    name = None if first is None else f"memory-{number}.safetensors"
    drafts: str | None = f"drafts-{number}.safetensors"
    try:
        with written_whole(folder / SESSION_FILE) as file:
            if first is not None and name is not None:
                _save_memory(memory, folder / name, first, own)
            drafts = drafts if drafts is not None and save_drafts(folder / drafts) else None
            about = {
                "format": _FORMAT, "version": _VERSION, "model": memory.spec.model, "memory": name, "first": first,
                **asdict(sessions[0]), "branches": [asdict(branch) for branch in sessions[1:]],
            }  # fmt: skip
            about |= {} if drafts is None else {DRAFTS: drafts}
            file.write(json.dumps({**about, "sha256": _digest(about)}, indent=1).encode())
    except BaseException:
        named = _named_in(folder)
        for written in (name, drafts):
            if written is not None and named is not None and written not in named:
                (folder / written).unlink(missing_ok=True)
        raise
    _remove_others(folder)


def _save_memory(memory: HybridMemory, path: Path, first: int, own: Remembered) -> None:
    forks = {str(i): live for i, live in enumerate(own.lives) if live is not None and i != first}
    live = own.lives[first]
    assert live is not None, "the first one that is"
    try:
        memory.save(live, path, checkpoints=own.checkpoints, forks=forks)
    except FormatError:  # A checkpoint is swapped out, and its file is damaged.
        memory.save(live, path, checkpoints=[mark for mark in own.checkpoints if not mark.is_swapped], forks=forks)


def _remove_others(folder: Path) -> None:
    """Remove the files of earlier saved sessions, and those of processes that were killed while saving.

    Another process may write there at the same time, and its files must stay. So this function lists the files first,
    then looks for other writers, and reads the session last.
    """
    found = [path for path in folder.iterdir() if _MEMORY_FILE.fullmatch(path.name)]
    if not remove_abandoned(folder, f"{re.escape(SESSION_FILE)}|{_MEMORY_FILE.pattern}"):
        named = _named_in(folder)
        for path in found:
            if named is not None and path.name not in named:
                path.unlink(missing_ok=True)


def read_sessions(folder: Path, memory: HybridMemory) -> tuple[list[SavedSession], Callable[[], Remembered]]:
    """Read the saved session and its branches, in this order. Also return a function that loads their memory.

    Raises FormatError. Loading raises FormatError and CapacityError. If there is no room for the memory of all
    sessions, only that of the first session with any memory is loaded.
    """
    path = folder / SESSION_FILE
    about = read_about(path)
    try:
        sessions = [_read_one(path, own, memory.spec.vocab_size) for own in (about, *about["branches"])]
        name, first = about["memory"], about["first"]
        if not (name is None or (_MEMORY_FILE.fullmatch(name) and index(first) in range(len(sessions)))):
            raise ValueError(f"memory {name!r} of session {first!r}")
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{path} contradicts itself ({error!r}); save the session again") from error
    return sessions, lambda: _load_memory(memory, None if name is None else folder / name, first, len(sessions))


def _read_one(path: Path, about: dict[str, Any], vocab_size: int) -> SavedSession:
    messages = tuple(
        Utterance(str(m["role"]), str(m["content"]), tuple(map(int, m["token_ids"]))) for m in about["messages"]
    )
    ids = [i for m in messages for i in m.token_ids]
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        raise FormatError(
            f"{path} has token ids {min(ids)} ... {max(ids)}, this model has {vocab_size}; resume it with its own"
        )
    options = (int(about["max_tokens"]), Sampling(**about["sampling"]), tuple(map(str, about["stop"])))
    parent = about.get("parent")
    pictures = tuple(map(dict, about.get("pictures", ())))
    saved = SavedSession(messages, int(about["n_heard"]), *options, None if parent is None else int(parent), pictures)
    if not 0 <= saved.n_heard <= len(messages):
        raise ValueError(f"{saved.n_heard} messages heard")
    return saved


def drafts_in(folder: Path) -> Path | None:
    """Return the file of a saved session with what a drafter remembers; None if there is none. Raises FormatError."""
    name = read_about(folder / SESSION_FILE).get(DRAFTS)
    return folder / name if isinstance(name, str) and _MEMORY_FILE.fullmatch(name) else None


def _load_memory(memory: HybridMemory, path: Path | None, first: int, n_sessions: int) -> Remembered:
    lives: list[Sequence | None] = [None] * n_sessions
    if path is None:
        return Remembered(lives, [])
    try:
        family = memory.load(path, family=True)
    except CapacityError:
        lives[first] = memory.load(path)
        return Remembered(lives, [])
    lives[first] = family.sequence
    for i in range(n_sessions):
        lives[i] = family.forks.get(str(i), lives[i])
    return Remembered(lives, family.checkpoints)


def read_about(path: Path) -> dict[str, Any]:
    """Read the JSON of a saved session. Raises FormatError, also for a wrong checksum."""
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


def _named_in(folder: Path) -> set[str] | None:
    """Return the memory files that the saved session needs.

    None: the session cannot be read, so it may need any file.
    """
    try:
        if not (folder / SESSION_FILE).exists():
            return set()
        about = read_about(folder / SESSION_FILE)
        return {name for name in (about["memory"], about.get(DRAFTS)) if isinstance(name, str)}
    except (FormatError, KeyError, OSError):
        return None


def _digest(about: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def read_folder(folder: Any, error: type[SpecError | FormatError]) -> Path:
    """Return the path of a saved session's folder. Raises `error` if it cannot be a folder."""
    path = Path(read_path("folder", folder, "the folder of a saved session", error))
    if path.is_file():
        raise error(f"{path} is a file; give the folder of a saved session")
    return path
