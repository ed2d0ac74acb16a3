"""How long a memory serves: until it is closed, in the process that made it, and never as a copy."""

from __future__ import annotations

import os
import weakref
from typing import NoReturn

from memory.errors import SequenceError

_ELSEWHERE = (
    "this memory was made in another process, of which this one is a fork; make a memory in each process, in processes started by 'spawn', "
    "and hand sequences over by save and load"
)


class NotCopied:
    """Mixin of objects that mean something in one place only: they refuse `copy`, `deepcopy`, `pickle` and so `multiprocessing`.

    Attributes:
        instead: what to do.
    """

    __slots__ = ()
    instead = ""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise SequenceError(f"a {type(self).__name__} cannot be copied, pickled or sent to another process; {self.instead}")


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


class Lifetime(NotCopied):
    """A memory as long as it serves. Its parts are its private attributes."""

    instead = "write sequences with memory.save(sequence, path) and read them with load in a memory made there, or fork a sequence"

    def __init__(self) -> None:
        self._why_ended: str | None = None
        _alive.add(self)

    @property
    def is_open(self) -> bool:
        """Whether it serves: it has not been closed, and is of this process."""
        return self._why_ended is None

    def _end(self, why: str, *, keeps: bool = False) -> None:
        """From now on every use raises SequenceError. What the memory held is freed, unless it `keeps` it, untouched."""
        parts = {name: part for name, part in vars(self).items() if name.startswith("_") and part is not None}
        vars(self).update(dict.fromkeys(parts, _Ended(why, parts if keeps else None)))
        self._why_ended = why


_alive: weakref.WeakSet[Lifetime] = weakref.WeakSet()


def _end_all() -> None:
    """In a child made by `fork`: threads of kernels do not exist there, a CUDA device cannot be used, and files are the parent's."""
    for memory in list(_alive):
        memory._end(_ELSEWHERE, keeps=True)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_all)
