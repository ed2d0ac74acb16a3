"""Indexes which replicas can resume which prefixes: what they have reported, and what they were sent since then."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from hybridmem.cluster.routing.prompts import Prompt

MOST_EXPECTED = 8192
"""Prefixes of one replica that are expected but not reported; the oldest are forgotten."""


class PrefixIndex:
    """Maps digests of prefixes to the replicas that can resume them.

    What a replica reports replaces what it reported before. What it was sent is expected to become resumable there, and
    believed for a while, since a report is always a little old.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, dict[str, float]] = {}  # digest -> replica -> until when it is believed
        self._held: dict[str, dict[bytes, int]] = {}  # replica -> digest -> position
        self._positions = Counter[int]()

    def report(self, replica: str, prefixes: Iterable[tuple[int, bytes]], now: float) -> None:
        """Note what a replica can resume, as it says itself: (position, digest) each."""
        reported = {digest: position for position, digest in prefixes}
        for digest in list(self._held.get(replica, ())):
            until = self._holders[digest][replica]
            if digest not in reported and (math.isinf(until) or until <= now):
                self._remove(replica, digest)
        for digest, position in reported.items():
            self._add(replica, digest, position, math.inf)

    def report_one(self, replica: str, position: int, digest: bytes) -> None:
        """Note one more prefix that a replica can resume, as `report` does for all."""
        self._add(replica, digest, position, math.inf)

    def expect(self, replica: str, prefixes: Iterable[tuple[int, bytes]], until: float) -> None:
        """Note what a replica will be able to resume when it has done what it was sent."""
        for position, digest in prefixes:
            self._add(replica, digest, position, until)
        held = self._held.get(replica, {})
        if len(held) > MOST_EXPECTED:
            expected = [digest for digest in held if not math.isinf(self._holders[digest][replica])]
            for digest in expected[: len(held) - MOST_EXPECTED]:
                self._remove(replica, digest)

    def lose(self, replica: str, digests: Iterable[bytes]) -> None:
        """Note that a replica can resume some prefixes no longer."""
        for digest in digests:
            if digest in self._held.get(replica, ()):
                self._remove(replica, digest)

    def forget(self, replica: str) -> None:
        """Forget all prefixes of a replica that is gone."""
        for digest in list(self._held.get(replica, ())):
            self._remove(replica, digest)
        self._held.pop(replica, None)

    def depths(self, prompt: Prompt, now: float) -> dict[str, int]:
        """Return, for each replica that can resume a beginning of the prompt, how many tokens of it.

        The last token of a prompt is always fed, so all of a prompt counts as one token less.
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
