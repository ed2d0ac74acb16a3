"""A Ctrl-C at every bytecode: what runs is traced, and at the chosen place the signal is raised as Python would raise
it.

A place is a bytecode of the library that runs, the first time that it does. By default some of them are tried, and
where functions of chosen files begin and end: there it is that no `try` helps. `INTERRUPTS=all` tries each.
"""

from __future__ import annotations

import dis
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
REGION = tuple(str(ROOT / package) + os.sep for package in ("memory", "chat"))
TRIES_ALL = os.environ.get("INTERRUPTS") == "all"


@cache
def _returns(code: CodeType) -> set[int]:
    """Find what returns a variable after a `del`: no handler runs there, because Python runs one at calls and loops.

    `uninterrupted_call` builds on this; elsewhere a place too many only makes a test stricter.
    """
    found = set[int]()
    for a, b, c in zip(*(islice(dis.get_instructions(code), i, None) for i in range(3)), strict=False):
        if (a.opname, b.opname, c.opname) == ("DELETE_FAST", "LOAD_FAST", "RETURN_VALUE"):
            found |= {b.offset, c.offset}
    return found


@dataclass
class Outcome:
    """What came of a call: its result, unless the interrupt was raised before there was one."""

    result: Any
    has_returned: bool
    was_interrupted: bool


Place = tuple[CodeType, int]
"""A bytecode: of which code, and where in it."""


class _Tracer:
    """Lists places, and raises SIGINT before the chosen one runs for the first time."""

    def __init__(self, chosen: Place | None) -> None:
        self.places: dict[Place, None] = {}
        self._chosen = chosen

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "call":
            if not frame.f_code.co_filename.startswith(REGION):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            place = frame.f_code, frame.f_lasti
            if place not in self.places and place[1] not in _returns(frame.f_code):
                self.places[place] = None
                if place == self._chosen:
                    sys.settrace(None)  # else a handler would run between bytecodes where Python lets none run
                    signal.raise_signal(signal.SIGINT)
        return self


def interrupted(call: Callable[[], Any], chosen: Place | None) -> tuple[Outcome, list[Place]]:
    """Call it, with a Ctrl-C before the chosen place."""
    outcome, tracer, old = Outcome(None, has_returned=False, was_interrupted=False), _Tracer(chosen), sys.gettrace()
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.settrace(tracer)
        try:
            outcome.result = call()
            outcome.has_returned = True
            time.sleep(0)  # what waited until the call had returned is raised here
        finally:
            sys.settrace(old)
    except KeyboardInterrupt:
        outcome.was_interrupted = True
    finally:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler has not been put back"
        signal.signal(signal.SIGINT, previous)
    return outcome, list(tracer.places)


def try_places(
    attempt: Callable[[], tuple[Callable[[], Any], Callable[[Outcome], None]]],
    n_default: int,
    edges: tuple[str, ...] = (),
) -> int:
    """Interrupt a call at its places, one after the other.

    Args:
        attempt: makes all anew; what to call, and what must be true afterwards.
        n_default: about so many places by default, evenly spread.
        edges: files; there the first and the last place of each function are tried as well.
    Returns:
        How many places were tried.
    """
    call, verify = attempt()
    outcome, places = interrupted(call, None)
    assert outcome.has_returned and not outcome.was_interrupted
    verify(outcome)
    chosen = (
        places if TRIES_ALL else list(dict.fromkeys([*places[:: len(places) // n_default + 1], *_edges(places, edges)]))
    )
    n_tried = 0
    for place in chosen:
        call, verify = attempt()
        outcome, found = interrupted(call, place)
        if place not in found:  # what has been kept from the calls before, this one need not do
            continue
        n_tried += 1
        try:
            assert outcome.was_interrupted, "the interrupt was lost"
            verify(outcome)
        except BaseException as error:
            code, offset = place
            raise AssertionError(f"interrupted at {code.co_filename}:{code.co_name}+{offset}") from error
    return n_tried


def _edges(places: list[Place], files: tuple[str, ...]) -> list[Place]:
    names = [str(ROOT / file) for file in files]
    found: dict[CodeType, list[Place]] = {}
    for place in places:
        if place[0].co_filename in names:
            found.setdefault(place[0], []).append(place)
    return [place for of_code in found.values() for place in (of_code[0], of_code[-1])]
