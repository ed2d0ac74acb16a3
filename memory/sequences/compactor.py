"""Makes one large free range out of free bytes that lie apart, by moving blocks that no open step reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.compaction import cheapest_region, compact
from hybridmem.memory.blocks.layout import BlockLayout
from hybridmem.memory.blocks.pool import BlockPool
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.interface import OpenStep, Stretch
from hybridmem.memory.sequences.ledger import Ledger

_MOST_MOVED = 40
"""The most bytes that may move for each byte asked for.

By the bound in `memory.blocks.compaction`, 2 x 19 are enough if a 20th of the budget is free beyond the bytes asked
for.
"""


class Holders(Protocol):
    """Declares what is read of the layer memories of one store. `memory.layer_memories.LayerMemories` has more."""

    def bytes_for(self, stretch: Stretch) -> Int64s: ...
    def held_bytes(self, *slots: int) -> int: ...

    @property
    def pools(self) -> Iterator[tuple[BlockPool, BlockLayout]]: ...
    def blocks_of(self, slot: int) -> dict[str, Int64s]: ...


class Compactor:
    """Moves blocks of one store.

    Attributes:
        layers, store: where the blocks are.
        moved_bytes: how many bytes have moved so far.
    Args:
        open_steps: the memory's open steps, whose plans hold addresses.
    """

    def __init__(self, layers: Holders, store: Store, ledger: Ledger, open_steps: Mapping[OpenStep, Any]) -> None:
        self.moved_bytes = 0
        self.layers, self.store, self._ledger, self._open_steps = layers, store, ledger, open_steps

    def make_room(self, n_bytes: int, *, at_any_cost: bool) -> bool:
        """Move blocks until a free range has at least `n_bytes`. True if any block has moved.

        Args:
            at_any_cost: move as many bytes as it takes. If False, move at most a fixed multiple of `n_bytes`.
        """
        region = cheapest_region(self.store, n_bytes, self._fixed_addresses())
        if region is None or (region.used_bytes > _MOST_MOVED * n_bytes and not at_any_cost):
            return False
        compact(self.store, [pool for pool, _ in self.layers.pools], region)
        self.moved_bytes += region.used_bytes
        return True

    def _fixed_addresses(self) -> Int64s:
        """Return the addresses of blocks that an open step may have read. If no step is open, there are none.

        These are all blocks except those to which only sequences outside of steps refer. Cost: O(blocks of all
        sequences).
        """
        if not self._open_steps:
            return np.zeros(0, np.int64)
        is_busy, slots = self._ledger.is_busy, list(self._ledger.handles)
        fixed = {pool.name: pool.counts > 0 for pool, _ in self.layers.pools}
        # Busy sequences come second, so that blocks to which both busy and idle sequences refer end up as fixed.
        for busy in (False, True):
            for slot in slots:
                if is_busy[slot] == busy:
                    for name, ids in self.layers.blocks_of(slot).items():
                        fixed[name][ids] = busy
        return np.concatenate([pool.addresses[fixed[pool.name]] for pool, _ in self.layers.pools])
