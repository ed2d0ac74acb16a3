"""Takes the memory of a model's weights from the system while Python still imports modules.

The system fills each page with zeros when it is first written. For a model of several GB this takes as long as laying
out its weights, and much longer in a virtual machine that has to ask its host for the memory. Importing torch and
transformers takes two seconds, in which one processor works. So commands call `begin` before these imports, and a
thread of its own takes the pages. `models.products.huge_pages` puts the weights there.

This module is here, and not in `models`, because it must be imported before torch.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from contextlib import suppress
from pathlib import Path

_POPULATE_WRITE = 23
"""Linux's number of the advice to take pages at once, which the module `mmap` does not name. Kernels from 5.14 on."""
_AT_ONCE = 4 << 20
"""Bytes that are taken at once. Meanwhile the process cannot map other memory, as imports do."""
_LEAST_BYTES = 64 << 20
_MOST_OF_AVAILABLE = 0.8
"""Memory is taken ahead only if it needs at most this share of what the system says is available."""


class PagesAhead:
    """Holds mapped memory, and a thread that takes its pages from the system, from the first one on.

    Attributes:
        pages: the mapped memory.
        thread: ends when it has taken all pages, or at `end`.
    """

    def __init__(self, n_bytes: int) -> None:
        self.pages = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.pages.madvise(mmap.MADV_HUGEPAGE)
        self.n_bytes = n_bytes
        self._is_ended = threading.Event()
        self.thread = threading.Thread(target=self._take_pages, name="pages-ahead", daemon=True)
        self.thread.start()

    def _take_pages(self) -> None:
        first = ctypes.c_char.from_buffer(self.pages)
        address, advise = ctypes.addressof(first), ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for at in range(0, self.n_bytes, _AT_ONCE):
            # The call gives an error code if the kernel does not know the advice. Then pages come when they are used.
            if self._is_ended.is_set() or advise(address + at, min(_AT_ONCE, self.n_bytes - at), _POPULATE_WRITE):
                break

    def end(self, n_used: int) -> None:
        """Take no more pages, and give back those behind the first `n_used` bytes."""
        self._is_ended.set()
        self.thread.join()
        start = -(-n_used // mmap.PAGESIZE) * mmap.PAGESIZE
        if start < self.n_bytes:
            self.pages.madvise(mmap.MADV_DONTNEED, start, self.n_bytes - start)


_waiting: PagesAhead | None = None


def begin(model: str, device: str) -> None:
    """Begin to take the bytes that a GGUF file's weights need in their own bits, which are about as many as it has.

    Nothing is done for other models, devices and systems, and if memory is short.
    """
    global _waiting
    path = Path(model).expanduser()
    if device != "cpu" or not sys.platform.startswith("linux") or path.suffix.lower() != ".gguf":
        return
    with suppress(OSError):
        n_bytes = path.stat().st_size * 65 // 64  # Weights begin at cache lines, and scales may be repeated.
        if _LEAST_BYTES <= n_bytes <= _MOST_OF_AVAILABLE * _available_bytes():
            _waiting = PagesAhead(n_bytes)


def take() -> PagesAhead | None:
    """Return what `begin` has begun, once. Whoever takes it calls `end`."""
    global _waiting
    found, _waiting = _waiting, None
    return found


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
