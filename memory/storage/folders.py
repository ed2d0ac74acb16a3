"""Keeps checkpoints of a memory in a folder, across restarts. Blocks that several checkpoints share are stored once.

    checkpoints.safetensors       the checkpoints, each with the one that it continues, and where its blocks are
    blocks-SHA256.safetensors     blocks that a checkpoint does not share with those before it; the name is their digest

A save writes new blocks first, then replaces the list as a whole, then removes the blocks that the list no longer
names. So any process can read the folder at any time, and a save that fails or is killed leaves the earlier content.
Loading reads only the list. A checkpoint's blocks are read when it is used.
"""

from __future__ import annotations

import os
import re
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.blocks.arrays import EMPTY, Int64s
from hybridmem.memory.blocks.holdings import Record
from hybridmem.memory.coordinator import Coordinator
from hybridmem.memory.errors import FormatError
from hybridmem.memory.interface import Sequence
from hybridmem.memory.sequences.batch import read_saved_ids
from hybridmem.memory.sequences.folding import TailRules
from hybridmem.memory.storage.files import is_local, join_path, make_folder, read_path, write_blocks
from hybridmem.memory.storage.folder_writing import BlocksFile, Entry, FolderWriting
from hybridmem.memory.storage.local_files import alone_in, hold_folder, remove_abandoned
from hybridmem.memory.storage.names import Names, names_in_files
from hybridmem.memory.storage.parcels import Kept, Places
from hybridmem.memory.storage.reading import read_blocks
from hybridmem.memory.storage.signature import check_signature, check_weights, signature_of
from hybridmem.memory.storage.swapping import Swapping

CHECKPOINTS_FILE = "checkpoints.safetensors"
_MOST_BLOCKS = 1 << 24
"""The most blocks of one kind that a checkpoint may have. More blocks would hold some hundred million tokens."""
_NO_LOCK = nullcontext()
_BLOCKS = r"blocks-[0-9a-f]{64}\.safetensors"


class Folders:
    """Writes checkpoints of one memory to folders, and opens the checkpoints of a folder as swapped-out sequences."""

    def __init__(self, coordinator: Coordinator, swapping: Swapping, page_tokens: int, rules: TailRules) -> None:
        self._memory, self._swapping = coordinator, swapping
        self._page_tokens, self._rules = page_tokens, rules
        self._folders: dict[str, int | None] = {}  # Maps a local folder in use to the file descriptor that shares it.
        # For each checkpoint, the file that was written or read last.
        self._files = weakref.WeakKeyDictionary[Sequence, BlocksFile]()
        weakref.finalize(self, _release_all, self._folders, os.getpid())

    def save(
        self, folder: str | os.PathLike[str], entries: Iterable[Entry],
        lock: AbstractContextManager[object] = _NO_LOCK,
    ) -> int:  # fmt: skip
        """Write checkpoints of whole sequences to a folder, replacing those there. Return the bytes of all blocks.

        A checkpoint is left out if it is outside of the budget and its file is damaged, or if it was closed meanwhile.

        Args:
            lock: this call holds it while it reads the memory, but not while it writes files. The caller must not hold
                it.
        Raises SequenceError if a handle is bad, SpecError in a dry run or if `folder` is no folder, or OSError: then
        the folder holds what it held before. Cost: blocks that are not in the folder yet are copied, hashed and
        written.
        """
        place = read_path("folder", folder, "a folder, such as 'prefixes'")
        make_folder(place)
        with self._held(place):
            writing = FolderWriting(self._memory, self._swapping, place, self._files)
            with lock:
                waiting = deque(entries)
                for entry in waiting:
                    self._memory.ledger.check_usable(entry.checkpoint, to_advance=False, may_be_away=True)
            while waiting:
                with lock:
                    writing.copy(waiting)
                writing.write()
            about = {
                "signature": signature_of(self._memory.spec, self._page_tokens, self._rules),
                "model": self._memory.spec.model,
                "weights": self._memory.spec.weights,
                "entries": writing.entries,
                "tokens": np.concatenate([EMPTY, *writing.tokens]),
            }
            write_blocks(join_path(place, CHECKPOINTS_FILE), {}, about)
            with lock:
                needed = writing.names | self._memory.swapped.other_files
            self._clean(place, needed)
            return writing.n_bytes

    def _clean(self, place: str, names: set[str]) -> None:
        """Remove blocks that the list does not name, and half-written files of killed processes.

        If others read the folder, or write to it, its old blocks stay. The next save removes them.
        """
        if not is_local(place):
            # Another process may be reading or writing there. In a store, users must remove old files themselves.
            return
        remove_abandoned(Path(place), f"{_BLOCKS}|{re.escape(CHECKPOINTS_FILE)}")
        with alone_in(self._folders[place]) as is_alone:
            for name in os.listdir(place) if is_alone else ():  # noqa: PTH208 - names are all that is wanted
                if re.fullmatch(_BLOCKS, name) and name not in names:
                    (Path(place) / name).unlink(missing_ok=True)

    @contextmanager
    def _held(self, place: str) -> Iterator[None]:
        """Share a local folder with other processes while the block runs, so that none removes files unknown to it."""
        is_new = place not in self._folders and is_local(place)
        if is_new:
            self._folders[place] = hold_folder(place)
        try:
            yield
        finally:
            if is_new and (descriptor := self._folders.pop(place)) is not None:
                os.close(descriptor)

    def load(self, folder: str | os.PathLike[str], made: list[Sequence]) -> list[Entry]:
        """Open the checkpoints of a folder as swapped-out sequences. Their blocks are read when they are used.

        Args:
            made: a list to which each checkpoint is added before it is opened. After an exception, the caller finds the
                checkpoints there.

        Raises FormatError if there is no such folder, or if its list is damaged or comes from a memory with another
        signature. Then nothing has changed. Cost: reading the list. Leading tokens that several checkpoints have in
        common are in host memory once.
        """
        place = read_path("folder", folder, "the folder of saved checkpoints", FormatError)
        path = join_path(place, CHECKPOINTS_FILE)
        if is_local(place) and place not in self._folders and Path(place).is_dir():
            # The folder stays shared from now on, because its blocks are read later.
            self._folders[place] = hold_folder(place)
        _, about = read_blocks(path)
        check_signature(path, about, self._memory.spec, self._page_tokens, self._rules)
        check_weights(path, about, self._memory.spec)
        try:
            with self._memory.lock:
                self._memory.mend()
                with self._memory.journal.change():
                    entries = _Reading(self._memory, place, about, self._files).open()
                    made.extend(entry.checkpoint for entry in entries)
                    return entries
        except (AttributeError, LookupError, ValueError, TypeError, OverflowError) as error:
            raise FormatError(f"{path} contradicts itself ({error}); save the checkpoints again") from error


def _renamed(names: Names, sizes: dict[str, int], blocks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the blocks of a file under this memory's names.

    Raises FormatError if their sizes are not this memory's.
    """
    found = names.of_pools(blocks)
    for pool, own in found.items():
        if own.dtype != torch.uint8 or own.dim() != 2 or own.shape[1] != sizes.get(pool):
            raise FormatError(
                f"a file of saved checkpoints has blocks of {pool} of shape {tuple(own.shape)} in {own.dtype}, not "
                f"(n, {sizes.get(pool)}) bytes; save the checkpoints again"
            )
    return found


class _Reading:
    """Opens the checkpoints that a list describes."""

    def __init__(
        self, memory: Coordinator, place: str, about: dict[str, Any], files: MutableMapping[Sequence, BlocksFile]
    ) -> None:
        self._memory, self._place, self._files = memory, place, files
        self._entries: list[dict[str, Any]] = about["entries"]
        self._tokens: Int64s = about["tokens"]
        self._names = names_in_files(memory.layers).reversed
        self._sizes = {pool.name: pool.block_bytes for pool, _ in memory.layers.pools}

    def open(self) -> list[Entry]:
        """Open all checkpoints, inside a change that the caller has begun."""
        parents, places = [int(about["parent"]) for about in self._entries], self._places()
        if any(not -1 <= parent < i for i, parent in enumerate(parents)):
            raise ValueError("a checkpoint comes before the one that it goes on from")
        handles = self._with_tokens(parents)
        n_blocks = [dict.fromkeys(self._sizes, 0) for _ in parents]
        for of in places:
            for pool, (numbers, rows) in of.items():
                for number in np.unique(numbers).tolist():
                    n_blocks[number][pool] = max(n_blocks[number][pool], 1 + int(rows[numbers == number].max()))
        parcels = [
            None if about["file"] is None
            else self._memory.swapped.add_file(
                join_path(self._place, _file_name(about["file"])),
                sum(n * self._sizes[pool] for pool, n in count.items()),
                partial(_renamed, self._names, self._sizes),
            )
            for about, count in zip(self._entries, n_blocks, strict=True)
        ]  # fmt: skip
        for i, (handle, about, of) in enumerate(zip(handles, self._entries, places, strict=True)):
            own = {pool: np.stack([_numbers_of(parcels, at[0]), at[1]]) for pool, at in of.items()}
            held = Kept(self._records(about["records"]), own)
            self._memory.swapped.adopt(handle.slot, held)
            n_bytes = sum(at.shape[1] * self._sizes[pool] for pool, at in own.items())
            self._memory.ledger.send_away(handle.slot, int(about["horizon"]), n_bytes)
            wanted = {pool: at[0] == i for pool, at in of.items()}
            if about["file"] is not None and all(
                np.array_equal(at[1][wanted[pool]], np.arange(n_blocks[i][pool])) for pool, at in of.items()
            ):
                self._files[handle] = BlocksFile(self._place, about["file"], wanted)
        return [
            Entry(handle, parent, about["label"])
            for handle, parent, about in zip(handles, parents, self._entries, strict=True)
        ]

    def _horizon_of(self, entry: int, slot: int) -> int:
        return int(self._entries[entry]["horizon"])

    def _records(self, records: dict[str, Record]) -> dict[str, Record]:
        own = {self._names.records[name]: record for name, record in records.items()}
        if own.keys() != self._memory.layers.keys():
            raise ValueError(f"records of {sorted(own)}")
        return own

    def _places(self) -> list[Places]:
        """Return for each entry pool -> (2, n): for each block the entry whose file has it, and its row there."""
        places = list[Places]()
        for i, about in enumerate(self._entries):
            parent, own = int(about["parent"]), Places()
            for name, (n_shared, runs) in about["blocks"].items():
                pool = self._names.pools[name]
                before = places[parent][pool][:, :n_shared] if n_shared else np.zeros((2, 0), np.int64)
                own[pool] = np.concatenate([before, _from_runs(runs)], axis=1)
                if before.shape[1] != n_shared or (
                    own[pool].size and not 0 <= own[pool].min() <= own[pool][0].max() <= i
                ):
                    raise ValueError(f"blocks of checkpoint {i}")
            places.append(own)
        return places

    def _with_tokens(self, parents: list[int]) -> list[Sequence]:
        """Open all checkpoints with their tokens.

        If another checkpoint continues this one, both share a buffer of tokens.
        """
        ledger, n_tokens = self._memory.ledger, [int(about["n_tokens"]) for about in self._entries]
        bounds = np.cumsum([0, *(n - (n_tokens[p] if p >= 0 else 0) for n, p in zip(n_tokens, parents, strict=True))])
        own = [self._tokens[begin:end] for begin, end in pairwise(bounds.tolist())]
        handles, roots = dict[int, Sequence](), dict[int, int]()
        for leaf in sorted(range(len(parents)), key=n_tokens.__getitem__, reverse=True):
            if leaf in handles:
                continue
            path = [leaf]
            while (above := parents[path[-1]]) >= 0:
                path.append(above)
            writer = ledger.open(lineage=roots.get(path[-1]))
            roots.setdefault(path[-1], writer.lineage)
            tokens = np.concatenate([own[i] for i in reversed(path)])
            peak = int(self._entries[leaf]["peak"])
            spec = self._memory.spec
            ledger.restore(writer.slot, read_saved_ids(tokens, spec.vocab_size, spec.soft_tokens), peak)
            if len(tokens) != n_tokens[leaf]:
                raise ValueError(f"{len(tokens)} tokens of checkpoint {leaf}")
            for i in path:
                if i in handles:
                    break
                ledger.truncate(writer.slot, n_tokens[i])
                ledger.peaks[writer.slot] = int(self._entries[i]["peak"])
                handles[i] = ledger.open(lineage=writer.lineage, is_checkpoint=True)
                ledger.copy([writer], [handles[i]], partial(self._horizon_of, i))
                ledger.check_slot(handles[i].slot)
            ledger.close(writer)
        return [handles[i] for i in range(len(parents))]


def _from_runs(runs: list[list[int]]) -> Int64s:
    """Return the places (2, n) that `_as_runs` has encoded."""
    if any(not 0 <= n <= _MOST_BLOCKS for _, _, n in runs):
        raise ValueError(f"runs of blocks {runs!r:.80}")
    parts = [np.stack([np.full(n, entry), first + np.arange(n)]) for entry, first, n in runs]
    return np.concatenate([np.zeros((2, 0), np.int64), *parts], axis=1)


def _numbers_of(parcels: list[int | None], entries: Int64s) -> Int64s:
    """Return the parcel of each entry. Raises ValueError for an entry without a parcel."""
    table = np.array([-1 if parcel is None else parcel for parcel in parcels], np.int64)
    numbers = table[entries]
    if (numbers < 0).any():
        raise ValueError("blocks of a checkpoint that has no file")
    return numbers


def _file_name(name: str) -> str:
    if not re.fullmatch(_BLOCKS, name):
        raise ValueError(f"file {name!r}")
    return name


def _release_all(folders: dict[str, int | None], process: int) -> None:
    for descriptor in folders.values() if os.getpid() == process else ():
        if descriptor is not None:
            os.close(descriptor)
