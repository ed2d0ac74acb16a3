"""Raises an exception at every bytecode: what runs is traced, and a signal comes at the chosen place.

The signal is that of Ctrl-C, or of a timer whose handler raises. An exception that another thread raises by
`PyThreadState_SetAsyncExc` comes at the same places as a timer's. A place is a bytecode of the library, the first time
that it runs.

By default the tests try some places, and a third of those where functions of chosen files begin and end, because no
`try` protects these. `TESTS=long` tries three times as many, and all where functions begin and end. `INTERRUPTS=all`
tries each place of all calls in all set-ups, which takes hours. `INTERRUPTS=once` tries each bytecode of an operation
in the first call and set-up that runs it. All kinds of steps are one operation.
"""

from __future__ import annotations

import dis
import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.extent import IS_LONG, pick

ROOT = Path(__file__).parent.parent
REGION = tuple(str(ROOT / "hybridmem" / package) + os.sep for package in ("memory", "models", "chat"))
TRIES_ALL = os.environ.get("INTERRUPTS") in ("all", "once")
TRIES_ONCE = os.environ.get("INTERRUPTS") == "once"


class TimedOutError(Exception):
    """The handler of a timer raises this, and so does another thread."""


def _time_out(number: int, frame: FrameType | None) -> None:
    raise TimedOutError


HANDLERS: dict[int, Callable[[int, FrameType | None], Any]] = {
    signal.SIGINT: signal.default_int_handler, signal.SIGALRM: _time_out
}  # fmt: skip


def by_handlers(values: Iterable[Any]) -> list[tuple[Any, int]]:
    """Pair each value with each signal that has a handler. By default, pair it with one signal, in turn."""
    numbers = list(HANDLERS)
    if IS_LONG or TRIES_ALL:
        return [(value, number) for value in values for number in numbers]
    return [(value, numbers[i % len(numbers)]) for i, value in enumerate(values)]


@cache
def _returns(code: CodeType, number: int) -> set[int]:
    """Find the bytecodes that return a variable.

    No handler runs there, because Python runs handlers at calls and loops.

    For Ctrl-C, only a return after a `del` counts, on which `uninterrupted_call` relies. Elsewhere Ctrl-C is held back.
    """
    found = {i.offset for i in dis.get_instructions(code) if i.opname == "RETURN_VALUE" and number != signal.SIGINT}
    for a, b, c in zip(*(islice(dis.get_instructions(code), i, None) for i in range(3)), strict=False):
        if (a.opname, b.opname, c.opname) == ("DELETE_FAST", "LOAD_FAST", "RETURN_VALUE"):
            found |= {b.offset, c.offset}
    return found


Place = tuple[CodeType, int]
"""A bytecode: of which code, and where in it."""

_TRIED: set[tuple[str, int, Place]] = set()
"""Which places of which operation have been tried by which signal in this process, for `INTERRUPTS=once`."""


@dataclass
class Outcome:
    """Holds what came of a call: its result, unless the interrupt came before there was one, and where it came."""

    result: Any
    has_returned: bool
    was_interrupted: bool
    place: Place | None = None


class _Tracer:
    """Lists places, and raises a signal before the chosen one runs for the first time.

    With a chosen place, only the bytecodes of its function are traced and listed: others run at their usual speed.
    """

    def __init__(self, chosen: Place | None, number: int) -> None:
        self.places: dict[Place, None] = {}
        self._chosen, self._number = chosen, number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            is_wanted = self._chosen is None or frame.f_code is self._chosen[0]
            if not is_wanted or not frame.f_code.co_filename.startswith(REGION):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            place = frame.f_code, frame.f_lasti
            if place not in self.places and place[1] not in _returns(frame.f_code, self._number):
                self.places[place] = None
                if place == self._chosen:
                    # Otherwise a handler would run between bytecodes where Python itself lets none run.
                    sys.settrace(None)
                    signal.raise_signal(self._number)
        return self


def interrupted(
    call: Callable[[], Any], chosen: Place | None, number: int = signal.SIGINT
) -> tuple[Outcome, list[Place]]:
    """Call it, with a signal before the chosen place.

    If an exception comes between `open` and `with`, Python warns of the file. It closes such a file when nobody refers
    to it any more, which is soon enough here.
    """
    tracer, old = _Tracer(chosen, number), sys.gettrace()
    outcome = Outcome(None, has_returned=False, was_interrupted=False, place=chosen)
    previous = signal.signal(number, HANDLERS[number])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "unclosed file", ResourceWarning)
        # Otherwise finalizers of memories from earlier attempts may run in this call. Python loses what they raise.
        gc.disable()
        try:
            sys.settrace(tracer)
            try:
                outcome.result = call()
                outcome.has_returned = True
                time.sleep(0)  # What waited until the call had returned is raised here.
            finally:
                sys.settrace(old)
        except (KeyboardInterrupt, TimedOutError):
            outcome.was_interrupted = True
        finally:
            gc.enable()
            assert signal.getsignal(number) is HANDLERS[number], "the handler has not been put back"
            signal.signal(number, previous)
    return outcome, list(tracer.places)


def try_places(
    attempt: Callable[[], tuple[Callable[[], Any], Callable[[Outcome], None]]],
    n_places: int,
    edges: tuple[str, ...] = (),
    number: int = signal.SIGINT,
    operation: str | None = None,
) -> int:
    """Interrupt a call at its places, one after the other.

    Args:
        attempt: makes all anew; what to call, and what must be true afterwards.
        n_places: about so many places in the long form, evenly spread; by default a third of them, but not fewer than
            six.
        edges: files; there the first and the last place of each function are tried as well, by default every third.
        number: of the signal.
        operation: what the call is in other set-ups as well. With `INTERRUPTS=once`, a place of an operation is tried
            in one of them.
    Returns:
        How many places were tried, now or in another set-up.
    """
    call, verify = attempt()
    outcome, places = interrupted(call, None, number)
    assert outcome.has_returned and not outcome.was_interrupted
    verify(outcome)
    n_spread = n_places if IS_LONG else min(n_places, max(6, n_places // 3))
    spread = [*places[:: len(places) // n_spread + 1], *_edges(places, edges)[:: pick(3, 1)]]
    chosen = places if TRIES_ALL else list(dict.fromkeys(spread))
    n_tried = 0
    for place in chosen:
        if TRIES_ONCE and operation is not None:
            if (operation, number, place) in _TRIED:
                n_tried += 1
                continue
            _TRIED.add((operation, number, place))
        for _ in range(2 if TRIES_ALL else 1):  # A memory that has been interrupted before may not reach this place.
            call, verify = attempt()
            outcome, found = interrupted(call, place, number)
            if place in found:
                break
        else:  # This call need not reach the place, because earlier calls have left what it would compute.
            continue
        n_tried += 1
        try:
            assert outcome.was_interrupted, "the interrupt was lost"
            verify(outcome)
        except BaseException as error:
            code, offset = place
            raise AssertionError(f"interrupted at {code.co_filename}:{code.co_name}+{offset}") from error
    assert 3 * n_tried >= min(n_spread, len(places)), "hardly any place was tried"
    return n_tried


def _edges(places: list[Place], files: tuple[str, ...]) -> list[Place]:
    names = [str(ROOT / "hybridmem" / file) for file in files]
    found: dict[CodeType, list[Place]] = {}
    for place in places:
        if place[0].co_filename in names:
            found.setdefault(place[0], []).append(place)
    return [place for of_code in found.values() for place in (of_code[0], of_code[-1])]
