"""Records how much of each part of a reply a client has, and removes it from the same part of another reply."""

from __future__ import annotations

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
