"""Keeps cached checkpoints outside of the budget, in host memory and files, and brings them back."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from hybridmem.memory.errors import CapacityError
from hybridmem.memory.hybrid import HybridMemory
from hybridmem.memory.interface import Sequence
from hybridmem.memory.prefix.eviction_rank import Ranking
from hybridmem.memory.prefix.lookup import Tier
from hybridmem.memory.views.counters import CountedSwaps

_DROPPED_SHARE = 64
"""Checkpoints are closed until 1/64 of `max_bytes` is free, even if less is missing.

Finding those of least worth means looking at all of them, so each search should free some reserve.
"""


class Outside:
    """Moves checkpoints of a prefix cache out of its memory's budget, where that pays, and back.

    Attributes:
        ranking: ranks the checkpoints that are outside.
        n_moved, n_returned: how many checkpoints were moved out so far, and how many were moved back.
        seconds_a_token: the time to compute a token of a prompt again, if the cache's user has measured it. If it is
            known, a checkpoint that takes longer to read back than to compute is not kept.
    """

    def __init__(self, memory: HybridMemory, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.ranking = Ranking()
        self.n_moved = self.n_returned = 0
        self.seconds_a_token: float | None = None
        self._memory = memory
        self._drop: Callable[[Sequence], None] | None = None
        self._clock = 0
        self._returning: Sequence | None = None
        self._reclaimer = _reclaimer(weakref.ref(self))
        if max_bytes:
            self._tiers.reclaimers.append(self._reclaimer)

    @property
    def _tiers(self) -> CountedSwaps:
        # The swap files are looked up each time, because only the memory decides how long they live.
        return self._memory.counters.swaps

    @property
    def has_any(self) -> bool:
        return len(self.ranking) > 0

    def take(
        self, checkpoint: Sequence, relatives: list[Sequence], saved: int, clock: int, drop: Callable[[Sequence], None]
    ) -> bool:
        """Move a checkpoint out of the budget.

        Return False, with nothing changed, if that does not pay or there is no room.

        Args:
            relatives: checkpoints in the budget that share blocks with this one.
            saved: how many tokens the checkpoint saves.
            clock: the current time by the rankings' clock.
            drop: a function that closes a checkpoint outside and forgets it, to make room.
        """
        if not self.max_bytes:
            return False  # This test comes first, because counting bytes takes longer than closing a checkpoint.
        self._drop, self._clock = drop, clock
        n_bytes = self._memory.private_bytes(checkpoint)
        if n_bytes > self.max_bytes or not self._pays(saved, n_bytes):
            return False
        try:
            missing_bytes = sum(self._memory.counters.swapped_bytes) + n_bytes - self.max_bytes
            if missing_bytes > 0 and not self.reclaim(missing_bytes):
                return False
            self._memory.swap_out(checkpoint, relatives=relatives)
        except (CapacityError, OSError):
            return False
        self.n_moved += 1
        return True

    def add(self, checkpoint: Sequence, saved: int, clock: int, priority: float) -> None:
        """Rank a checkpoint that is outside."""
        self.ranking.add(checkpoint, saved, self._tiers.held_bytes_of(checkpoint), priority)
        self.ranking.use(checkpoint, clock)

    def reset(self) -> None:
        """Forget all ranked checkpoints."""
        self.ranking, self._returning = Ranking(), None

    def _pays(self, saved: int, n_bytes: int) -> bool:
        """True unless reading `n_bytes` back is known to take longer than computing `saved` tokens again."""
        seconds_a_byte = self._tiers.seconds_a_byte
        if self.seconds_a_token is None or seconds_a_byte is None:
            return True
        return n_bytes * seconds_a_byte < saved * self.seconds_a_token

    def reclaim(self, missing_bytes: int) -> bool:
        """Close checkpoints outside, those of least worth first, until `missing_bytes` are free.

        True if any checkpoint was closed.
        """
        if self._drop is None:
            return False
        wanted_bytes = max(missing_bytes, self.max_bytes // _DROPPED_SHARE)
        chosen, n_promised = list[Sequence](), 0
        for checkpoint, n_bytes in self.ranking.ascending(self._clock, self._tiers.private_bytes_of):
            if n_promised >= (wanted_bytes if n_bytes else missing_bytes):
                break
            if checkpoint is not self._returning:
                chosen.append(checkpoint)
                n_promised += n_bytes
        for checkpoint in chosen:
            self._drop(checkpoint)
        return bool(chosen)

    def bring_back(self, checkpoint: Sequence) -> None:
        """Move a checkpoint back into the budget. Raises CapacityError, FormatError or OSError with nothing changed."""
        self._returning = checkpoint
        try:
            self._memory.swap_in(checkpoint)
        finally:
            self._returning = None
        self.ranking.remove(checkpoint)
        self.n_returned += 1

    def fetch(self, checkpoint: Sequence) -> bool:
        """Begin to read a checkpoint's files in another thread. True if `bring_back` need not wait for any of them."""
        return self._tiers.fetch(checkpoint.slot)

    def tier_of(self, checkpoint: Sequence) -> Tier:
        """Return where a checkpoint is."""
        if checkpoint not in self.ranking:
            return "budget"
        return "disk" if self._tiers.is_in_files(checkpoint.slot) else "host"

    def close(self) -> None:
        """Remove the function that full tiers call for room."""
        if self._reclaimer in self._tiers.reclaimers:
            self._tiers.reclaimers.remove(self._reclaimer)


def _reclaimer(outside: weakref.ref[Outside]) -> Callable[[int], bool]:
    """Return the function that full tiers call for room. It refers to `outside` only weakly."""

    def reclaim(missing_bytes: int) -> bool:
        return (living := outside()) is not None and living.reclaim(missing_bytes)

    return reclaim
