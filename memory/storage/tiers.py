"""Keeps swapped-out sequences in host memory and, when that is full, in files.

All blocks of a sequence are copied, including those that it shares with others. So it can be swapped in even if all
others are closed. There is one exception: blocks that it shares with checkpoints named as its relatives are copied once
for all of them. While one of these checkpoints is in the budget, swapping in refers to its blocks again instead of
copying them back.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from uuid import uuid4

import numpy as np
from torch import Tensor

from hybridmem.memory.blocks.arrays import Bools, Int64s
from hybridmem.memory.blocks.journal import Journal
from hybridmem.memory.errors import CapacityError
from hybridmem.memory.interface import Sequence
from hybridmem.memory.layer_memories import Leaving, Snapshot
from hybridmem.memory.storage.files import join_path, local_place, make_folder, remove_file, write_blocks
from hybridmem.memory.storage.local_files import share_folder
from hybridmem.memory.storage.parcels import (
    Blocks,
    Kept,
    Parcel,
    Places,
    Twins,
    as_keys,
    count_bytes,
    gather,
    live_keys,
)
from hybridmem.memory.storage.reading import read_blocks

_PREFIX = "swapped-"
_NAMES = rf"{_PREFIX}[0-9a-f]{{32}}\.safetensors"

_ODD = np.int64(0x9E3779B97F4A7C15 - (1 << 64))
"""The factor that spreads block ids over all 64-bit numbers."""

Copy = Callable[[dict[str, Bools]], Snapshot]
"""A function that takes masks of the wanted blocks of each pool, and returns a snapshot with only these blocks."""


class Tiers:
    """Keeps swapped-out sequences by slot, in host memory or in files. `len` returns their number.

    Attributes:
        n_to_host, n_to_disk: how many sequences were swapped out so far without new bytes in files, and how many with
            them.
        n_back: how many sequences were swapped in so far.
        seconds_a_byte: the time per byte that the last read took. None before the first read.
        reclaimers: functions that free optional bytes of these tiers before a sequence is refused for lack of room.
            Each takes the number of missing bytes, and returns True if it has freed any. `put` does not call them, but
            its caller does.

    Args:
        host_bytes: the most bytes that swapped-out sequences may take in host memory. None: there is no limit.
        disk_bytes: the same limit for files.
        folder: the folder of files, a path or a URL. When host memory is full, what was used least recently is moved
            there. None: there are no files. In a local folder, files of killed processes are removed when the first
            file is written, unless a running process has files there.
        journal: the memory's journal. It keeps what each slot holds. `rebuild` computes all other tables from it.
    """

    def __init__(
        self, host_bytes: int | None, folder: str | None, disk_bytes: int | None, journal: Journal
    ) -> None:  # fmt: skip
        self._journal = journal
        self.host_bytes, self.disk_bytes = host_bytes, disk_bytes
        self.folder = folder
        self.reclaimers: list[Callable[[int], bool]] = []
        self._held: dict[int, Kept] = {}
        self._twins: defaultdict[str, Twins] = defaultdict(Twins)  # Maps a pool to its twins.
        self._parcels: OrderedDict[int, Parcel] = OrderedDict()  # The least recently used parcels come first.
        self._numbers = count()
        self._used_host_bytes = self._file_bytes = 0
        self._has_joined = False
        self._reader: ThreadPoolExecutor | None = None
        self.n_to_host = self.n_to_disk = self.n_back = 0
        self.seconds_a_byte: float | None = None
        # Without this object nothing can be swapped in from the files, so they are removed together with it.
        weakref.finalize(self, _unlink_all, self._parcels, os.getpid())

    def __len__(self) -> int:
        return len(self._held)

    @property
    def used_bytes(self) -> tuple[int, int]:
        """Return the bytes in host memory, and the bytes in files."""
        return self._used_host_bytes, self._file_bytes

    # The methods below move sequences out.

    def put(self, leaving: Leaving, sizes: dict[str, int], copy: Copy, relatives: Iterable[Leaving] = ()) -> int:
        """Copy a slot's blocks, into host memory if they fit there. Return the number of copied bytes.

        Raises CapacityError if neither tier has room, before anything has changed. The caller may try again if a
        reclaimer has freed some bytes. If writing a file raises an error, no sequence is lost.

        Args:
            sizes: pool -> the bytes of a block.
            relatives: checkpoints in the arena that share blocks with this slot. They remember where these blocks are
                copied.
        """
        slot, relatives, file_bytes = leaving.slot, list(relatives), self._file_bytes
        live = {pool: live_keys(rows) for pool, rows in leaving.live.items()}
        places = {
            pool: self._twins[pool].places_of(ids, live[pool], self._are_kept) for pool, ids in leaving.ids.items()
        }
        missing = {pool: of[0] < 0 for pool, of in places.items()}
        n_bytes = sum(int(is_new.sum()) * sizes[pool] for pool, is_new in missing.items())
        self._make_room(n_bytes)
        snapshot = copy(missing)
        is_related = bool(relatives) or not all(is_new.all() for is_new in missing.values())
        numbers = self._pack(snapshot.blocks, apart=is_related)
        for pool, is_new in missing.items():
            if n := int(is_new.sum()):
                places[pool][:, is_new] = np.full(n, numbers[pool]), np.arange(n)
        self._hold(slot, Kept(snapshot.records, places))
        self.forget_twins(slot)
        for relative in relatives:
            self._introduce(relative, leaving.ids, live, places)
        self.n_to_disk += self._file_bytes > file_bytes
        self.n_to_host += self._file_bytes <= file_bytes
        return n_bytes

    def _are_kept(self, parcels: Int64s) -> Bools:
        return np.isin(parcels, np.fromiter(self._parcels, np.int64, len(self._parcels)))

    def _make_room(self, n_bytes: int) -> None:
        """Make room in host memory by moving the least recently used parcels into files. Raises CapacityError."""
        while n_bytes > self._free_host_bytes():
            oldest = next((parcel for parcel in self._parcels.values() if parcel.blocks), None)
            if self._fits_on_disk(n_bytes if oldest is None else oldest.n_bytes):
                if oldest is None:
                    # The blocks do not fit even into empty host memory, so `_pack` writes them to a file at once.
                    break
                self._to_file(oldest)
                self._used_host_bytes -= oldest.n_bytes
            else:
                free_bytes, used_bytes = int(max(0, self._free_host_bytes())), sum(self.used_bytes)
                raise CapacityError(
                    f"what the sequence holds, {n_bytes:,} bytes, does not fit into {free_bytes:,} bytes of host "
                    f"memory{self._files_are_full}; give the memory a larger host_budget, of "
                    f"{used_bytes + n_bytes:,} bytes, or {self._remedy}",
                    needed=n_bytes, free=free_bytes, capacity=self.host_bytes or 0,
                )  # fmt: skip

    @property
    def _files_are_full(self) -> str:
        return "" if self.folder is None else f" and {self._file_bytes:,} of {self.disk_bytes:,} in files are taken"

    @property
    def _remedy(self) -> str:
        return "a swap_dir" if self.folder is None else "a larger disk_budget"

    def _fits_on_disk(self, n_bytes: int) -> bool:
        if self.folder is None:
            return False
        return self.disk_bytes is None or self._file_bytes + n_bytes <= self.disk_bytes

    def _pack(self, blocks: Blocks, *, apart: bool) -> dict[str, int]:
        """Put blocks into a new parcel, or with `apart` into one parcel for each pool.

        Return the number of each pool's parcel.
        """
        numbers = dict[str, int]()
        try:
            for part in [{pool: own} for pool, own in blocks.items()] if apart else [blocks] if blocks else []:
                parcel, number = Parcel(part, count_bytes(part)), next(self._numbers)
                # The parcel is in the table first, so that `rebuild` finds its file if an exception comes.
                self._parcels[number] = parcel
                numbers |= dict.fromkeys(part, number)
                if parcel.n_bytes > self._free_host_bytes():
                    self._to_file(parcel)
                else:
                    self._used_host_bytes += parcel.n_bytes
        except BaseException:
            for number in set(numbers.values()):
                self._remove(number)
            self._count_bytes()
            raise
        return numbers

    def _hold(self, slot: int, held: Kept) -> None:
        self._journal.before(self._held.pop, slot, None)
        for number in held.parcels:
            self._parcels[number].n_holders += 1
        self._held[slot] = held

    def _introduce(self, relative: Leaving, ids: dict[str, Int64s], live: dict[str, Int64s], places: Places) -> None:
        """Let a checkpoint guard the blocks that it shares with a slot whose blocks are now copied to these places."""
        for pool, own in relative.ids.items():
            common, at, at_own = np.intersect1d(ids[pool], own, return_indices=True)
            is_same = live[pool][at] == live_keys(relative.live[pool][at_own])
            self._twins[pool].guard(
                relative.slot, common[is_same], live[pool][at[is_same]], places[pool][:, at[is_same]]
            )

    # The methods below move sequences back.

    def shared_with(self, slot: int) -> dict[str, Int64s]:
        """Return, for each block of a swapped-out slot, a block in the arena with the same bytes, or -1."""
        return {pool: self._twins[pool].ids_of(places) for pool, places in self._held[slot].places.items()}

    def get(self, slot: int, wanted: Mapping[str, Bools] | None = None) -> Snapshot:
        """Return a slot's snapshot, or only its wanted blocks. The slot stays swapped out.

        Raises FormatError if one of its files was damaged or removed.
        """
        held, read, blocks, started = self._held[slot], dict[int, Blocks](), dict[str, Tensor](), time.perf_counter()
        for pool, all_places in held.places.items():
            places = all_places if wanted is None else all_places[:, wanted[pool]]

            def blocks_of(number: int, pool: str = pool) -> Tensor:
                if number not in read:
                    read[number] = self._read(number)
                return read[number][pool]

            if (own := gather(places, blocks_of)) is not None:
                blocks[pool] = own
        if n_bytes := count_bytes(blocks):
            self.seconds_a_byte = (time.perf_counter() - started) / n_bytes
        return Snapshot(held.records, blocks)

    def _read(self, number: int) -> Blocks:
        parcel = self._parcels[number]
        self._parcels.move_to_end(number)
        if parcel.blocks:
            return parcel.blocks
        assert parcel.path is not None, "it is in a file"
        arriving, parcel.arriving = parcel.arriving, None
        return _read_file(parcel.path, parcel.rename) if arriving is None else arriving.result()

    def fetch(self, slot: int) -> bool:
        """Begin to read a slot's files in another thread.

        Return True if `get` would not have to wait for any of them.
        """
        waits = False
        for number in self._held[slot].parcels if slot in self._held else ():
            parcel = self._parcels[number]
            if parcel.blocks or parcel.path is None:
                continue
            if parcel.arriving is None:
                self._reader = self._reader or ThreadPoolExecutor(1, "swap files")
                parcel.arriving = self._reader.submit(_read_file, parcel.path, parcel.rename)
            waits |= not parcel.arriving.done()
        return not waits

    def returned(self, slot: int, back: Leaving, *, is_checkpoint: bool) -> None:
        """Forget the copy of a slot that is in the arena again.

        If it is a checkpoint, it guards those of its blocks that have twins.
        """
        places = self._held[slot].places
        self._release(slot)
        self.n_back += 1
        for pool, of in places.items() if is_checkpoint else ():
            is_kept, ids = self._are_kept(of[0]), back.ids[pool]
            self._twins[pool].guard(slot, ids[is_kept], live_keys(back.live[pool][is_kept]), of[:, is_kept])

    def drop(self, slot: int) -> None:
        """Forget a slot: its copy, and which blocks it guards."""
        self.forget_twins(slot)
        if slot in self._held:
            self._release(slot)

    def forget_twins(self, slot: int) -> None:
        """Forget which blocks a checkpoint guards, because it no longer holds them."""
        for twins in self._twins.values():
            twins.forget(slot)

    def _release(self, slot: int) -> None:
        held = self._held[slot]
        self._journal.before(self._held.__setitem__, slot, held)
        del self._held[slot]
        self._journal.after(self._let_go, held.parcels)

    def _let_go(self, numbers: list[int]) -> None:
        """Count one holder less for each of these parcels, and remove the parcels without a holder."""
        gone = list[int]()
        for number in numbers:
            parcel = self._parcels[number]
            parcel.n_holders -= 1
            if not parcel.n_holders:
                gone.append(number)
        for number in gone:  # This comes last, because a file system may raise an error.
            self._remove(number)

    def _remove(self, number: int) -> None:
        """Remove a parcel and its file. If an exception comes before its end, `rebuild` does it."""
        parcel = self._parcels[number]
        if parcel.is_own and parcel.path is not None:  # If it also has blocks, an exception stopped the writing.
            remove_file(parcel.path)
        if parcel.blocks:
            self._used_host_bytes -= parcel.n_bytes
        elif parcel.is_own:
            self._file_bytes -= parcel.n_bytes
        del self._parcels[number]

    def rebuild(self) -> None:
        """Compute from the records of all slots which parcels are needed, and how many bytes they have.

        Twins are forgotten, so all blocks of the next sequence that is swapped out are copied.
        """
        self._twins.clear()
        holders = Counter(number for held in self._held.values() for number in held.parcels)
        for number, parcel in [*self._parcels.items()]:
            parcel.n_holders = holders[number]
            if parcel.is_own and parcel.path is not None and (parcel.blocks or not parcel.n_holders):
                # The file was being written, or nothing refers to it. If the file system refuses to remove it, it stays
                # until the process ends.
                with suppress(OSError):
                    remove_file(parcel.path)
                    parcel.path = None
            if not parcel.n_holders:
                del self._parcels[number]
        self._count_bytes()

    def _count_bytes(self) -> None:
        own = [parcel for parcel in self._parcels.values() if parcel.is_own]
        self._used_host_bytes = sum(parcel.n_bytes for parcel in own if parcel.blocks)
        self._file_bytes = sum(parcel.n_bytes for parcel in own if not parcel.blocks)

    # The methods below keep parcels for files that other processes have written.

    def add_file(self, path: str, n_bytes: int, rename: Callable[[Blocks], Blocks]) -> int:
        """Add a parcel for a file with `n_bytes` of blocks, and return its number.

        The file is not removed with the parcel.

        Args:
            rename: a function that gives blocks read from the file this memory's names of pools.
        """
        number = next(self._numbers)
        self._parcels[number] = Parcel({}, n_bytes, path, is_own=False, rename=rename)
        return number

    def adopt(self, slot: int, held: Kept) -> None:
        """Keep a slot whose blocks are in parcels that `add_file` made."""
        self._hold(slot, held)

    @property
    def other_files(self) -> set[str]:
        """Return the names of those files of `add_file` that are still needed."""
        return {Path(of.path).name for of in self._parcels.values() if of.path is not None and not of.is_own}

    def keys_of(self, slot: int) -> dict[str, Int64s]:
        """Return a unique key for each block of a swapped-out slot."""
        return {pool: as_keys(places) for pool, places in self._held[slot].places.items()}

    def inside_keys(self, leaving: Leaving) -> dict[str, Int64s]:
        """Return a key for each block of a slot in the arena: the key of its twin outside, or else a new one.

        Blocks with the same bytes, zeros after a slot's length included, have the same key.
        """
        keys, is_far = dict[str, Int64s](), any((ids < 0).any() for ids in leaving.ids.values())
        for pool, ids in leaving.ids.items():
            live = live_keys(leaving.live[pool])
            places = self._twins[pool].places_of(ids, live, self._are_kept)
            mixed = ids * _ODD + live
            keys[pool] = np.where(places[0] < 0, np.minimum(mixed, ~mixed), as_keys(places))
            if is_far:  # The slot's pages are in host memory, so it shares none of these blocks.
                keys[pool] = -1 - np.arange(len(ids)) - (leaving.slot << 32)
        return keys

    # The methods below count bytes.

    def held_bytes_of(self, sequence: Sequence) -> int:
        """Return the bytes that are kept for a sequence, shared or not."""
        return sum(self._parcels[number].n_bytes for number in self._held[sequence.slot].parcels)

    def private_bytes_of(self, sequences: list[Sequence]) -> Int64s:
        """Return (S,) the bytes that closing each of these sequences alone would free."""
        parcels = [[self._parcels[number] for number in self._held[s.slot].parcels] for s in sequences]
        return np.array([sum(parcel.n_bytes for parcel in own if parcel.n_holders == 1) for own in parcels], np.int64)

    def is_in_files(self, slot: int) -> bool:
        """True if any block of a slot must be read from a file."""
        return any(not self._parcels[number].blocks for number in self._held[slot].parcels)

    def _free_host_bytes(self) -> float:
        return float("inf") if self.host_bytes is None else self.host_bytes - self._used_host_bytes

    def _to_file(self, parcel: Parcel) -> None:
        """Write a parcel to a file, and remove it from host memory. The caller subtracts its bytes."""
        assert self.folder is not None, "the caller has looked"
        if not self._has_joined:
            self._join_folder()
        path = join_path(self.folder, f"{_PREFIX}{uuid4().hex}.safetensors")
        # The path is set first. If an exception comes while the file is written, the parcel has both a path and blocks,
        # which says that the file may be half written.
        parcel.path = path
        try:
            write_blocks(path, parcel.blocks, {}, is_lasting=False)
        except OSError:
            parcel.path = None
            raise
        parcel.blocks = {}
        self._file_bytes += parcel.n_bytes

    def _join_folder(self) -> None:
        """Create the folder. Share a local folder with other processes, so that none removes files in use."""
        assert self.folder is not None, "the caller has looked"
        if (place := local_place(self.folder)) is None:
            make_folder(self.folder)
        elif (descriptor := share_folder(Path(place), _NAMES)) is not None:
            weakref.finalize(self, os.close, descriptor)
        self._has_joined = True


def _read_file(path: str, rename: Callable[[Blocks], Blocks]) -> Blocks:
    """Read the blocks of a parcel. Raises FormatError if the file was damaged or removed."""
    return rename(read_blocks(path)[0])


def _unlink_all(parcels: dict[int, Parcel], process: int) -> None:
    if os.getpid() == process:  # A forked process has a copy of the table, but the files do not belong to it.
        for parcel in parcels.values():
            if parcel.path is not None and parcel.is_own:
                remove_file(parcel.path)
