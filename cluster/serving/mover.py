"""Moves sequences between a replica's memory and the store.

It fetches the beginnings of prompts, and stores the ends of replies.

All calls block, so they belong in threads. Files are read and written while the engine steps. The engine's lock is held
only to copy blocks in and out.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.engine.remembered_texts import RememberedTexts
from hybridmem.cluster.routing.prompts import TokenPrompt
from hybridmem.cluster.store.health import StoreHealth
from hybridmem.cluster.store.leases import Stand
from hybridmem.cluster.store.sequences import SequenceStore
from hybridmem.memory import CapacityError, FormatError, SequenceError
from hybridmem.memory.interface import Sequence
from hybridmem.memory.prefix import PrefixCache, digests_at
from hybridmem.memory.storage import local_place

LEAST_GAIN_TOKENS = 16
"""A stored sequence must save at least this many tokens more than the replica has, since reading it takes as long as
computing a few tokens.
"""
_MOST_PROBES = 3
_MOST_KNOWN = 1 << 16


class Mover:
    """Stores and fetches sequences of one engine. The engine must have a prefix cache.

    Args:
        least_tokens: shorter sequences are not stored.
    """

    def __init__(
        self, engine: Engine, prefixes: PrefixCache, store: SequenceStore, health: StoreHealth, *, least_tokens: int
    ) -> None:
        self._engine = engine
        self._prefixes = prefixes
        self._store = store
        self._health = health
        self._least_tokens = least_tokens
        self._stored: dict[bytes, None] = {}  # These digests are in the store, as far as this replica knows.
        self._lock = threading.Lock()
        self._hot: dict[bytes, int] = {}

    # The methods below fetch sequences.

    def fetch(self, prompt: TokenPrompt, stand: Stand | None) -> int:
        """Bring the longest stored beginning of a prompt into the memory, if the memory does not hold a longer one.

        Args:
            stand: the last stored prefix of the prompt's session, if that is known.
        Returns:
            The number of tokens in the fetched sequence, or 0.
        Raises OSError if the store fails. Files that are damaged, have other weights or do not fit are ignored.
        """
        tokens = prompt.array()
        with self._engine.lock:
            reused = self._prefixes.find(tokens, prompt.owner).reused
        least = max(reused + LEAST_GAIN_TOKENS, self._least_tokens)
        for n_tokens, digest, is_known in self._candidates(prompt, stand):
            if n_tokens < least:
                return 0
            if is_known or self._has(digest, n_tokens):
                return self._load(digest, n_tokens, prompt)
        return 0

    def _candidates(self, prompt: TokenPrompt, stand: Stand | None) -> list[tuple[int, bytes, bool]]:
        """Return candidates as (tokens, digest, whether it is surely stored), the longest first.

        Without a stand, the ends of earlier replies are tried, because turns are stored only at these positions.
        """
        known = dict(self._hot)
        if stand is not None:
            known[bytes.fromhex(stand.digest)] = stand.n_tokens
        tokens = prompt.array()
        ends = np.flatnonzero(np.isin(tokens, self._engine.stop_ids))[::-1] if stand is None else np.array([], np.int64)
        probed = {int(at) for at in ends[:_MOST_PROBES]}
        found = list(prompt.digests({*probed, *known.values()}))
        sure = [(n, digest, True) for n, digest in found if known.get(digest) == n]
        return sorted([*sure, *((n, digest, False) for n, digest in found if n in probed)], reverse=True)

    def _has(self, digest: bytes, n_tokens: int) -> bool:
        with self._health.asking():
            return self._store.has(digest, n_tokens)

    def _load(self, digest: bytes, n_tokens: int, prompt: TokenPrompt) -> int:
        path = self._store.path(digest, n_tokens)
        memory, tokens = self._engine.memory, prompt.array()[:n_tokens]
        try:
            with self._health.asking():
                if not self._store.has(digest, n_tokens):
                    return 0
                saved = memory.archive.read(path)
            with self._engine.lock:
                sequence = memory.archive.open(saved)
                try:
                    if not np.array_equal(sequence.tokens, tokens):
                        raise FormatError(f"{path} holds other tokens than its name says")
                    self._prefixes.insert(sequence, prompt.owner)
                finally:
                    memory.close(sequence)
        except FormatError:
            self._health.count("refused")
            return 0
        except CapacityError:
            self._health.count("no_room")
            return 0
        self._health.count("fetched")
        self._health.count("fetched_bytes", _size_of(path))
        self._note(digest)
        self._load_drafts(digest, n_tokens, prompt.owner)
        return n_tokens

    def _load_drafts(self, digest: bytes, n_tokens: int, owner: Hashable) -> None:
        """Fetch what a drafter of another replica remembers of the same text. Without it, drafts may be worse."""
        if (texts := self._engine.drafted_texts) is None:
            return
        own = _digest_of_drafts(digest, texts)
        with self._health.asking():
            saved = texts.read(self._store.path(own, n_tokens)) if self._store.has(own, n_tokens) else None
        if saved is not None:
            with self._engine.lock:
                texts.add(saved, owner)

    # The methods below store sequences.

    def pack(self, prompt: TokenPrompt) -> tuple[Stand, Callable[[], None]] | None:
        """Copy the sequence up to the end of a prompt's reply out of the memory.

        Return None if storing the sequence is not worthwhile.

        Returns:
            The new stand of the session, and a function that stores the copy.
        """
        tokens = prompt.array()
        with self._engine.lock:
            found = self._prefixes.checkpoints_behind(tokens, prompt.owner)
            found = found or [m for m in self._prefixes.checkpoints_of(tokens, prompt.owner) if m.length == len(tokens)]
            is_worth = bool(found) and found[-1].length >= self._least_tokens
            return self._pack(found[-1], prompt.owner) if is_worth else None

    def _pack(self, mark: Sequence, owner: Hashable) -> tuple[Stand, Callable[[], None]] | None:
        try:
            ((n_tokens, digest),) = digests_at(mark.tokens, [mark.length], owner)
            stand = Stand(digest.hex(), n_tokens)
            if digest in self._stored:
                return stand, lambda: None
            write = self._engine.memory.archive.pack(mark)
            texts = self._engine.drafted_texts
            drafts = None if texts is None else texts.pack(mark.tokens, owner)
        except (
            SequenceError,
            OSError,
            FormatError,
        ):  # The checkpoint was closed, or the file to which it was swapped out is gone.
            return None

        def store() -> None:
            self._write(digest, n_tokens, write)
            if texts is not None and drafts is not None:
                with self._health.asking():
                    self._store.write(_digest_of_drafts(digest, texts), n_tokens, drafts)

        return stand, store

    def _write(self, digest: bytes, n_tokens: int, write: Callable[[str], None]) -> None:
        with self._health.asking():
            self._store.write(digest, n_tokens, write)
        self._health.count("stored")
        self._health.count("stored_bytes", _size_of(self._store.path(digest, n_tokens)))
        self._note(digest)

    def _note(self, digest: bytes) -> None:
        with self._lock:
            self._stored[digest] = None
            while len(self._stored) > _MOST_KNOWN:
                del self._stored[next(iter(self._stored))]

    # The methods below are about prefixes that sessions share.

    def share(self) -> None:
        """Store prefixes at whose ends several prompts differ, and load such prefixes from other replicas.

        Raises OSError.
        """
        with self._health.asking():
            self._hot = self._store.hot()
        with self._engine.lock:
            shared = [p for p in self._prefixes.resumable() if p.is_shared and p.n_tokens >= self._least_tokens]
        for prefix in shared:
            if prefix.digest in self._hot:
                continue
            with self._engine.lock:
                packed = self._pack(prefix.checkpoint, prefix.owner)
            if packed is not None:
                packed[1]()
                with self._health.asking():
                    self._store.mark_hot(prefix.digest, prefix.n_tokens)

    def sweep(self) -> int:
        """Remove sequences that are too old, or that exceed the quota. Raises OSError."""
        with self._health.asking():
            n_bytes = self._store.sweep()
        self._hot = {}
        self._stored.clear()
        return n_bytes


def _digest_of_drafts(digest: bytes, texts: RememberedTexts) -> bytes:
    """Return the digest under which the store has what such a drafter remembers of a text with this digest."""
    return hashlib.sha256(digest + texts.prefixes.memory.archive.signature.encode()).digest()[: len(digest)]


def _size_of(path: str) -> int:
    """Return the bytes of a file. Return 0 for a URL, whose size only the store knows."""
    place = local_place(path)
    try:
        return Path(place).stat().st_size if place is not None else 0
    except OSError:
        return 0
