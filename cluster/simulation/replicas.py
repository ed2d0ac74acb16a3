"""Simulates the cache of one replica: its checkpoints, their bytes, and the order in which they were last used.

The bytes are those of a dry memory of the model (`device="meta"`). A checkpoint holds its states, and the pages that it
shares with no other checkpoint. The engine's own cache weighs saved tokens against bytes; here, the least recently used
checkpoint is closed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hybridmem.defaults import ROLLBACK_WINDOW
from hybridmem.memory import HybridMemory, MemorySpec

_STEP_TOKENS = 64
_MOST_TOKENS = 1 << 15


@dataclass(frozen=True)
class Sizes:
    """Holds the bytes of a sequence at each multiple of a few tokens, from a dry memory.

    Attributes:
        whole: the bytes of a sequence alone, (n,). shared: how many of these bytes a longer sequence with the same
            beginning shares, (n,).
    """

    whole: NDArray[np.int64]
    shared: NDArray[np.int64]

    @staticmethod
    def of(spec: MemorySpec, *, rollback_window: int = ROLLBACK_WINDOW) -> Sizes:
        memory = HybridMemory(spec, "64GiB", device="meta", rollback_window=rollback_window)
        lengths = range(0, _MOST_TOKENS, _STEP_TOKENS)
        whole = [memory.counters.bytes_at(n) if n else 0 for n in lengths]
        shared = [memory.counters.shared_bytes_at(n) if n else 0 for n in lengths]
        return Sizes(np.array(whole), np.array(shared))

    def own_bytes(self, n_tokens: int, n_shared: int) -> int:
        """Return the bytes of a sequence of `n_tokens` tokens beyond its first `n_shared` tokens."""
        last = len(self.whole) - 1
        whole = self.whole[min(n_tokens // _STEP_TOKENS, last)]
        return int(whole - self.shared[min(n_shared // _STEP_TOKENS, last)])


class SimulatedCache:
    """Holds the checkpoints of one replica, by key, within a budget.

    Args:
        lost: is called with the key of each checkpoint that is closed for room.
    """

    def __init__(self, budget_bytes: int, lost: Callable[[bytes], None]) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        self._lost = lost

    def __contains__(self, key: bytes) -> bool:
        return key in self._kept

    def use(self, key: bytes) -> None:
        self._kept.move_to_end(key)

    def add(self, key: bytes, n_bytes: int) -> None:
        """Keep a checkpoint. The least recently used ones are closed to make room."""
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        self._kept[key] = n_bytes
        self.used_bytes += n_bytes
        while self.used_bytes > self.budget_bytes and len(self._kept) > 1:
            old, freed = self._kept.popitem(last=False)
            self.used_bytes -= freed
            self._lost(old)
