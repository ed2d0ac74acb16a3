"""Lets one thread at a time read or write the books of a memory, so that several threads may use it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def locked(method: Method) -> Method:
    """Run a method of an object that has a `lock` while no other thread is in such a method of the same memory.

    Between the methods of a step the lock is free, so models of several threads compute side by side.
    Cost: some 0.3 microseconds.
    """

    @wraps(method)
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        with self.lock:
            return method(self, *arguments, **options)

    return cast(Method, run)
