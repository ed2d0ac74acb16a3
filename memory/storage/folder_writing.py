"""Writes checkpoints and their blocks to a folder, and makes the folder's list; see `memory.storage.folders`."""

from __future__ import annotations

import hashlib
import warnings
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from torch import Tensor

from hybridmem.memory.blocks.arrays import EMPTY, Bools, Int64s
from hybridmem.memory.coordinator import Coordinator
from hybridmem.memory.errors import FormatError
from hybridmem.memory.interface import Sequence
from hybridmem.memory.storage.files import join_path, list_names, write_blocks
from hybridmem.memory.storage.names import names_in_files
from hybridmem.memory.storage.parcels import Places, count_bytes
from hybridmem.memory.storage.swapping import Swapping

LOT_BYTES = 64 << 20
"""How many bytes of blocks are copied, while other threads wait for the memory, before they are written."""


@dataclass(frozen=True)
class Entry:
    """Describes a checkpoint in a folder.

    Attributes:
        parent: the number of the entry whose tokens this one continues; -1 for none. Parents come before their
            children.
        label: what the folder's user stores about the checkpoint, as JSON values.
    """

    checkpoint: Sequence
    parent: int
    label: Any


@dataclass(frozen=True)
class BlocksFile:
    """Lists the blocks of a checkpoint that are in a file of a folder, in the file's order.

    Neither the file nor these blocks change.
    """

    place: str
    name: str
    wanted: dict[str, Bools]

    def holds(self, place: str, wanted: dict[str, Bools]) -> bool:
        return self.place == place and all(np.array_equal(of, self.wanted[pool]) for pool, of in wanted.items())


class FolderWriting:
    """Writes the blocks of checkpoints one after the other, each block once, and collects their places for the list.

    It works in lots. `copy` reads the memory, which no other thread may change meanwhile. `write` does the slower part,
    and does not need the memory.
    """

    def __init__(
        self, memory: Coordinator, swapping: Swapping, place: str, files: MutableMapping[Sequence, BlocksFile]
    ) -> None:
        self.entries: list[dict[str, Any]] = []
        self.tokens: list[Int64s] = []
        self.names: set[str] = set()
        self.n_bytes = 0
        self._memory, self._swapping, self._place, self._files = memory, swapping, place, files
        self._sizes = {pool.name: pool.block_bytes for pool, _ in memory.layers.pools}
        self._names_in_files = names_in_files(memory.layers)
        # For each entry: pool -> (2, n), for each block the entry whose file has it, and its row in that file.
        self._written: list[Places] = []
        # For each entry: keys by which the blocks of this memory can be recognized.
        self._keys: list[dict[str, Int64s]] = []
        self._known: dict[tuple[str, int], tuple[int, int]] = {}
        self._there = set(list_names(place))
        self._checkpoints: list[Sequence] = []  # These are the checkpoints of the entries.
        self._numbers: list[int] = []  # Maps each given entry to the number of its written entry, or -1.
        # These entries were copied, but are not written yet.
        self._copied: list[tuple[int, dict[str, Bools], dict[str, Tensor]]] = []

    def copy(self, waiting: deque[Entry]) -> None:
        """Take some of the waiting entries, and copy those of their blocks that no earlier entry has.

        A checkpoint that is damaged or closed is left out. Its children then continue from its parent.
        """
        self._know_again()
        n_bytes = 0
        while waiting and n_bytes < LOT_BYTES:
            entry = waiting.popleft()
            parent = -1 if entry.parent < 0 else self._numbers[entry.parent]
            try:
                number = parent if entry.checkpoint.closed else self._add(replace(entry, parent=parent))
            except FormatError as error:
                warnings.warn(f"{entry.checkpoint!r} is not saved: {error}", stacklevel=3)
                number = parent
            self._numbers.append(number)
            n_bytes = sum(count_bytes(blocks) for _, _, blocks in self._copied)

    def write(self) -> None:
        """Write the copied entries. Raises OSError."""
        for number, wanted, blocks in self._copied:
            if (name := self._write(blocks)) is not None:
                self._note(number, name, wanted)
        self._copied.clear()

    def _know_again(self) -> None:
        """Find out anew which blocks of the memory earlier entries have: some were freed, moved or used again."""
        self._known.clear()
        for number, checkpoint in enumerate(self._checkpoints):
            keys = {} if checkpoint.closed else self._swapping.block_keys(checkpoint)
            self._keys[number] = keys
            for pool, own in keys.items():
                places = self._written[number][pool]
                self._known |= {(pool, key): tuple(at) for key, at in zip(own.tolist(), places.T.tolist(), strict=True)}

    def _note(self, number: int, name: str, wanted: dict[str, Bools]) -> None:
        """Remember that a file holds the wanted blocks of an entry."""
        self.entries[number]["file"] = name
        self._files[self._checkpoints[number]] = BlocksFile(self._place, name, wanted)
        self.names.add(name)
        self.n_bytes += sum(int(of.sum()) * self._sizes[pool] for pool, of in wanted.items())

    def _add(self, entry: Entry) -> int:
        """Copy those blocks of an entry that earlier entries do not have.

        Return the entry's number. Raises FormatError if the entry is damaged.
        """
        memory, number = self._memory, len(self.entries)
        slot = entry.checkpoint.slot
        keys, parent = self._swapping.block_keys(entry.checkpoint), entry.parent
        places, wanted, n_shared = Places(), dict[str, Bools](), dict[str, int]()
        for pool, own in keys.items():
            before = self._keys[parent].get(pool, EMPTY) if parent >= 0 else EMPTY
            n = min(len(own), len(before))
            differs = (own[:n] != before[:n]).nonzero()[0]
            n_shared[pool] = n = int(differs[0]) if len(differs) else n
            places[pool] = np.full((2, len(own)), -1, np.int64)
            if n:
                places[pool][:, :n] = self._written[parent][pool][:, :n]
            for i, key in enumerate(own[n:].tolist(), n):
                places[pool][:, i] = self._known.get((pool, key), (-1, -1))
            wanted[pool] = places[pool][0] < 0
        file = self._files.get(entry.checkpoint)
        is_there = file is not None and file.name in self._there and file.holds(self._place, wanted)
        nothing = {pool: np.zeros_like(of) for pool, of in wanted.items()}
        snapshot = self._swapping.snapshot(slot, nothing if is_there else wanted)
        for pool, is_new in wanted.items():
            places[pool][:, is_new] = np.full(is_new.sum(), number), np.arange(is_new.sum())
            self._known |= {(pool, key): (number, i) for i, key in enumerate(keys[pool][is_new].tolist())}
        self._written.append(places)
        self._keys.append(keys)
        record, n_before = memory.ledger.record(slot), 0 if parent < 0 else self.entries[parent]["n_tokens"]
        self.tokens.append(record["tokens"][n_before:].copy())
        renamed = self._names_in_files
        self.entries.append(
            {
                "parent": parent, "label": entry.label, "n_tokens": len(record["tokens"]), "peak": record["peak"],
                "horizon": entry.checkpoint.horizon, "file": None,
                "records": {renamed.records[own]: of for own, of in snapshot.records.items()},
                "blocks": {
                    renamed.pools[pool]: [n_shared[pool], _as_runs(of[:, n_shared[pool] :])]
                    for pool, of in places.items()
                },
            }
        )  # fmt: skip
        self._checkpoints.append(entry.checkpoint)
        if file is not None and is_there:
            self._note(number, file.name, wanted)
        elif snapshot.blocks:
            self._copied.append((number, wanted, snapshot.blocks))
        return number

    def _write(self, blocks: dict[str, Tensor]) -> str | None:
        """Write blocks to a file, unless it exists. Return the file's name, or None if there are no blocks."""
        if not blocks:
            return None
        blocks = self._names_in_files.of_pools(blocks)
        digest = hashlib.sha256()
        for pool, own in sorted(blocks.items()):
            digest.update(f"{pool} {tuple(own.shape)} ".encode())
            digest.update(own.contiguous().numpy().data if not own.is_meta else b"")
        name = f"blocks-{digest.hexdigest()}.safetensors"
        if name not in self._there:
            write_blocks(join_path(self._place, name), blocks, {})
        return name


def _as_runs(places: Int64s) -> list[list[int]]:
    """Return places (2, n) as runs of consecutive rows of one file: [entry, first row, number of rows]."""
    if not places.shape[1]:
        return []
    breaks = ((places[0][1:] != places[0][:-1]) | (places[1][1:] != places[1][:-1] + 1)).nonzero()[0] + 1
    bounds = [0, *breaks.tolist(), places.shape[1]]
    return [[int(places[0][begin]), int(places[1][begin]), end - begin] for begin, end in pairwise(bounds)]
