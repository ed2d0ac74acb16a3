"""How long a memory serves: until it is closed, in the process that made it, and never as a copy."""

from __future__ import annotations

import os
import weakref
from typing import NoReturn

from memory.errors import SequenceError

_ELSEWHERE = (
    "this memory was made in another process, of which this one is a fork; make a memory in each process, in processes "
    "started by 'spawn', and hand sequences over by save and load"
)


class _Ended:
    """Stands where the parts of a memory were that serves no more: using it raises SequenceError."""

    def __init__(self, why: str, kept: object) -> None:
        self._why, self._kept = why, kept

    def __getattr__(self, name: str) -> NoReturn:
        raise SequenceError(self._why)

    def __iter__(self) -> NoReturn:
        raise SequenceError(self._why)

    def __delitem__(self, key: object) -> NoReturn:
        raise SequenceError(self._why)


class Lifetime:
    """Base of what serves until it is ended: then every use of its parts raises SequenceError.

    Attributes:
        parts: names of the attributes that go.
        why_ended: None as long as it serves.
    """

    parts: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.why_ended: str | None = None
        _alive.add(self)

    def end(self, why: str, *, keeps: bool = False) -> None:
        """Serve no longer. What the parts held is freed, unless this `keeps` it, untouched."""
        parts = {name: getattr(self, name) for name in self.parts}
        vars(self).update(dict.fromkeys(parts, _Ended(why, parts if keeps else None)))
        self.why_ended = why


_alive: weakref.WeakSet[Lifetime] = weakref.WeakSet()


def _end_all() -> None:
    """In a child made by `fork`: threads of kernels do not exist there, a CUDA device cannot be used, and files are the
    parent's.
    """
    for memory in list(_alive):
        memory.end(_ELSEWHERE, keeps=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_all)
