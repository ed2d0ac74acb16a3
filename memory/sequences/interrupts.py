"""Holds signals back for a moment, so that a result is not lost on its way to the caller.

Python runs the handler of a signal between two bytecodes of the main thread, so an interrupt may come anywhere: also
between the last write of a function and its return, and before the first line of an `__exit__`. The books of a memory
stay whole by `memory.blocks.journal`, whatever is raised. This file is for what a journal cannot do:

- `uninterrupted_call`: nothing is raised on the way from the block to the caller, so that a result is never lost. A
  block that can still undo its work calls `deliver` at its end, and undoes it if that raises.
- `uninterrupted`: no handler of a signal runs inside the block; those of what came run at its end, when all is done.
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


_CTRL_C = (int(signal.SIGINT),)  # an enum would be slower
_NAMES = "SIGINT", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2", "SIGTERM"  # Windows has some of them
_HELD_SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


class uninterrupted:
    """Let signals wait until the block is done, so that what it changes is never left half-way.

    These are Ctrl-C and the signals that programs use for timeouts, where Python functions handle them. Only the main
    thread is ever interrupted; elsewhere, and where another program owns a signal, nothing is changed.
    Cost: some four microseconds.
    """

    def __enter__(self) -> None:
        self._arrived: list[int] = []
        self._previous: dict[int, Any] = {}
        if get_ident() != threading.main_thread().ident:
            return
        for number in _HELD_SIGNALS:
            if callable(handler := _get_handler(number)):
                self._previous[number] = handler
                _set_handler(number, self._hold)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append(number)  # and not the frame, whose variables would live on: also `uninterrupted_call`

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            _set_handler(number, handler)
        for number in dict.fromkeys(self._arrived):
            self._previous[number](number, sys._getframe())


class _End(weakref.ref[Any]):
    """Refers weakly to a block, with C functions that run when the block dies, no bytecode of Python between them."""

    __slots__ = ()
    set_handler = _set_handler
    interrupt = interrupt_main


class _Waiting:
    """Handles signals while an `uninterrupted_call` waits, and notes which of them came.

    It must not refer to the block, whose death ends the wait; so it keeps no frame either.

    Attributes:
        previous: numbers of signals, and their handlers before.
        ends: called when the block dies, the last one first.
        come: numbers of the signals that have come.
    """

    __slots__ = ("come", "ends", "previous")

    def __init__(self) -> None:
        self.previous: list[tuple[int, Any]] = []
        self.ends: list[_End] = []
        self.come: list[int] = []

    def hold(self, number: int, handler: Any, block: uninterrupted_call) -> None:
        """Handle a signal instead of `handler`, until the block dies."""
        self.previous.append((number, handler))
        _set_handler(number, self)
        self.ends.append(_End(block, methodcaller("set_handler", number, handler)))

    def wait_for(self, block: uninterrupted_call) -> None:
        """When the block dies, restore the handlers, and then run those of the signals that have come."""
        n_ready = -1
        while n_ready != len(self.come):  # because a signal may come meanwhile
            n_ready = len(self.come)
            ends = [_End(block, methodcaller("interrupt", number)) for number in self.come]
            self.ends = [*ends, *[_End(block, methodcaller("set_handler", *each)) for each in self.previous]]

    def deliver(self) -> None:
        """Run the handlers of the signals that have come."""
        come, self.come = self.come, []
        for number, handler in self.previous:
            if number in come:
                handler(number, sys._getframe())

    def give_up(self) -> None:
        """Restore the handlers now."""
        self.ends = []
        for number, handler in self.previous:
            _set_handler(number, handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.come.append(number)
        if not self.ends:  # the block is only being entered, or has failed
            return
        block = self.ends[-1]()
        if block is not None and block.is_in_call(frame):
            self.wait_for(block)
        else:  # its function has returned: an error that somebody keeps holds the frame, or it died in another thread
            self.give_up()
            self.deliver()


class uninterrupted_call:
    """Let a Ctrl-C wait until the function that holds this in a variable has returned.

    Use it as `with uninterrupted_call() as held: ...`. A Ctrl-C that has come by then is raised in the caller, which
    has the result. If the block raises, there is no result, and the wait ends with the block.

    Who keeps an error keeps the frames of all callers with their variables, also of those that go on. A function that
    has called code which may keep one writes `del held` before `return result`: no handler runs between the two.
    Cost: some three microseconds, ten with `holds_all`.

    Args:
        holds_all: let the signals of timeouts wait as well; see `uninterrupted`.
    """

    __slots__ = ("__weakref__", "_frame_id", "_numbers", "_waiting")

    def __init__(self, *, holds_all: bool = False) -> None:
        self._frame_id = id(sys._getframe(1))  # not the frame, which would refer to this in turn
        self._waiting: _Waiting | None = None
        self._numbers = _HELD_SIGNALS if holds_all else _CTRL_C

    def is_in_call(self, frame: FrameType | None) -> bool:
        """Return True if the function that made this runs: its frame is this one, or one that waits for it."""
        while frame is not None and id(frame) != self._frame_id:
            frame = frame.f_back
        return frame is not None

    def __enter__(self) -> uninterrupted_call:
        if get_ident() != threading.main_thread().ident:
            return self
        waiting = self._waiting = _Waiting()
        try:
            for number in self._numbers:
                if callable(handler := _get_handler(number)):
                    waiting.hold(number, handler, self)
            if waiting.come:
                waiting.wait_for(self)
        except BaseException:  # of a signal whose turn had not come yet
            waiting.give_up()
            raise
        return self

    def deliver(self) -> None:
        """Raise what has come so far: call it last, while the block can still undo all its work."""
        if (waiting := self._waiting) is not None:
            waiting.ends = waiting.ends[-len(waiting.previous) :]
            waiting.deliver()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None and (waiting := self._waiting) is not None:  # the traceback would keep the variable alive
            waiting.give_up()
            waiting.deliver()


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
