"""Lets one thread at a time read or write the books of a memory, so that several threads may use it."""

from __future__ import annotations

from _thread import RLock
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from hybridmem.memory.blocks.journal import Journal

Method = TypeVar("Method", bound=Callable[..., Any])


class MemoryLock(RLock):  # type: ignore[misc] # C's class is not final.
    """Is the lock of a memory's books.

    Entering it runs no bytecode. So no exception comes between taking the lock and the block that gives it back.

    Attributes:
        journal: the memory's journal.
    """

    __slots__ = ("journal",)
    journal: Journal


def locked(method: Method) -> Method:
    """Run a method of an object that has a `lock` while no other thread is in such a method of the same memory.

    What an exception has left half done is finished or undone first. Between the methods of a step the lock is free, so
    models of several threads compute side by side.
    Cost: some 0.3 microseconds.
    """

    @wraps(method)
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.lock:
            journal = self.lock.journal
            if journal.is_open or journal.watched:
                journal.mend()
            return method(self, *arguments, **options)

    return cast(Method, run)
