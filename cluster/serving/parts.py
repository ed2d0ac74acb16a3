"""Notes what of each part of a reply a client has, and takes it out of the same part of another replica's reply."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Name = tuple[Any, ...]


class AnotherReplyError(Exception):
    """Says that a replica makes another reply than the one whose beginning the client has."""


@dataclass
class PartSoFar:
    """Holds what has been sent of a part of a reply: a text, or entries of a list, which are only counted.

    Attributes:
        at: how much of it the stream of now has brought: characters or entries.
    """

    pieces: list[str] = field(default_factory=list)
    n_told: int = 0
    at: int = 0

    def rest_of(self, piece: Any) -> Any:
        """Return what of a piece has not been sent, and note it. Raises AnotherReplyError."""
        n_common = min(len(piece), self.n_told - self.at)
        rest = piece[n_common:]
        if isinstance(piece, str):  # numbers of lists may differ in their last digits
            if n_common:
                self.pieces = ["".join(self.pieces)]
                if self.pieces[0][self.at : self.at + n_common] != piece[:n_common]:
                    raise AnotherReplyError(f"it differs behind {self.at} characters")
            self.pieces.append(rest)
        self.at += len(piece)
        self.n_told += len(rest)
        return rest
