"""Ends a memory: when it is closed, or in a child process made by `fork`, every later use raises SequenceError."""

from __future__ import annotations

import os
import weakref
from typing import NoReturn

from hybridmem.memory.errors import SequenceError

_ELSEWHERE = (
    "this memory was made in another process, of which this one is a fork; make a memory in each process, in processes "
    "started by 'spawn', and hand sequences over by save and load"
)


class _Ended:
    """Replaces the parts of a memory that has ended. Every use of it raises SequenceError."""

    def __init__(self, why: str, kept: object) -> None:
        self._why, self._kept = why, kept

    def __getattr__(self, name: str) -> NoReturn:
        raise SequenceError(self._why)

    def __iter__(self) -> NoReturn:
        raise SequenceError(self._why)

    def __delitem__(self, key: object) -> NoReturn:
        raise SequenceError(self._why)


class Lifetime:
    """Is the base class of objects that can be ended. After the end, every use of their parts raises SequenceError.

    Attributes:
        parts: the names of the attributes that are replaced at the end.
        why_ended: the reason, for the error message. None until the object is ended.
    """

    parts: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.why_ended: str | None = None
        _alive.add(self)

    def end(self, why: str, *, keeps: bool = False) -> None:
        """End this object. Free its parts; if `keeps` is True, hold them untouched instead."""
        parts = {name: getattr(self, name) for name in self.parts}
        ended: dict[str, object] = dict.fromkeys(parts, _Ended(why, parts if keeps else None))
        vars(self).update(ended | {"why_ended": why})


_alive: weakref.WeakSet[Lifetime] = weakref.WeakSet()


def _end_all() -> None:
    """End all memories in a child made by `fork`: it has no kernel threads, no CUDA, and no files of its own."""
    for memory in list(_alive):
        memory.end(_ELSEWHERE, keeps=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_all)
