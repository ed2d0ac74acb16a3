"""Holds a route, which says where a prompt goes, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Reason = Literal["session", "prefix", "load", "busy", "hash", "turn", "pinned"]
"""Why a replica was chosen, in the order of the names above: it holds the session; it can resume most of the prompt; it
has the lesser load of two; the replica that could resume more has too much load; by consistent hashing; by round robin;
the request names it.
"""


@dataclass(frozen=True)
class Route:
    """Holds the choice of a replica.

    Attributes:
        first: the chosen replica.
        depths: replica -> how many tokens of the prompt it is expected to resume. A missing replica is expected to
            resume none.
        n_tokens: the number of tokens in the prompt.
        replicas: all replicas.
    """

    first: str
    reason: Reason
    depths: dict[str, int]
    n_tokens: int
    replicas: Sequence[str]

    @property
    def order(self) -> tuple[str, ...]:
        """Return all replicas: the chosen one first, then those to try if the chosen one takes no more requests."""
        others = [replica for replica in self.replicas if replica != self.first]
        return (self.first, *sorted(others, key=lambda replica: -self.depths.get(replica, 0)))

    def why(self, replica: str) -> dict[str, Any]:
        """Return, as JSON values, why a replica got the prompt.

        The replica may be the first choice, or a later one that had room.
        """
        reason = self.reason if replica == self.first else "busy"
        return {
            "reason": reason, "replica": replica, "resumable_tokens": self.depths.get(replica, 0),
            "prompt_tokens": self.n_tokens,
        }  # fmt: skip


def as_header(why: dict[str, Any]) -> str:
    """Return a route's reason as the value of a header, such as `prefix; resumable=512/600; replica=x3f`."""
    known = f"{why['resumable_tokens']}/{why['prompt_tokens']}"
    return f"{why['reason']}; resumable={known}; replica={why['replica']}"
