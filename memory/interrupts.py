"""Ctrl-C, held back while the books are being written."""

from __future__ import annotations

import signal
import threading
from types import FrameType

try:  # what `signal` wraps: without the conversion to enums, which costs several times the system call
    from _signal import getsignal as _get_handler
    from _signal import signal as _set_handler
except ImportError:
    from signal import getsignal as _get_handler
    from signal import signal as _set_handler


class uninterrupted:
    """Let a Ctrl-C wait until the block is done, so that bookkeeping is never left half-way. Cost: some two microseconds.

    Only the main thread is ever interrupted; elsewhere, and where another program owns the signal, nothing is changed.
    """

    def __enter__(self) -> None:
        self._held: tuple[int, FrameType | None] | None = None
        self._previous = _get_handler(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        if callable(self._previous):
            _set_handler(signal.SIGINT, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._held = self._held or (number, frame)

    def __exit__(self, *error: object) -> None:
        if callable(self._previous):
            _set_handler(signal.SIGINT, self._previous)
            if self._held:
                self._previous(*self._held)
