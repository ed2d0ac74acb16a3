"""Keeps swapped-out sequences in host memory and, when that is full, in files.

All blocks of a sequence are copied, those that it shares with others included: so it can be swapped in even if all
others are closed. Swapped in again, it shares nothing.
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
    """Keeps swapped-out sequences by slot, in host memory or in files. Its length is their number.

    Attributes:
        n_to_host, n_to_disk: sequences that were swapped out so far without, and with, new bytes in files.
        n_back: sequences that were swapped in so far.

    Args:
        host_bytes: bytes that swapped-out sequences may take in host memory; None for any number.
        folder: folder for files. When host memory is full, the sequences that were swapped out first are moved there;
            None for no files. Files of processes that were killed are removed when the first file is written, unless a
            running process has files there.
    """

    def __init__(self, host_bytes: int | None, folder: Path | None) -> None:
        self.host_bytes = host_bytes
        self.folder = folder
        self._on_host: dict[int, Snapshot] = {}  # in the order in which they were swapped out
        self._files: dict[int, tuple[Path, int]] = {}
        self._used_host_bytes = self._file_bytes = 0
        self._has_joined = False
        self.n_to_host = self.n_to_disk = self.n_back = 0
        # Without this object no sequence can be swapped in from the files, so they are removed with it.
        weakref.finalize(self, _unlink_all, self._files, os.getpid())

    def __len__(self) -> int:
        return len(self._on_host) + len(self._files)

    @property
    def used_bytes(self) -> tuple[int, int]:
        """Return the bytes in host memory, and those in files."""
        return self._used_host_bytes, self._file_bytes

    def put(self, slot: int, snapshot: Snapshot) -> None:
        """Keep a slot's snapshot, in host memory if it fits there.

        Raises CapacityError if there is no room in either, and what writing a file raises; then no sequence is lost.
        """
        free_bytes, file_bytes = self._free_host_bytes(), self._file_bytes
        while snapshot.n_bytes > free_bytes and self._on_host and self.folder is not None:
            oldest = next(iter(self._on_host))
            self._to_file(oldest, self._on_host[oldest])
            self._used_host_bytes -= self._on_host.pop(oldest).n_bytes
            free_bytes = self._free_host_bytes()
        if snapshot.n_bytes <= free_bytes:
            self._on_host[slot] = snapshot
            self._used_host_bytes += snapshot.n_bytes
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
        """Return a slot's snapshot and keep it. Raises FormatError if its file was damaged or removed."""
        if slot in self._on_host:
            return self._on_host[slot]
        return read_snapshot(str(self._files[slot][0]))[0]

    def drop(self, slot: int) -> None:
        """Delete a slot's snapshot, or its file."""
        if slot in self._on_host:
            self._used_host_bytes -= self._on_host.pop(slot).n_bytes
        if slot in self._files:
            path, n_bytes = self._files.pop(slot)
            self._file_bytes -= n_bytes
            path.unlink(missing_ok=True)

    def _free_host_bytes(self) -> float:
        return float("inf") if self.host_bytes is None else self.host_bytes - self._used_host_bytes

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
    if os.getpid() == process:  # a forked process has a copy of the table, but the files are not its own
        for path, _ in files.values():
            path.unlink(missing_ok=True)
