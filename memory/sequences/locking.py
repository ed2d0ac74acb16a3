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

    Entering the lock runs no bytecode. So no exception can come between taking the lock and entering the block that
    releases it.

    Attributes:
        journal: the memory's journal.
    """

    __slots__ = ("journal",)
    journal: Journal


def locked(method: Method) -> Method:
    """Run a method of an object that has a `lock`, so that no other thread runs such a method of the same memory.

    The wrapper first finishes or undoes what an exception has left half done. The lock is free between the methods of a
    step, so models of several threads compute at the same time.
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
