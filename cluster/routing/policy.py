"""Chooses a replica by session, resumable prefix and load.

The first choice is the replica that holds the session, then the one that can resume most of the prompt, then the less
loaded of two drawn at random.

A router for plain attention counts cached pages. With a hybrid model, a page is useless if no state was kept at its
end. So only prefixes count that a replica can resume, from a checkpoint or by a rollback from one. If loads are uneven,
the load decides before session and prefix. The session then moves, at the cost of reading a file or computing the
tokens again.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridmem.cluster.routing.index import PrefixIndex
from hybridmem.cluster.routing.prompts import Prompt
from hybridmem.cluster.routing.route import Reason, Route
from hybridmem.defaults import PREFIX_GRID_TOKENS

MOST_SESSIONS = 1 << 20
"""A router remembers the replicas of this many sessions. It forgets the oldest, and finds them again by their prefixes.
"""


class Policy(Protocol):
    """Declares the methods of a policy that a router calls. Times are seconds on any monotonic clock."""

    def choose(self, prompt: Prompt, replicas: Sequence[str], now: float) -> Route: ...
    def sent(self, prompt: Prompt, replica: str, now: float) -> None: ...
    def done(self, replica: str) -> None: ...
    def report(self, replica: str, stats: dict[str, Any], now: float) -> None: ...
    def leave(self, replica: str) -> None: ...


@dataclass(frozen=True)
class Bounds:
    """Holds the numbers of the policy.

    Attributes:
        imbalance: a replica is passed over if it has more requests than the mean of all replicas times this number,
        slack_requests: and by more than this many requests.
        least_tokens: a prefix decides only if it has more tokens than this.
        believed_seconds: a sent prompt is assumed to be resumable for this long, even if the replica does not report
            it.
        grid_tokens: the grid of the replicas' prefix caches, which keep a checkpoint at each multiple of this number.
    """

    imbalance: float = 1.5
    slack_requests: int = 4
    least_tokens: int = 16
    believed_seconds: float = 10.0
    grid_tokens: int = PREFIX_GRID_TOKENS


@dataclass
class Loads:
    """Counts the requests of each replica, both from this router and from others.

    Attributes:
        own: open requests that this router has sent.
        others: requests that other routers have sent, by the replica's last report.
        total: the sum of both, over all replicas.
    """

    own: dict[str, int] = field(default_factory=dict)
    others: dict[str, int] = field(default_factory=dict)
    total: int = 0

    def of(self, replica: str) -> int:
        return self.own.get(replica, 0) + self.others.get(replica, 0)

    def add(self, replica: str, n: int) -> None:
        before = self.own.get(replica, 0)
        self.own[replica] = max(0, before + n)
        self.total += self.own[replica] - before

    def report(self, replica: str, n_requests: int) -> None:
        n_others = max(0, n_requests - self.own.get(replica, 0))
        self.total += n_others - self.others.get(replica, 0)
        self.others[replica] = n_others

    def forget(self, replica: str) -> None:
        self.total -= self.own.pop(replica, 0) + self.others.pop(replica, 0)

    def less_of_two(self, replicas: Sequence[str], pick: random.Random) -> str:
        """Return the less loaded of two random replicas (Mitzenmacher 2001, "The power of two choices")."""
        return min(pick.sample(replicas, min(2, len(replicas))), key=self.of)


class ResumablePolicy:
    """Chooses a replica by session, resumable prefix and load, as the module describes.

    Args:
        pick: makes the random choices.
    """

    def __init__(self, bounds: Bounds = Bounds(), pick: random.Random | None = None) -> None:
        self.bounds = bounds
        self.loads = Loads()
        self.index = PrefixIndex()
        self._sessions: OrderedDict[str, str] = OrderedDict()
        self._pick = pick or random.Random()
        self._replicas: Sequence[str] = ()
        self._members = frozenset[str]()

    def choose(self, prompt: Prompt, replicas: Sequence[str], now: float) -> Route:
        """Return a route to one of `replicas`, of which there is at least one. Cost: computing the prompt's digests."""
        members = self._members_of(replicas)
        most = self.bounds.imbalance * self.loads.total / len(replicas) + self.bounds.slack_requests
        depths = {name: depth for name, depth in self.index.depths(prompt, now).items() if name in members}
        able = [
            (depth, -self.loads.of(name), name) for name, depth in depths.items() if depth > self.bounds.least_tokens
        ]
        deepest = max(able, default=(0, 0, ""))
        holder = self._sessions.get(prompt.session or "", "")
        is_free = holder in members and self.loads.of(holder) <= most
        if is_free and depths.get(holder, 0) + self.bounds.least_tokens >= deepest[0]:
            return Route(holder, "session", depths, prompt.n_tokens, replicas)
        if best := max((entry for entry in able if -entry[1] <= most), default=None):
            return Route(best[2], "prefix" if best == deepest else "busy", depths, prompt.n_tokens, replicas)
        reason: Reason = "busy" if able or holder in members else "load"
        return Route(self.loads.less_of_two(replicas, self._pick), reason, depths, prompt.n_tokens, replicas)

    def _members_of(self, replicas: Sequence[str]) -> frozenset[str]:
        if replicas is not self._replicas:
            self._replicas, self._members = replicas, frozenset(replicas)
        return self._members

    def sent(self, prompt: Prompt, replica: str, now: float) -> None:
        """Record that a prompt was sent to a replica, which will keep checkpoints of it."""
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
        """Record that a request to a replica has ended, for whatever reason."""
        self.loads.add(replica, -1)

    def report(self, replica: str, stats: dict[str, Any], now: float) -> None:
        """Record a replica's report: its `requests`, and its `prefixes` as (position, digest)."""
        self.loads.report(replica, int(stats.get("requests", 0)))
        self.index.report(replica, stats.get("prefixes", ()), now)

    def leave(self, replica: str) -> None:
        """Forget a replica that is gone."""
        self.loads.forget(replica)
        self.index.forget(replica)
        for session in [session for session, holder in self._sessions.items() if holder == replica]:
            del self._sessions[session]
