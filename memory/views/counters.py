"""Counts bytes of a memory that are in use, swapped out, needed or shared, for planners and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from hybridmem.memory.blocks.arguments import read_count
from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.errors import BUDGET_UNIT, CapacityError, SpecError
from hybridmem.memory.interface import Sequence, Stretch
from hybridmem.memory.sequences.compactor import Holders
from hybridmem.memory.sequences.ledger import Ledger
from hybridmem.memory.sequences.locking import MemoryLock
from hybridmem.memory.sequences.room import Need, Room, need_of
from hybridmem.memory.views.usage import Inventory, Usage, measure

_MOST_TOKENS = 1 << 40
"""The most tokens of a plan. The bytes of a longer plan would not fit into 64 bits."""


class CountedLayers(Holders, Protocol):
    """Declares what the counters read of the layer memories. `memory.layer_memories.LayerMemories` has more."""

    @property
    def least_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> Mapping[str, int]: ...
    def private_bytes(self, slots: Int64s) -> Int64s: ...


class CountedSwaps(Protocol):
    """Declares what the counters read of swaps: a part of `memory.storage.tiers.Tiers`."""

    n_to_host: int
    n_to_disk: int
    n_back: int
    seconds_a_byte: float | None
    reclaimers: list[Callable[[int], bool]]

    @property
    def used_bytes(self) -> tuple[int, int]: ...
    def __len__(self) -> int: ...
    def held_bytes_of(self, sequence: Sequence) -> int: ...
    def private_bytes_of(self, sequences: list[Sequence]) -> Int64s: ...
    def is_in_files(self, slot: int) -> bool: ...
    def fetch(self, slot: int) -> bool: ...


class Counted(Protocol):
    """Declares what the counters read of a memory. `memory.coordinator.Coordinator` has more."""

    store: Store
    ledger: Ledger
    room: Room
    layers: Any
    swapped: Any
    lock: MemoryLock

    def mend(self) -> None: ...
    def inventory(self, *sequences: Sequence) -> Inventory: ...
    def host_inventory(self, *sequences: Sequence) -> Inventory | None: ...


class Counters:
    """Counts the bytes of a memory. A count costs O(1) unless its docstring says otherwise."""

    def __init__(self, memory: Counted) -> None:
        self._owner = memory

    @property
    def _memory(self) -> Counted:
        """Return the memory, after finishing or undoing what an exception has left half done."""
        self._owner.mend()
        return self._owner

    @property
    def _layers(self) -> CountedLayers:
        layers: CountedLayers = self._memory.layers
        return layers

    # The methods below count bytes in use now.

    @property
    def budget_bytes(self) -> int:
        """Return the most bytes that the memory may use, a multiple of 64."""
        return self._memory.store.arena.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """Return the bytes of the budget that are free."""
        return self._memory.store.arena.free_bytes

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the budget in use."""
        return self._memory.store.arena.used_bytes

    @property
    def moved_bytes(self) -> int:
        """Return how many bytes of the budget have been moved so far to join free ranges."""
        return self._memory.room.compactors[BUDGET_UNIT].moved_bytes

    def bytes_by_pool(self) -> dict[str, int]:
        """Return the bytes in use of each pool, like `usage().by_kind`, but faster. Cost: O(pools)."""
        return dict(self._layers.used_bytes)

    @property
    def token_bytes(self) -> int:
        """Return the bytes of all token ids in host memory. Cost: O(sequences)."""
        return self._memory.ledger.token_bytes

    @property
    def swaps(self) -> CountedSwaps:
        """Return how many swaps there were: out to host memory, out to new bytes in files, and back in.

        The result has these numbers as `n_to_host`, `n_to_disk` and `n_back`. Its `len` is the number of sequences that
        are swapped out now.
        """
        swaps: CountedSwaps = self._memory.swapped
        return swaps

    @property
    def swapped_bytes(self) -> tuple[int, int]:
        """Return the bytes of swapped-out sequences: in host memory, and in files."""
        return self.swaps.used_bytes

    # These methods count the bytes of single sequences.

    def held_bytes(self, sequence: Sequence) -> int:
        """Return the bytes of blocks to which a sequence or checkpoint refers, shared or not. Raises SequenceError."""
        self._memory.ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        return self._layers.held_bytes(sequence.slot)

    def private_bytes(self, sequences: list[Sequence]) -> Int64s:
        """Return (S,) the bytes that closing each of these sequences alone would free.

        Raises SequenceError. Cost: for many sequences little more than for one.
        """
        for sequence in sequences:
            self._memory.ledger.check_usable(sequence, to_advance=False, may_be_away=True)
        return self._layers.private_bytes(np.array([sequence.slot for sequence in sequences], np.int64))

    def checkpoints(self, sequence: Sequence) -> list[Sequence]:
        """Return the checkpoints in the budget to which a sequence's family can return, oldest first.

        Raises SequenceError. Cost: O(sequences).
        """
        self._memory.ledger.check_open(sequence)
        return self._memory.ledger.checkpoints(sequence)

    def inventory(self, *sequences: Sequence) -> Inventory:
        """Return all blocks, and which of them these sequences (or all) refer to. It is valid until the memory changes.

        `usage` counts the inventory's bytes, and `memory.pictures` draws it. Raises SequenceError if a sequence is
        closed or belongs to another memory.
        """
        for sequence in sequences:
            self._memory.ledger.check_open(sequence)
        return self._memory.inventory(*sequences)

    def host_inventory(self, *sequences: Sequence) -> Inventory | None:
        """Return the inventory of pages in host memory and of the sequences whose pages are there.

        None without `host_pages`.
        """
        return self._memory.host_inventory(*sequences)

    @property
    def lock(self) -> MemoryLock:
        """Return the lock of the memory's books.

        While a thread holds it, all counts of this object describe the same moment.
        """
        return self._memory.lock

    def version(self) -> object:
        """Return a value that changes whenever bytes, sequences or their lengths change. Cost: O(slots)."""
        with self.lock:
            ledger = self._memory.ledger
            newest = next(reversed(ledger.handles.values()), None)
            newest_id = -1 if newest is None else newest.id
            return self.used_bytes, self.swapped_bytes, len(ledger.handles), newest_id, ledger.lengths.tobytes()

    def usage(self) -> Usage:
        """Return what `HybridMemory.usage` returns."""
        with self.lock:
            return measure(self.inventory(), self.swapped_bytes, self.host_inventory(), self.token_bytes)

    # The methods below count bytes that will be needed.

    @property
    def least_bytes(self) -> int:
        """Return the smallest budget for a memory of this kind, in which one sequence can take a step of one token."""
        return self._layers.least_bytes

    def needed_bytes(self, n_tokens: int, *, n_held: int = 0, max_tokens: int = 512) -> int:
        """Return the bytes of a budget that feeding one sequence needs; see `HybridMemory.needed_bytes`."""
        for name, value, least in (("n_tokens", n_tokens, 1), ("n_held", n_held, 0), ("max_tokens", max_tokens, 1)):
            if read_count(name, value, least, "tokens") > _MOST_TOKENS:
                raise SpecError(f"{name}={value!r}; give at most {_MOST_TOKENS:,} tokens")
        return self._need(n_tokens, n_held, max_tokens, on_grid=self._memory.room.on_grid).total_bytes

    def require_possible(self, n_tokens: int, *, n_held: int = 0, max_tokens: int = 512) -> None:
        """Raise CapacityError if the whole budget is too small for a sequence of this many tokens.

        The check assumes that steps may be cut anywhere. Any thread may call it.
        """
        need = self._need(n_tokens, n_held, max_tokens, on_grid=False)
        if need.total_bytes > self.budget_bytes:
            raise self._memory.room.refusal(need)

    def require_room(self, sequences: list[Sequence], counts: Int64s, max_tokens: int) -> None:
        """Raise CapacityError, which names bytes, unless these sequences have room for counts (S,) more tokens.
        Optional checkpoints are closed if that makes room.
        """
        self._memory.room.require(sequences, counts, max_tokens)

    def lack_of_room(
        self, slots: Int64s, counts: Int64s, max_tokens: int, error: CapacityError | None = None
    ) -> CapacityError:  # fmt: skip
        """Return the error for a run that does not fit, with the bytes that all its requests need together.

        Args:
            error: the error of one of the run's steps, if one was refused.
        """
        return self._memory.room.lack(slots, counts, max_tokens, error)

    def bytes_at(self, n_tokens: int) -> int:
        """Return the bytes that a sequence of `n_tokens` tokens holds between steps if it shares no blocks."""
        return int(self._bytes_at(n_tokens)[0])

    def shared_bytes_at(self, n_tokens: int) -> int:
        """Return the bytes that forks of a sequence of this length share for ever: full pages, but no states."""
        return int(self._bytes_at(n_tokens)[3])

    def _bytes_at(self, n_tokens: int) -> Int64s:
        at = np.array([n_tokens])
        return self._layers.bytes_for(Stretch(np.array([-1]), at, at, at))[:, 0]

    def _need(self, n_tokens: int, n_held: int, max_tokens: int, *, on_grid: bool) -> Need:
        new, held = np.array([-1]), np.array([n_held])
        return need_of(self._layers, new, held, held, np.array([n_tokens]), max_tokens, on_grid=on_grid)
