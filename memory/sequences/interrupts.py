"""Holds a Ctrl-C back for a moment, so that a result is not lost on its way to the caller.

Python runs the handler of a signal between two bytecodes of the main thread, so an interrupt may come anywhere: also
between the last write of a function and its return, and before the first line of an `__exit__`. The books of a memory
stay whole by `memory.blocks.journal`, whatever is raised. This file is for what a journal cannot do:

- `uninterrupted_call`: nothing is raised on the way from the block to the caller, so that a result is never lost. A
  block that can still undo its work calls `deliver` at its end, and undoes it if that raises.
- `uninterrupted`: nothing is raised inside the block; a Ctrl-C that came is raised at its end, when all is done. It
  holds back Ctrl-C and no other exception.
- `Lease`: the block may be interrupted; whether it still runs is computed, not noted by its last line, which may never
  run.
"""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from _thread import get_ident, interrupt_main
from contextlib import AbstractContextManager
from operator import methodcaller
from types import FrameType
from typing import Any

try:  # the functions that `signal` wraps, whose conversion to enums takes several times as long as the system call
    from _signal import getsignal as _get_handler
    from _signal import signal as _set_handler
except ImportError:
    from signal import getsignal as _get_handler
    from signal import signal as _set_handler


_SIGINT = int(signal.SIGINT)  # an enum would be slower


def _current_handler() -> Any:
    """Return the Python handler of Ctrl-C; None in other threads, which are never interrupted, or if there is none."""
    handler = _get_handler(_SIGINT) if get_ident() == threading.main_thread().ident else None
    return handler if callable(handler) else None


class uninterrupted:
    """Let a Ctrl-C wait until the block is done, so that bookkeeping is never left half-way.

    Only the main thread is ever interrupted; elsewhere, and where another program owns the signal, nothing is changed.
    Cost: some two microseconds.
    """

    def __enter__(self) -> None:
        self._has_come = False
        self._previous = _current_handler()
        if self._previous is not None:
            _set_handler(_SIGINT, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True  # and not the frame, whose variables would live on: among them an `uninterrupted_call`

    def __exit__(self, *error: object) -> None:
        if self._previous is not None:
            _set_handler(_SIGINT, self._previous)
            if self._has_come:
                self._previous(_SIGINT, sys._getframe())


class _End(weakref.ref[Any]):
    """Refers weakly to a block, with C functions that run when the block dies, no bytecode of Python between them."""

    __slots__ = ()
    set_handler = _set_handler
    interrupt = interrupt_main


_interrupt_again = methodcaller("interrupt")


class _Waiting:
    """Handles the signal while an `uninterrupted_call` waits, and notes that it came.

    It must not refer to the block, whose death ends the wait; so it keeps no frame either.

    Attributes:
        ends: called when the block dies, the last one first.
    """

    __slots__ = ("_restore", "ends", "has_come", "previous")

    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self.has_come = False
        self.ends: tuple[_End, ...] = ()
        self._restore = methodcaller("set_handler", _SIGINT, previous)

    def wait_for(self, block: uninterrupted_call) -> None:
        """Restore the handler when the block dies, and then raise a Ctrl-C that has come."""
        self.ends = (_End(block, self._restore),)
        if self.has_come:  # read only now, because a Ctrl-C may come during the line above
            self.ends = (_End(block, _interrupt_again), _End(block, self._restore))

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        if not self.ends:  # the block is only being entered, or has failed
            return
        block = self.ends[-1]()
        if block is not None and block.is_in_call(frame):
            self.wait_for(block)
        else:  # its function has returned: an error that somebody keeps holds the frame, or it died in another thread
            self.ends = ()
            _set_handler(_SIGINT, self.previous)
            self.previous(number, frame)


class uninterrupted_call:
    """Let a Ctrl-C wait until the function that holds this in a variable has returned.

    Use it as `with uninterrupted_call() as held: ...`. A Ctrl-C that has come by then is raised in the caller, which
    has the result. If the block raises, there is no result, and the wait ends with the block.

    Who keeps an error keeps the frames of all callers with their variables, also of those that go on. A function that
    has called code which may keep one writes `del held` before `return result`: no handler runs between the two.
    Cost: some three microseconds.
    """

    __slots__ = ("__weakref__", "_frame_id", "_handler")

    def __init__(self) -> None:
        self._frame_id = id(sys._getframe(1))  # not the frame, which would refer to this in turn

    def is_in_call(self, frame: FrameType | None) -> bool:
        """Return True if the function that made this runs: its frame is this one, or one that waits for it."""
        while frame is not None and id(frame) != self._frame_id:
            frame = frame.f_back
        return frame is not None

    def __enter__(self) -> uninterrupted_call:
        self._handler: _Waiting | None = None
        previous = _current_handler()
        if previous is not None:
            self._handler = _Waiting(previous)
            _set_handler(_SIGINT, self._handler)
            self._handler.wait_for(self)
        return self

    def deliver(self) -> None:
        """Raise a Ctrl-C that has come so far: call it last, while the block can still undo all its work."""
        if (handler := self._handler) is not None and handler.has_come:
            handler.has_come = False
            handler.wait_for(self)
            handler.previous(_SIGINT, sys._getframe())

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None and (handler := self._handler) is not None:  # the traceback would keep the variable alive
            handler.ends = ()
            _set_handler(_SIGINT, handler.previous)
            if handler.has_come:
                handler.previous(_SIGINT, sys._getframe())


class Lease:
    """Says whether a block runs: in `with lease.take(): ...`, and only there, `lease.is_taken` is True.

    What `take` returns lives only on the stack of the `with` statement, so it is gone when the block has been left, in
    whatever way.
    """

    def __init__(self) -> None:
        self._taken: weakref.ref[Any] | None = None

    @property
    def is_taken(self) -> bool:
        return self._taken is not None and self._taken() is not None

    def take(self) -> AbstractContextManager[Any]:
        block = threading.Lock()
        self._taken = weakref.ref(block)
        return block
