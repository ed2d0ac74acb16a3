"""Writes local files completely or not at all, readable by their owner only, and removes those of killed processes.

A file is written next to its final path, under a name that ends in ".part", and then renamed. Meanwhile its writer
holds a lock on it. The operating system releases the lock when the process ends. So an abandoned file can be told from
one that is being written. In the same way, a folder's files of running processes are told from those of ended
processes. Without such locks (on Windows, and on some network file systems) nothing is removed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

try:
    import fcntl
except ImportError:  # Windows does not have this module.
    fcntl = None  # type: ignore[assignment]

_c_library = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_fallocate = getattr(_c_library, "fallocate64", None)
_sync_file_range = getattr(_c_library, "sync_file_range", None)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_SYNC_FILE_RANGE_WRITE = 2
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PART = r"\.[0-9a-f]{32}\.part"
_OWNER_ONLY = 0o600


@contextmanager
def written_whole(path: Path, *, is_lasting: bool = True) -> Iterator[BinaryIO]:
    """Write a new file with mode 0600. It replaces the old one when the block ends without an error.

    With `is_lasting`, file and folder have then reached the disk. Half-written files of this path that other processes
    left are removed. Raises OSError.
    """
    remove_abandoned(path.parent, re.escape(path.name))
    is_written = False
    while not is_written:
        beside = path.with_name(f"{path.name}.{uuid4().hex}.part")
        try:
            with open(beside, "xb", opener=lambda name, flags: os.open(name, flags, _OWNER_ONLY)) as file:
                _lock(file.fileno(), shared=False, waits=True)
                if not os.fstat(file.fileno()).st_nlink:
                    continue  # Another process removed the file as abandoned before it was locked.
                yield file
                file.flush()
                if is_lasting:
                    os.fsync(file.fileno())
                # The file is renamed while it is locked. Otherwise another process could remove it as abandoned.
                beside.replace(path)
                is_written = True
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    if is_lasting:
        _flush_folder(path.parent)


def reserve_space(file: BinaryIO, n_bytes: int) -> None:
    """Let the file system allocate a new file's bytes at once, not piece by piece while it is written.

    Raises OSError if the disk has too little space. Where the operating system or the file system has no such call,
    nothing happens.
    """
    if _fallocate is not None and n_bytes and _fallocate(file.fileno(), 0, 0, n_bytes):
        number = ctypes.get_errno()
        if number in _NO_SPACE:
            raise OSError(number, os.strerror(number), file.name)


def begin_flush(file: BinaryIO, begin: int, n_bytes: int) -> None:
    """Let the disk begin to write bytes that were just written to a file, without waiting. Only fsync completes that.

    So the disk works while the next bytes are prepared. Where the system has no such call, nothing happens.
    """
    if _sync_file_range is not None:
        _sync_file_range(file.fileno(), begin, n_bytes, _SYNC_FILE_RANGE_WRITE)


def remove_abandoned(folder: Path, names: str) -> bool:
    """Remove half-written files in `folder` whose final names match the pattern `names` and whose writers have ended.

    Returns True if any such file is still being written.
    """
    is_busy = False
    for part in [folder / name for name in _names_in(folder) if re.fullmatch(f"(?:{names}){_PART}", name)]:
        try:
            with part.open("rb") as file:
                if _lock(file.fileno(), shared=False, waits=False):
                    part.unlink()
                else:
                    is_busy = True
        except FileNotFoundError:  # The file's writer has renamed it, or another process has removed it.
            continue
        except OSError:  # The file belongs to another user.
            is_busy = True
    return is_busy


def share_folder(folder: Path, names: str) -> int | None:
    """Make a folder, and share it with other processes until the returned descriptor is closed.

    If no other process shares the folder, files whose names match the pattern `names` were left by processes that have
    ended, so they are removed. Returns None if folders cannot be locked here.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    if _lock(descriptor, shared=False, waits=False):
        for name in _names_in(folder):
            if re.fullmatch(f"(?:{names})(?:{_PART})?", name):
                (folder / name).unlink(missing_ok=True)
    _lock(descriptor, shared=True, waits=True)
    return descriptor


def hold_folder(folder: str) -> int | None:
    """Share a folder with others that read its files, until the returned descriptor is closed.

    Returns None if locks do not work.
    """
    if fcntl is None:
        return None
    descriptor = os.open(folder, os.O_RDONLY)
    _lock(descriptor, shared=True, waits=True)
    return descriptor


@contextmanager
def alone_in(descriptor: int | None) -> Iterator[bool]:
    """Yield True if no other process holds a folder of `hold_folder`, and none can while the block runs."""
    try:
        yield descriptor is not None and _lock(descriptor, shared=False, waits=False)
    finally:
        if descriptor is not None:
            _lock(descriptor, shared=True, waits=True)


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names are all that is wanted
    except OSError:  # Writing to this folder will raise the same error, with a better message.
        return []


def _lock(descriptor: int, *, shared: bool, waits: bool) -> bool:
    """Lock a file or folder. True if the lock is held now; always False where the system has no locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _flush_folder(folder: Path) -> None:
    """Write a folder's entries to the disk, because otherwise a new name in it may not survive a crash."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
