"""Lets one process at a time compile a kernel. The other processes wait, and then read its machine code from disk."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

if sys.platform != "win32":
    import fcntl

_MOST_SECONDS = 120.0
"""How long to wait. Compiling any kernel takes less, so a lock that is held for longer belongs to a stopped process."""
_POLL_SECONDS = 0.02


class FileLock:
    """Holds a lock of the operating system on a file. The lock is released when the process dies, in whatever way.

    On systems without such locks it holds nothing. Then a kernel may be compiled twice, which only costs time.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None

    def acquire(self, *, waits: bool) -> bool:
        """Return False if another process has the lock. With `waits`, first wait up to two minutes for it."""
        if sys.platform == "win32":
            return True
        self.release()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:  # Nothing can be written, so nothing is shared with other processes either.
            return True
        end = time.monotonic() + (_MOST_SECONDS if waits else 0.0)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    os.close(file)
                    return False
                time.sleep(_POLL_SECONDS)
            except OSError:  # The file system has no locks.
                os.close(file)
                return True
            else:
                self._file = file
                return True

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
