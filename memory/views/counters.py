"""Counters of a memory: bytes in use, swapped out, needed and shared, for planners, schedulers and pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from memory.blocks.arrays import Int64s
from memory.blocks.store import Store
from memory.errors import CapacityError
from memory.interface import Sequence, Stretch
from memory.sequences.ledger import Ledger
from memory.sequences.room import Holders, Need, Room, need_of
from memory.views.usage import Inventory


class CountedLayers(Holders, Protocol):
    """What is counted of the layer memories: `memory.layer_memories.LayerMemories`."""

    @property
    def least_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> Mapping[str, int]: ...
    def private_bytes(self, slots: Int64s) -> Int64s: ...


class CountedSwaps(Protocol):
    """What is counted of swaps: `memory.storage.swap.Tiers`."""

    n_to_host: int
    n_to_disk: int
    n_back: int

    @property
    def used_bytes(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...


class Counted(Protocol):
    """What is counted of a memory: `memory.coordinator.Coordinator`."""

    store: Store
    ledger: Ledger
    room: Room
    layers: Any
    swapped: Any

    def inventory(self, *sequences: Sequence) -> Inventory: ...
    def host_inventory(self, *sequences: Sequence) -> Inventory | None: ...


class Counters:
    """Counts the bytes of a memory.
    Every count is read when it is asked for; none costs more than O(1) unless it says so.
    """

    def __init__(self, memory: Counted) -> None:
        self._memory = memory

    @property
    def _layers(self) -> CountedLayers:
        layers: CountedLayers = self._memory.layers
        return layers

    # Now

    @property
    def budget_bytes(self) -> int:
        """Bytes that the memory may use at most, in whole multiples of 64."""
        return self._memory.store.arena.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that nothing holds."""
        return self._memory.store.arena.free_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of the budget in use."""
        return self._memory.store.arena.used_bytes

    def bytes_by_pool(self) -> dict[str, int]:
        """Bytes in use by pool: as `usage().by_kind`, without looking at every sequence. Cost: O(pools)."""
        return dict(self._layers.used_bytes)

    @property
    def swaps(self) -> CountedSwaps:
        """Sequences swapped out so far, in host memory alone or so that files grew (`n_to_host`, `n_to_disk`), and
        swapped in (`n_back`).

        Its length is how many are swapped out now.
        """
        swaps: CountedSwaps = self._memory.swapped
        return swaps

    @property
    def swapped_bytes(self) -> tuple[int, int]:
        """Bytes of sequences that are swapped out: in host memory, and in files."""
        return self.swaps.used_bytes

    # Of sequences

    def held_bytes(self, sequence: Sequence) -> int:
        """Bytes of the budget that a sequence or a checkpoint refers to, shared with others or not.
        Raises SequenceError.
        """
        self._memory.ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        return self._layers.held_bytes(sequence.slot)

    def private_bytes(self, sequences: list[Sequence]) -> Int64s:
        """(S,) bytes that closing each of these alone would give back, for little more than asking for one.
        Raises SequenceError.
        """
        for sequence in sequences:
            self._memory.ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        return self._layers.private_bytes(np.array([sequence.slot for sequence in sequences], np.int64))

    def inventory(self, *sequences: Sequence) -> Inventory:
        """Which blocks these sequences, or all, refer to: what `usage` counts and `memory.pictures` draws.
        Valid until the memory changes.

        Raises SequenceError: a closed sequence, or one of another memory.
        """
        for sequence in sequences:
            self._memory.ledger.check_open(sequence)
        return self._memory.inventory(*sequences)

    def host_inventory(self, *sequences: Sequence) -> Inventory | None:
        """As `inventory`, of pages in host memory and of those sequences that have theirs there; None without
        `host_pages`.
        """
        return self._memory.host_inventory(*sequences)

    # Before they are there

    @property
    def least_bytes(self) -> int:
        """The smallest budget that a memory of this kind is made with: one sequence can take a step of one token."""
        return self._layers.least_bytes

    def needed_bytes(self, n_tokens: int, *, n_held: int = 0, max_tokens: int = 512) -> int:
        """See `HybridMemory.needed_bytes`."""
        return self._need(n_tokens, n_held, max_tokens).total_bytes

    def require_possible(self, n_tokens: int, *, n_held: int = 0, max_tokens: int = 512) -> None:
        """Raise CapacityError if this budget could never hold that. Arguments and cost as `needed_bytes`.
        From any thread.
        """
        need = self._need(n_tokens, n_held, max_tokens)
        if need.total_bytes > self.budget_bytes:
            raise self._memory.room.refusal(need)

    def require_room(self, sequences: list[Sequence], counts: Int64s, max_tokens: int) -> None:
        """Raise CapacityError, naming bytes, unless counts (S,) tokens of these fit; what is optional goes if that
        helps.
        """
        self._memory.room.require(sequences, counts, max_tokens)

    def lack_of_room(self, slots: Int64s, counts: Int64s, max_tokens: int) -> CapacityError:
        """That there is none for these requests, with the bytes that all of them need."""
        return self._memory.room.lack(slots, counts, max_tokens)

    def bytes_at(self, n_tokens: int) -> int:
        """Bytes that a sequence which shares none holds between steps when it has been fed so many tokens."""
        return int(self._bytes_at(n_tokens)[0])

    def shared_bytes_at(self, n_tokens: int) -> int:
        """Bytes that forks of such a sequence share however far each goes on: full pages, and no state."""
        return int(self._bytes_at(n_tokens)[3])

    def _bytes_at(self, n_tokens: int) -> Int64s:
        at = np.array([n_tokens])
        return self._layers.bytes_for(Stretch(np.array([-1]), at, at, at))[:, 0]

    def _need(self, n_tokens: int, n_held: int, max_tokens: int) -> Need:
        new, held = np.array([-1]), np.array([n_held])
        return need_of(self._layers, new, held, held, np.array([n_tokens]), max_tokens)
