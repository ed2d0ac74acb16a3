"""Holds a Ctrl-C back while tables are being written.

Python runs the handler of a signal between two bytecodes of the main thread, so an interrupt may come anywhere: also
between the last write of a function and its return, and before the first line of an `__exit__`. Three ways to be whole
nevertheless:

- `uninterrupted`: nothing is raised inside of the block; what came is raised at its end, when all is done.
- `uninterrupted_call`: nor on the way from the block to the caller, so that a result is never lost. What can still be
  undone asks with `deliver` at the end of the block, and is undone if that raises.
- `Lease`: for what may be interrupted. Whether its block still runs is asked, not written down by its last line, which
  may never run.
"""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from _thread import interrupt_main
from contextlib import AbstractContextManager
from operator import methodcaller
from types import FrameType
from typing import Any

try:  # what `signal` wraps: without the conversion to enums, which costs several times the system call
    from _signal import getsignal as _get_handler
    from _signal import signal as _set_handler
except ImportError:
    from signal import getsignal as _get_handler
    from signal import signal as _set_handler


_SIGINT = int(signal.SIGINT)  # an enum takes its time


def _current_handler() -> Any:
    """Only the main thread is ever interrupted, and where another program owns the signal, there is nothing to be
    called.
    """
    handler = _get_handler(_SIGINT) if threading.current_thread() is threading.main_thread() else None
    return handler if callable(handler) else None


class uninterrupted:
    """Let a Ctrl-C wait until the block is done, so that bookkeeping is never left half-way.
    Cost: some two microseconds.

    Only the main thread is ever interrupted; elsewhere, and where another program owns the signal, nothing is changed.
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
    """A weak reference on which callbacks find functions of C: they run when the block dies, with no bytecode of Python
    between them.
    """

    __slots__ = ()
    set_handler = _set_handler
    interrupt = interrupt_main


_interrupt_again = methodcaller("interrupt")


class _Waiting:
    """The handler meanwhile. It must not refer to the block, whose death ends it; so it keeps no frame either.

    Attributes:
        ends: what is called when the block dies, the last one first.
    """

    __slots__ = ("_restore", "ends", "has_come", "previous")

    def __init__(self, previous: Any) -> None:
        self.previous = previous
        self.has_come = False
        self.ends: tuple[_End, ...] = ()
        self._restore = methodcaller("set_handler", _SIGINT, previous)

    def wait_for(self, block: uninterrupted_call) -> None:
        self.ends = (_End(block, self._restore),)
        if self.has_come:  # asked last: it may come meanwhile
            self.ends = (_End(block, _interrupt_again), _End(block, self._restore))

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True
        if self.ends and (block := self.ends[-1]()) is not None:
            self.wait_for(block)


class uninterrupted_call:
    """Let a Ctrl-C wait until the function that keeps this block in a variable has returned: `with uninterrupted_call()
    as held: ...`.

    What has come by then is raised where the caller goes on, who has the result. If the block raises, there is none,
    and the wait ends with the block. Cost: some three microseconds.
    """

    __slots__ = ("__weakref__", "_handler")

    def __enter__(self) -> uninterrupted_call:
        self._handler: _Waiting | None = None
        previous = _current_handler()
        if previous is not None:
            self._handler = _Waiting(previous)
            _set_handler(_SIGINT, self._handler)
            self._handler.wait_for(self)
        return self

    def deliver(self) -> None:
        """Raise what has come so far, at the last moment at which all can be as if nothing had been asked."""
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
    """Whether a block runs: `with lease.take(): ...`, and `lease.is_taken` inside of it and nowhere else.

    What is taken lives on the stack of the `with` statement alone, so it is gone when the block has been left, in
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
