"""Keeps swapped-out sequences: in host memory, and where that is full, in files.

What a sequence holds is copied whole, what it shares with others included: it needs nobody to come back, and others may
go. On its return it shares nothing.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from uuid import uuid4

from memory.errors import CapacityError
from memory.layer_memories import Snapshot
from memory.storage.files import read_snapshot, write_snapshot
from memory.storage.local_files import share_folder

_PREFIX = "swapped-"
_NAMES = rf"{_PREFIX}[0-9a-f]{{32}}\.safetensors"


class Tiers:
    """What was swapped out, by slot. Its length is how many sequences are.

    Attributes:
        n_to_host, n_to_disk: sequences that were swapped out so far so that files did not grow, or did. n_back: swapped
            in.

    Args:
        host_bytes: that may wait in host memory; None for any number.
        folder: where the others go, those first that have waited longest; None for nowhere. What processes left there
            that were killed is removed when the first file is written, unless another one that still runs has files
            there.
    """

    def __init__(self, host_bytes: int | None, folder: Path | None) -> None:
        self.host_bytes = host_bytes
        self.folder = folder
        self._waiting: dict[int, Snapshot] = {}  # in the order in which they came
        self._files: dict[int, tuple[Path, int]] = {}
        self._waiting_bytes = self._file_bytes = 0
        self._has_joined = False
        self.n_to_host = self.n_to_disk = self.n_back = 0
        # without the memory nobody could come back from them
        weakref.finalize(self, _unlink_all, self._files, os.getpid())

    def __len__(self) -> int:
        return len(self._waiting) + len(self._files)

    @property
    def used_bytes(self) -> tuple[int, int]:
        """In host memory, and in files."""
        return self._waiting_bytes, self._file_bytes

    def put(self, slot: int, snapshot: Snapshot) -> None:
        """Raises CapacityError: no room in either, nothing has changed.
        Whatever writing a file raises, with nothing lost.
        """
        free_bytes, file_bytes = self._free_host_bytes(), self._file_bytes
        while snapshot.n_bytes > free_bytes and self._waiting and self.folder is not None:
            oldest = next(iter(self._waiting))
            self._to_file(oldest, self._waiting[oldest])
            self._waiting_bytes -= self._waiting.pop(oldest).n_bytes
            free_bytes = self._free_host_bytes()
        if snapshot.n_bytes <= free_bytes:
            self._waiting[slot] = snapshot
            self._waiting_bytes += snapshot.n_bytes
        elif self.folder is not None:
            self._to_file(slot, snapshot)
        else:
            raise CapacityError(
                f"what the sequence holds, {snapshot.n_bytes:,} bytes, does not fit into {free_bytes:,} bytes of host "
                "memory; give the memory a larger host_budget, or a swap_dir",
                needed=snapshot.n_bytes, free=int(free_bytes),
            )  # fmt: skip
        self.n_to_disk += self._file_bytes > file_bytes
        self.n_to_host += self._file_bytes <= file_bytes

    def get(self, slot: int) -> Snapshot:
        """Return a slot's snapshot, which stays. Raises FormatError if its file was damaged or taken away."""
        if slot in self._waiting:
            return self._waiting[slot]
        return read_snapshot(str(self._files[slot][0]))[0]

    def drop(self, slot: int) -> None:
        """Forget it, and its file."""
        if slot in self._waiting:
            self._waiting_bytes -= self._waiting.pop(slot).n_bytes
        if slot in self._files:
            path, n_bytes = self._files.pop(slot)
            self._file_bytes -= n_bytes
            path.unlink(missing_ok=True)

    def _free_host_bytes(self) -> float:
        return float("inf") if self.host_bytes is None else self.host_bytes - self._waiting_bytes

    def _to_file(self, slot: int, snapshot: Snapshot) -> None:
        assert self.folder is not None
        if not self._has_joined and (descriptor := share_folder(self.folder, _NAMES)) is not None:
            weakref.finalize(self, os.close, descriptor)
        self._has_joined = True
        path = self.folder / f"{_PREFIX}{uuid4().hex}.safetensors"
        write_snapshot(str(path), snapshot, {})
        self._files[slot] = path, snapshot.n_bytes
        self._file_bytes += snapshot.n_bytes


def _unlink_all(files: dict[int, tuple[Path, int]], process: int) -> None:
    if os.getpid() == process:  # a fork of it has the same books, and the files are not its own
        for path, _ in files.values():
            path.unlink(missing_ok=True)
