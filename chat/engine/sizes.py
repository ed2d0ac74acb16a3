"""Estimates how many bytes of the memory's budget generations take."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from hybridmem.chat.engine.requests import LEAST_CHUNK_TOKENS, Job
from hybridmem.memory import HybridMemory


class Sizes:
    """Computes a sequence's bytes from its length, and how many of them forks always share. Both are cached."""

    def __init__(self, memory: HybridMemory) -> None:
        self.budget_bytes = memory.budget_bytes
        self._of, self._shared = (
            lru_cache(maxsize=4096)(f) for f in (memory.counters.bytes_at, memory.counters.shared_bytes_at)
        )

    def of(self, n_tokens: int) -> int:
        return self._of(n_tokens)

    def more(self, job: Job) -> int:
        """Return the bytes that one more job is expected to take. A forked job shares the blocks of its prompt."""
        return self.of(job.expected_tokens) - (self._shared(job.n_reused) if job.is_forked else 0)

    def taken(self, jobs: Iterable[Job]) -> int:
        """Estimate the bytes of all these jobs together.

        Prompts that begin with the same tokens share the blocks that they reuse. Shared blocks count once.
        """
        prefixes: dict[object, int] = {}
        taken = 0
        for job in jobs:
            shared = self._shared(job.n_reused)
            taken += self.of(job.expected_tokens) - shared
            if shared:
                begin = job.request.owner, *job.tokens[:LEAST_CHUNK_TOKENS]
                prefixes[begin] = max(prefixes.get(begin, 0), shared)
        return taken + sum(prefixes.values())
