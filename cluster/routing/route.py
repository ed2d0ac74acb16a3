"""Says where a prompt goes, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Reason = Literal["session", "prefix", "load", "busy", "hash", "turn", "pinned"]
"""Why a replica was chosen: it holds the session; it can resume most of the prompt; it has the least load of two; the
replica that could resume more has too much load; by consistent hashing; by round robin; the request names it.
"""


@dataclass(frozen=True)
class Route:
    """Holds a choice.

    Attributes:
        first: the chosen replica.
        depths: replica -> tokens of the prompt that it is expected to resume; 0 where it is not named.
        n_tokens: of the prompt.
        replicas: all that there are.
    """

    first: str
    reason: Reason
    depths: dict[str, int]
    n_tokens: int
    replicas: Sequence[str]

    @property
    def order(self) -> tuple[str, ...]:
        """Return all replicas: the chosen one, then those to be tried when it takes no more requests."""
        others = [replica for replica in self.replicas if replica != self.first]
        return (self.first, *sorted(others, key=lambda replica: -self.depths.get(replica, 0)))

    def why(self, replica: str) -> dict[str, Any]:
        """Say in JSON values why a replica got the prompt: the first one, or one behind it that had room."""
        reason = self.reason if replica == self.first else "busy"
        return {
            "reason": reason, "replica": replica, "resumable_tokens": self.depths.get(replica, 0),
            "prompt_tokens": self.n_tokens,
        }  # fmt: skip


def as_header(why: dict[str, Any]) -> str:
    """Return a route's reason as the value of a header, such as `prefix; resumable=512/600; replica=x3f`."""
    known = f"{why['resumable_tokens']}/{why['prompt_tokens']}"
    return f"{why['reason']}; resumable={known}; replica={why['replica']}"
