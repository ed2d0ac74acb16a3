"""Holds the sessions that grew from one conversation, and saves and resumes them together."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.session.album import Album
from hybridmem.chat.session.history import Utterance
from hybridmem.chat.session.saved import Remembered, SavedSession, drafts_in, read_sessions, write_sessions
from hybridmem.chat.special_tokens.marks import names_in
from hybridmem.memory import FormatError, Sequence
from hybridmem.memory.sequences import Lease


class TreeSession(Protocol):
    """Declares the part of `chat.session.session.ChatSession` that is saved."""

    engine: Engine
    max_tokens: int
    sampling: Sampling
    stop: tuple[str, ...]
    owner: Hashable
    _n_heard: int
    _live: Sequence | None
    _tree: Tree
    _answering: Lease
    _album: Album

    @property
    def messages(self) -> tuple[Utterance, ...]: ...
    @property
    def sequence(self) -> Sequence | None: ...
    def _n_said(self, live: Sequence) -> int: ...
    def close(self) -> None: ...


SessionT = TypeVar("SessionT", bound=TreeSession)


class Tree:
    """Holds the open sessions of one conversation: the first one, and those that branched from others."""

    def __init__(self) -> None:
        self._parents: dict[Any, Any] = {}

    def add(self, session: SessionT, parent: SessionT | None) -> None:
        """Add a session that branched from `parent`."""
        self._parents[session] = parent

    def remove(self, session: TreeSession) -> None:
        """Remove a session. Its branches become branches of its parent."""
        above = self._parents.pop(session, None)
        for other, parent in self._parents.items():
            if parent is session:
                self._parents[other] = above

    def others(self, session: SessionT) -> tuple[SessionT, ...]:
        """Return all open sessions except this one, the oldest first."""
        return tuple(other for other in self._parents if other is not session)

    def parent_of(self, session: SessionT) -> SessionT | None:
        """Return the open session from which this one branched."""
        parent: SessionT | None = self._parents.get(session)
        return parent


def save_together(sessions: list[SessionT], tree: Tree, folder: Path) -> None:
    """Write sessions of one tree to a folder. `resume_together` will return the first of them."""
    with ExitStack() as stack:
        lives = [_said(session, stack) for session in sessions]
        parents = [tree.parent_of(session) for session in sessions]
        texts = (message.content for session in sessions for message in session.messages)
        pictures = sessions[0]._album.saved(name for text in texts for name in names_in(text))
        saved = [
            SavedSession(
                session.messages, session._n_heard, session.max_tokens, session.sampling, session.stop,
                None if parent is None else sessions.index(parent), pictures if session is sessions[0] else (),
            )
            for session, parent in zip(sessions, parents, strict=True)
        ]  # fmt: skip
        own = Remembered(lives, _checkpoints(sessions[0], lives))
        engine, owner = sessions[0].engine, sessions[0].owner

        def save_drafts(path: Path) -> bool:
            texts = engine.drafted_texts
            return texts is not None and texts.save([live.tokens for live in lives if live is not None], owner, path)

        write_sessions(folder, saved, engine.memory, own, save_drafts)


def _said(session: TreeSession, stack: ExitStack) -> Sequence | None:
    """Return a sequence that holds only what the live one holds of the messages; None if there is no live one.

    If it is a new sequence, the stack closes it.
    """
    memory, live = session.engine.memory, session.sequence
    if live is None or session._answering.is_taken:
        return None
    if (n_said := session._n_said(live)) == live.length:
        return live
    if live.is_swapped or not (n_kept := memory.resume_point(live, n_said)):
        return None
    said = memory.fork(live)
    stack.callback(memory.close, said)
    memory.rollback(said, to=n_kept)
    return said


def _checkpoints(session: TreeSession, lives: list[Sequence | None]) -> list[Sequence]:
    """Return the checkpoints of the prefix cache that hold prefixes of these sequences."""
    prefixes = session.engine.prefixes
    if prefixes is None:
        return []
    found = [prefixes.checkpoints_of(live.tokens, session.owner) for live in lives if live is not None]
    return list(dict.fromkeys(chain.from_iterable(found)))


def resume_together(engine: Engine, folder: Path, make: Callable[[SavedSession, Album], SessionT]) -> SessionT:
    """Return the session that was saved in a folder, with its branches. Raises as `read_sessions`.

    Args:
        make: makes a session without memory from what was saved, and from the pictures of all sessions.
    """
    saved, load = read_sessions(folder, engine.memory)
    sessions, album = list[SessionT](), Album(engine)
    try:
        album.load(saved[0].pictures)
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{folder} holds a picture that cannot be read ({error}); save the session again") from error
    try:
        for own in saved:
            sessions.append(make(own, album))
            sessions[-1]._tree = sessions[0]._tree
        for session, own in zip(sessions, saved, strict=True):
            is_known = own.parent is not None and 0 <= own.parent < len(sessions)
            session._tree.add(session, sessions[own.parent or 0] if is_known else None)
        remembered = load()
        for session, live in zip(sessions, remembered.lives, strict=True):
            session._live = live
        for checkpoint in remembered.checkpoints:
            if engine.prefixes is not None:
                engine.prefixes.insert(checkpoint, sessions[0].owner)
            engine.memory.close(checkpoint)
        if engine.drafted_texts is not None and (path := drafts_in(folder)) is not None:
            engine.drafted_texts.load(path, sessions[0].owner)
        return sessions[0]
    except BaseException:
        for session in sessions:
            session.close()
        raise
