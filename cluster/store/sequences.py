"""Keeps sequences in one place for all replicas, each under the digest of its tokens.

    SIGNATURE/sequences/3f/3f...e1-1024.safetensors    a sequence of 1,024 tokens: digest of owner and tokens
    SIGNATURE/hot/3f...e1-1024                         empty: a prefix that several sessions share
    SIGNATURE/sessions/a0/a0.../7.json                 a lease (`cluster.store.leases`)
    replies/9d/9d...json                               replies to be given again (`cluster.serving.idempotency`)

SIGNATURE stands for the layout of the memory and the weights of the model, so replicas of another model see none of
these files. Each file also contains both, with a checksum. A file never changes, since equal tokens make equal files.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hybridmem.cluster.store.place import Entry, Place

_NAME = re.compile(r"([0-9a-f]+)-(\d+)(?:\.safetensors)?")


@dataclass(frozen=True)
class Quota:
    """Limits what is stored.

    The limits are the bytes of all sequences together, and the seconds after which a sequence is removed unless it is
    written again.
    """

    most_bytes: int
    most_seconds: float


class SequenceStore:
    """Writes and finds sequences. All calls block, and raise OSError if the place fails.

    Args:
        signature: the signature of the memory and the weights.
        clock: returns unix seconds. It should agree with the place's own clock.
    """

    def __init__(self, place: Place, signature: str, quota: Quota, clock: Callable[[], float]) -> None:
        self._place = place
        self._root = signature[:32]
        self._quota = quota
        self._clock = clock

    def path(self, digest: bytes, n_tokens: int) -> str:
        """Return the path or URL of a sequence, whether it exists or not."""
        return self._place.path(self._name(digest, n_tokens))

    def has(self, digest: bytes, n_tokens: int) -> bool:
        return self._place.has(self._name(digest, n_tokens))

    def write(self, digest: bytes, n_tokens: int, write: Callable[[str], None]) -> None:
        """Store a sequence. `write` gets the path. A sequence that is stored already is left as it is."""
        if not self.has(digest, n_tokens):
            self._place.write_with(self._name(digest, n_tokens), write)

    def mark_hot(self, digest: bytes, n_tokens: int) -> None:
        """Record that several sessions begin with a stored sequence."""
        self._place.create(f"{self._root}/hot/{digest.hex()}-{n_tokens}", b"")

    def hot(self) -> dict[bytes, int]:
        """Return the digests and lengths of sequences that several sessions share."""
        found = [_NAME.fullmatch(name) for name in self._place.names(f"{self._root}/hot")]
        return {bytes.fromhex(match[1]): int(match[2]) for match in found if match}

    def sweep(self) -> int:
        """Remove sequences that are too old, then the oldest ones until the remaining sequences are within the quota.

        Return the removed bytes.
        """
        entries = sorted(self._place.entries(f"{self._root}/sequences"), key=lambda entry: entry.changed_at)
        n_bytes, n_removed = sum(entry.n_bytes for entry in entries), 0
        oldest = self._clock() - self._quota.most_seconds
        hot = {f"{digest.hex()}-{n}" for digest, n in self.hot().items()}
        for entry in entries:
            if entry.changed_at >= oldest and n_bytes - n_removed <= self._quota.most_bytes:
                break
            self._remove(entry, hot)
            n_removed += entry.n_bytes
        for folder in (f"{self._root}/sessions", "replies"):
            for entry in self._place.entries(folder):
                if entry.changed_at < oldest:
                    self._place.remove(entry.name)
        return n_removed

    def _remove(self, entry: Entry, hot: set[str]) -> None:
        stem = entry.name.rpartition("/")[2].removesuffix(".safetensors")
        if stem in hot:
            self._place.remove(f"{self._root}/hot/{stem}")
        self._place.remove(entry.name)

    def _name(self, digest: bytes, n_tokens: int) -> str:
        text = digest.hex()
        return f"{self._root}/sequences/{text[:2]}/{text}-{n_tokens}.safetensors"


class Subplace:
    """Represents a folder of a place, for the leases and replies of one signature."""

    def __init__(self, place: Place, signature: str) -> None:
        self._place = place
        self._root = signature[:32]

    def read(self, name: str) -> bytes | None:
        return self._place.read(f"{self._root}/{name}")

    def write(self, name: str, content: bytes) -> None:
        self._place.write(f"{self._root}/{name}", content)

    def create(self, name: str, content: bytes) -> bool:
        return self._place.create(f"{self._root}/{name}", content)

    def names(self, folder: str) -> list[str]:
        return self._place.names(f"{self._root}/{folder}")

    def remove(self, name: str) -> None:
        self._place.remove(f"{self._root}/{name}")
