"""Chooses a replica: the one that holds the session, else the one that can resume most, else the less loaded of two.

A router of plain attention scores cached pages; for a hybrid model a page is worth nothing where no state was kept. So
only prefixes count here that a replica can resume: a checkpoint, or one with a rollback window behind it. Load comes
before both where replicas are uneven: a move costs a file's bytes, or the tokens again.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from cluster.routing.index import PrefixIndex
from cluster.routing.prompts import Prompt
from cluster.routing.route import Reason, Route

MOST_SESSIONS = 1 << 20
"""Sessions whose replica a router remembers; the oldest are forgotten, and found again by their prefixes."""


class Policy(Protocol):
    """Declares what a router asks of a policy. Times are seconds on any clock that runs on."""

    def choose(self, prompt: Prompt, replicas: Sequence[str], now: float) -> Route: ...
    def sent(self, prompt: Prompt, replica: str, now: float) -> None: ...
    def done(self, replica: str) -> None: ...
    def report(self, replica: str, stats: dict[str, Any], now: float) -> None: ...
    def leave(self, replica: str) -> None: ...


@dataclass(frozen=True)
class Bounds:
    """Holds the numbers of the policy.

    Attributes:
        imbalance: a replica is passed over when it has more requests than this times the mean of all ...
        slack_requests: ... and more than so many above that.
        least_tokens: a prefix decides only if it is longer.
        believed_seconds: what a replica was sent is believed to be resumable there for so long, unless it reports it.
        grid_tokens: of the replicas' prefix caches, which keep a checkpoint at each multiple.
    """

    imbalance: float = 1.5
    slack_requests: int = 4
    least_tokens: int = 16
    believed_seconds: float = 10.0
    grid_tokens: int = 512


@dataclass
class Loads:
    """Counts the requests of each replica: those that this router sent, and those that others did.

    Attributes:
        own: that this router has sent and that have not ended.
        others: that a replica had, at its last report, beyond those of this router.
    """

    own: dict[str, int] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)

    def of(self, replica: str) -> int:
        return self.own.get(replica, 0) + self.others.get(replica, 0)

    def add(self, replica: str, n: int) -> None:
        self.own[replica] = max(0, self.own.get(replica, 0) + n)

    def report(self, replica: str, n_requests: int) -> None:
        self.others[replica] = max(0, n_requests - self.own.get(replica, 0))

    def forget(self, replica: str) -> None:
        self.own.pop(replica, None)
        self.others.pop(replica, None)

    def less_of_two(self, replicas: Sequence[str], pick: random.Random) -> str:
        """Return the less loaded of two random replicas (Mitzenmacher 2001, "The power of two choices")."""
        return min(pick.sample(replicas, min(2, len(replicas))), key=self.of)


class ResumablePolicy:
    """Chooses by session, resumable prefix and load, as the module says.

    Args:
        pick: makes the random choices.
    """

    def __init__(self, bounds: Bounds = Bounds(), pick: random.Random | None = None) -> None:
        self.bounds = bounds
        self.loads = Loads()
        self.index = PrefixIndex()
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._pick = pick or random.Random()

    def choose(self, prompt: Prompt, replicas: Sequence[str], now: float) -> Route:
        """Return a route over all of `replicas`, of which there is at least one."""
        depths = self.index.depths(prompt, now)
        most = self._most_requests(replicas)
        free = [replica for replica in replicas if self.loads.of(replica) <= most] or list(replicas)
        holder = self._sessions.get(prompt.session or "")
        deepest = self._deepest(depths, replicas)
        if holder in free and depths.get(holder, 0) + self.bounds.least_tokens >= depths.get(deepest, 0):
            return self._route(holder, "session", depths, prompt, replicas)
        best = self._deepest(depths, free)
        if best:
            return self._route(best, "prefix" if best == deepest else "busy", depths, prompt, replicas)
        reason: Reason = "busy" if deepest or holder in replicas else "load"
        return self._route(self.loads.less_of_two(free, self._pick), reason, depths, prompt, replicas)

    def sent(self, prompt: Prompt, replica: str, now: float) -> None:
        """Note that a replica has got a prompt, and will keep checkpoints of it."""
        self.loads.add(replica, 1)
        grid = self.bounds.grid_tokens
        positions = [*range(grid, prompt.n_tokens, grid), prompt.n_tokens] if grid else [prompt.n_tokens]
        self.index.expect(replica, prompt.digests(positions), now + self.bounds.believed_seconds)
        if prompt.session is not None:
            self._sessions[prompt.session] = replica
            self._sessions.move_to_end(prompt.session)
            if len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)

    def done(self, replica: str) -> None:
        """Note that a request that was sent to a replica has ended, in any way."""
        self.loads.add(replica, -1)

    def report(self, replica: str, stats: dict[str, Any], now: float) -> None:
        """Note what a replica says of itself: `requests`, and `prefixes` as (position, digest)."""
        self.loads.report(replica, int(stats.get("requests", 0)))
        self.index.report(replica, stats.get("prefixes", ()), now)

    def leave(self, replica: str) -> None:
        """Forget a replica that is gone."""
        self.loads.forget(replica)
        self.index.forget(replica)
        for session in [session for session, holder in self._sessions.items() if holder == replica]:
            del self._sessions[session]

    def _most_requests(self, replicas: Iterable[str]) -> float:
        """Return how many requests a replica may have before it is passed over."""
        counts = [self.loads.of(replica) for replica in replicas]
        return self.bounds.imbalance * sum(counts) / len(counts) + self.bounds.slack_requests

    def _deepest(self, depths: dict[str, int], replicas: Sequence[str]) -> str:
        """Return the replica that can resume most, the less loaded of equal ones; "" if none can resume enough."""
        able = [r for r in replicas if depths.get(r, 0) > self.bounds.least_tokens]
        return max(able, key=lambda r: (depths[r], -self.loads.of(r)), default="")

    def _route(
        self, first: str, reason: Reason, depths: dict[str, int], prompt: Prompt, replicas: Sequence[str]
    ) -> Route:
        others = sorted((r for r in replicas if r != first), key=lambda r: (-depths.get(r, 0), self.loads.of(r)))
        return Route((first, *others), reason, depths, prompt.n_tokens)
