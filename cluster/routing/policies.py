"""Holds other routing policies, with which `ResumablePolicy` is compared, and makes policies by their names."""

from __future__ import annotations

import bisect
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from hybridmem.cluster.routing.policy import Bounds, Loads, Policy, ResumablePolicy
from hybridmem.cluster.routing.prompts import Prompt
from hybridmem.cluster.routing.route import Reason, Route
from hybridmem.memory import SpecError

_POINTS = 100
"""A replica has this many points on the ring of consistent hashing."""


class _Blind:
    """Chooses by loads or sessions, and ignores prefixes."""

    def __init__(self, pick: random.Random | None = None) -> None:
        self.loads = Loads()
        self._pick = pick or random.Random()

    def sent(self, prompt: Prompt, replica: str, now: float) -> None:
        self.loads.add(replica, 1)

    def done(self, replica: str) -> None:
        self.loads.add(replica, -1)

    def report(self, replica: str, stats: dict[str, Any], now: float) -> None:
        self.loads.report(replica, int(stats.get("requests", 0)))

    def leave(self, replica: str) -> None:
        self.loads.forget(replica)

    def _route(self, first: str, replicas: Sequence[str], reason: Reason, prompt: Prompt) -> Route:
        return Route(first, reason, {}, prompt.n_tokens, replicas)


class RoundRobin(_Blind):
    """Chooses the replicas in turn."""

    _n_chosen = 0

    def choose(self, prompt: Prompt, replicas: Sequence[str], now: float) -> Route:
        self._n_chosen += 1
        return self._route(sorted(replicas)[self._n_chosen % len(replicas)], replicas, "turn", prompt)


class LessOfTwo(_Blind):
    """Chooses the less loaded of two random replicas."""

    def choose(self, prompt: Prompt, replicas: Sequence[str], now: float) -> Route:
        return self._route(self.loads.less_of_two(replicas, self._pick), replicas, "load", prompt)


class ConsistentHash(_Blind):
    """Chooses by the session only: each replica owns a share of a ring of hashes (Karger et al. 1997)."""

    def __init__(self, pick: random.Random | None = None) -> None:
        super().__init__(pick)
        self._ring: list[tuple[int, str]] = []
        self._members: frozenset[str] = frozenset()

    def choose(self, prompt: Prompt, replicas: Sequence[str], now: float) -> Route:
        if self._members != (members := frozenset(replicas)):
            self._members = members
            self._ring = sorted((_hash(f"{name}:{i}"), name) for name in members for i in range(_POINTS))
        key = _hash(prompt.session) if prompt.session is not None else self._pick.getrandbits(64)
        chosen = self._ring[bisect.bisect(self._ring, (key, "")) % len(self._ring)][1]
        return self._route(chosen, replicas, "hash", prompt)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def make_policy(name: str = "resumable", seed: int | None = None, **bounds: float) -> Policy:
    """Return a policy by its name in the options. Raises SpecError.

    Args:
        bounds: the fields of `Bounds`.
    """
    pick = random.Random(seed)
    makers: dict[str, Callable[[], Policy]] = {
        "resumable": lambda: ResumablePolicy(Bounds(**bounds), pick),  # type: ignore[arg-type]
        "round-robin": lambda: RoundRobin(pick),
        "load": lambda: LessOfTwo(pick),
        "consistent-hash": lambda: ConsistentHash(pick),
    }
    if name not in makers:
        raise SpecError(f"router={name!r}; choose one of {', '.join(makers)}")
    if unknown := bounds.keys() - {field.name for field in fields(Bounds)}:
        raise SpecError(f"{unknown} are no numbers of the routing policy")
    return makers[name]()
