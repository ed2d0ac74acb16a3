"""Delays signals for a moment, so that a result is not lost on its way to the caller.

Python runs the handler of a signal between two bytecodes of the main thread. So an interrupt may come anywhere, even
between the last write of a function and its return, or before the first line of an `__exit__`. `memory.blocks.journal`
keeps the books of a memory whole, whatever is raised. This file does what a journal cannot do:

- `uninterrupted_call`: no handler raises between the block's end and the caller, so that a result is never lost. A
  block that can still undo its work calls `deliver` at its end, and undoes the work if `deliver` raises.
- `uninterrupted`: no handler of a signal runs inside the block. If signals came, their handlers run at its end.
- `Lease`: the block may be interrupted. Whether it still runs is computed. Its last line could not note it, because
  an interrupted block never runs that line.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from _thread import get_ident
from operator import methodcaller
from types import FrameType
from typing import Any
from weakref import ref

from hybridmem.memory.blocks.ends import AtEnd, ExitOnStack, has_ended

# The functions of the module `signal` convert numbers to enums, which takes several times as long as the system call.
try:
    from _signal import getsignal as _get_handler
except ImportError:
    from signal import getsignal as _get_handler


_set_handler = AtEnd.set_handler
_CTRL_C = (int(signal.SIGINT),)  # An integer is faster than an enum.
_NAMES = "SIGINT", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2", "SIGTERM"  # Windows has only some of them.
_HELD_SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


_main_thread: int | None


def _find_main_thread() -> None:
    global _main_thread
    _main_thread = threading.main_thread().ident


_find_main_thread()  # Asking each time would take a tenth of the time of opening a sequence.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_find_main_thread)


class uninterrupted:
    """Delay signals until the block ends, so that no change inside the block stops half-way.

    The signals are Ctrl-C and those that programs use for timeouts, if Python functions handle them. Python interrupts
    only the main thread, so in other threads this does nothing.
    Cost: some four microseconds.
    """

    def __enter__(self) -> None:
        self._arrived: list[int] = []
        self._previous: dict[int, Any] = {}
        if get_ident() != _main_thread:
            return
        try:
            for number in _HELD_SIGNALS:
                if callable(handler := _get_handler(number)):
                    self._previous[number] = handler
                    _set_handler(number, self._hold)
        except BaseException:  # A signal came before its handler was replaced.
            self._restore()
            raise

    def _hold(self, number: int, frame: FrameType | None) -> None:
        # The frame is not kept: it would keep its variables alive, such as an `uninterrupted_call`.
        self._arrived.append(number)

    def __exit__(self, *error: object) -> None:
        try:
            self._restore()
        except BaseException:  # A signal came whose handler is already restored, while other handlers are not.
            self._restore()
            raise
        for number in dict.fromkeys(self._arrived):
            self._previous[number](number, sys._getframe())

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            _set_handler(number, handler)


class _Waiting:
    """Handles signals while an `uninterrupted_call` waits, and notes which signals came.

    It must not refer to the `uninterrupted_call`, whose death ends the wait. So it keeps no frame either.

    Attributes:
        previous: the numbers of signals, each with the handler that it had before.
        ends: the functions that are called when the `uninterrupted_call` dies, the last one first.
        come: the numbers of the signals that have come.
    """

    __slots__ = ("come", "ends", "previous")

    def __init__(self) -> None:
        self.previous: list[tuple[int, Any]] = []
        self.ends: list[AtEnd] = []
        self.come: list[int] = []

    def hold(self, number: int, handler: Any, block: uninterrupted_call) -> None:
        """Handle a signal instead of `handler`, until `block` dies."""
        self.previous.append((number, handler))
        _set_handler(number, self)
        self.ends.append(AtEnd(block, methodcaller("set_handler", number, handler)))

    def wait_for(self, block: uninterrupted_call) -> None:
        """Make the death of `block` restore the handlers, and then run the handlers of the signals that have come."""
        n_ready = -1
        while n_ready != len(self.come):  # A signal may come while the loop runs.
            n_ready = len(self.come)
            ends = [AtEnd(block, methodcaller("interrupt", number)) for number in self.come]
            self.ends = [*ends, *[AtEnd(block, methodcaller("set_handler", *each)) for each in self.previous]]

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
        if not self.ends:  # The block is only being entered, or entering it has failed.
            return
        block = self.ends[-1]()
        if block is not None and block.is_in_call(frame):
            self.wait_for(block)
        else:
            # The block's function has returned, but its object is alive, because an error that somebody keeps holds the
            # frame. Or the object died in another thread.
            self.give_up()
            self.deliver()


class uninterrupted_call:
    """Delay a Ctrl-C until the function that holds this object in a variable has returned.

    Use it as `with uninterrupted_call() as held: ...`. A Ctrl-C that has come by then is raised in the caller, after
    the caller has the result. If the block raises, there is no result, and the delay ends with the block.

    An error that somebody keeps holds the frames of all callers with their variables, even of callers that continue. So
    a function whose callees may keep an error writes `del held` before `return result`. No handler runs between these
    two statements.
    Cost: some three microseconds, or ten with `holds_all`.

    Args:
        holds_all: delay the signals of timeouts as well; see `uninterrupted`.
    """

    __slots__ = ("__weakref__", "_frame_id", "_numbers", "_waiting")

    def __init__(self, *, holds_all: bool = False) -> None:
        # The id is kept instead of the frame, because the frame refers to this object.
        self._frame_id = id(sys._getframe(1))
        self._waiting: _Waiting | None = None
        self._numbers = _HELD_SIGNALS if holds_all else _CTRL_C

    def is_in_call(self, frame: FrameType | None) -> bool:
        """Return True if the function that made this object still runs: its frame is `frame` or one of its callers."""
        while frame is not None and id(frame) != self._frame_id:
            frame = frame.f_back
        return frame is not None

    def __enter__(self) -> uninterrupted_call:
        if get_ident() != _main_thread:
            return self
        waiting = self._waiting = _Waiting()
        try:
            for number in self._numbers:
                if callable(handler := _get_handler(number)):
                    waiting.hold(number, handler, self)
            if waiting.come:
                waiting.wait_for(self)
        except BaseException:  # A signal came before its handler was replaced.
            waiting.give_up()
            raise
        return self

    def deliver(self) -> None:
        """Raise the signals that have come so far. Call it last, while the block can still undo all its work."""
        if (waiting := self._waiting) is not None:
            waiting.ends = waiting.ends[-len(waiting.previous) :]
            waiting.deliver()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # The wait must end here, because the traceback keeps the variable alive.
        if kind is not None and (waiting := self._waiting) is not None:
            waiting.give_up()
            waiting.deliver()


class Lease:
    """Says whether a block runs: in `with lease: ...`, and only there, `lease.is_taken` is True."""

    def __init__(self) -> None:
        self._block: ref[Any] | None = None

    @property
    def is_taken(self) -> bool:
        return not has_ended(self._block)

    def __enter__(self) -> None:
        pass

    __exit__ = ExitOnStack()

    def _leave(self, *error: object) -> None:
        pass
