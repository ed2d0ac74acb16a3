"""Indexes which replicas can resume which prefixes, from their reports and from the prompts sent to them since."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from hybridmem.cluster.routing.prompts import Prompt

MOST_EXPECTED = 8192
"""At most this many prefixes of one replica are expected but not reported. The oldest are forgotten."""


class PrefixIndex:
    """Maps digests of prefixes to the replicas that can resume them.

    A replica's report replaces its last one. A prompt that was sent to a replica is expected to become resumable there.
    The index assumes so for a while, because reports are always a little old.
    """

    def __init__(self) -> None:
        # This maps a digest to replicas, and each replica to the time until which the entry is assumed to be right.
        self._holders: dict[bytes, dict[str, float]] = {}
        self._held: dict[str, dict[bytes, int]] = {}  # This maps a replica to digests, and each digest to a position.
        self._positions = Counter[int]()

    def report(self, replica: str, prefixes: Iterable[tuple[int, bytes]], now: float) -> None:
        """Record the prefixes that a replica has reported, as (position, digest)."""
        reported = {digest: position for position, digest in prefixes}
        for digest in list(self._held.get(replica, ())):
            until = self._holders[digest][replica]
            if digest not in reported and (math.isinf(until) or until <= now):
                self._remove(replica, digest)
        for digest, position in reported.items():
            self._add(replica, digest, position, math.inf)

    def report_one(self, replica: str, position: int, digest: bytes) -> None:
        """Record one more prefix that a replica can resume, as `report` does for all of its prefixes."""
        self._add(replica, digest, position, math.inf)

    def expect(self, replica: str, prefixes: Iterable[tuple[int, bytes]], until: float) -> None:
        """Record the prefixes that a replica can resume once it has computed the prompt that was sent to it."""
        for position, digest in prefixes:
            self._add(replica, digest, position, until)
        held = self._held.get(replica, {})
        if len(held) > MOST_EXPECTED:
            expected = [digest for digest in held if not math.isinf(self._holders[digest][replica])]
            for digest in expected[: len(held) - MOST_EXPECTED]:
                self._remove(replica, digest)

    def lose(self, replica: str, digests: Iterable[bytes]) -> None:
        """Record that a replica can no longer resume some prefixes."""
        for digest in digests:
            if digest in self._held.get(replica, ()):
                self._remove(replica, digest)

    def forget(self, replica: str) -> None:
        """Forget all prefixes of a replica that is gone."""
        for digest in list(self._held.get(replica, ())):
            self._remove(replica, digest)
        self._held.pop(replica, None)

    def depths(self, prompt: Prompt, now: float) -> dict[str, int]:
        """Return replica -> how many tokens of the prompt it can resume, for each replica that can resume any.

        The last token of a prompt is always fed, so a whole prompt counts as one token less.
        """
        found = dict[str, int]()
        for position, digest in prompt.digests(self._positions):
            for replica, until in self._holders.get(digest, {}).items():
                if until > now:
                    found[replica] = min(position, prompt.n_tokens - 1)
        return found

    def _add(self, replica: str, digest: bytes, position: int, until: float) -> None:
        holders = self._holders.setdefault(digest, {})
        if replica not in holders:
            self._held.setdefault(replica, {})[digest] = position
            self._positions[position] += 1
        holders[replica] = max(until, holders.get(replica, until))

    def _remove(self, replica: str, digest: bytes) -> None:
        position = self._held[replica].pop(digest)
        self._positions[position] -= 1
        if not self._positions[position]:
            del self._positions[position]
        holders = self._holders[digest]
        del holders[replica]
        if not holders:
            del self._holders[digest]
