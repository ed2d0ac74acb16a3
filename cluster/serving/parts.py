"""Records how much of each part of a reply a client has, and removes it from the same part of another reply."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

Name = tuple[Any, ...]


class AnotherReplyError(Exception):
    """Says that a replica makes another reply than the one whose beginning the client has."""


@dataclass
class PartSoFar:
    """Holds the sent beginning of a part of a reply. A part is a text, or a list whose entries are only counted.

    Attributes:
        at: how many characters or entries of the part have come from the current stream.
    """

    pieces: list[str] = field(default_factory=list)
    n_told: int = 0
    at: int = 0

    def rest_of(self, piece: Any) -> Any:
        """Return the unsent part of a piece, and record it as sent. Raises AnotherReplyError."""
        n_common = min(len(piece), self.n_told - self.at)
        rest = piece[n_common:]
        if isinstance(piece, str):  # Only texts are compared. Numbers in lists may differ in their last digits.
            if n_common:
                self.pieces = ["".join(self.pieces)]
                if self.pieces[0][self.at : self.at + n_common] != piece[:n_common]:
                    raise AnotherReplyError(f"it differs behind {self.at} characters")
            self.pieces.append(rest)
        self.at += len(piece)
        self.n_told += len(rest)
        return rest


class StreamSoFar(ABC):
    """Records the events of a stream, and returns the unsent part of a second stream of the same reply.

    Attributes:
        is_first: whether the events are those of the first stream.
        parts: what was sent of each part of the reply.
    """

    def __init__(self) -> None:
        self.is_first = True
        self.parts: dict[Name, PartSoFar] = {}
        self._seen: set[Name] = set()

    def begin_again(self) -> None:
        """Treat the next events as those of another stream of the same reply."""
        self.is_first = False
        for part in self.parts.values():
            part.at = 0

    def rest_of_part(self, name: Name, piece: Any) -> Any:
        """Return the unsent rest of a piece of the part that has this name. Raises AnotherReplyError."""
        return self.parts.setdefault(name, PartSoFar()).rest_of(piece)

    def is_unseen(self, *name: Any) -> bool:
        """Return True the first time that it is asked about a name."""
        is_unseen = name not in self._seen
        self._seen.add(name)
        return is_unseen

    @abstractmethod
    def is_end(self, event: dict[str, Any]) -> bool:
        """Return True for the last event of a stream."""

    @abstractmethod
    def rest_of(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """Return the unsent part of an event, or None if all of it was sent. Raises AnotherReplyError."""
