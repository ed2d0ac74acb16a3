"""Files that are whole or not there, that only their owner can read, and that do not outlive whoever was killed while
writing them.

A file is written beside its place, under a name that ends in ".part", and then renamed. Meanwhile its writer holds a
lock on it, which the operating system takes away from a process that ends: so one that is left behind is told from one
that is being written. A folder of files that belong to running processes is told from one of those that are gone in the
same way. Where there are no such locks (on Windows, on some network file systems) nothing is removed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_PART = r"\.[0-9a-f]{32}\.part"
_OWNER_ONLY = 0o600


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Write a new file with mode 0600, which takes the place of the old one when the block is left, and not if it
    raises.

    File and folder have reached the disk then. What others left half-written on the way to this path is removed. Raises
    OSError.
    """
    remove_abandoned(path.parent, re.escape(path.name))
    beside, file = _open_beside(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            beside.replace(path)  # before the lock goes, with which it is not taken for one that was left
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _flush_folder(path.parent)


def remove_abandoned(folder: Path, names: str) -> bool:
    """Remove half-written files on the way to paths in `folder` whose names match the pattern `names`, if their writers
    are gone.

    Returns whether any is still being written.
    """
    is_busy = False
    for part in [folder / name for name in _names_in(folder) if re.fullmatch(f"(?:{names}){_PART}", name)]:
        try:
            with part.open("rb") as file:
                if _lock(file.fileno(), shared=False, waits=False):
                    part.unlink()
                else:
                    is_busy = True
        except FileNotFoundError:  # its writer is ready, or somebody else has removed it
            continue
        except OSError:  # another user's
            is_busy = True
    return is_busy


def share_folder(folder: Path, names: str) -> int | None:
    """Make a folder, or join those who have files in one, until the descriptor that is returned is closed.

    If nobody else has any, those whose names match the pattern `names` were left by processes that are gone: they are
    removed. None where folders cannot be locked.
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


def _open_beside(path: Path) -> tuple[Path, BinaryIO]:
    while True:
        beside = path.with_name(f"{path.name}.{uuid4().hex}.part")
        file = open(beside, "xb", opener=lambda name, flags: os.open(name, flags, _OWNER_ONLY))
        _lock(file.fileno(), shared=False, waits=True)
        if os.fstat(file.fileno()).st_nlink:
            return beside, file
        file.close()  # somebody took it for one that was left, before it was locked


def _names_in(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208 - names are all that is wanted
    except OSError:  # whoever writes there will say why
        return []


def _lock(descriptor: int, *, shared: bool, waits: bool) -> bool:
    """Whether the lock is held now; never where there are none."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


def _flush_folder(folder: Path) -> None:
    """A new name survives a crash only once its folder has reached the disk."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
