"""Carries the results of a step from the engine's thread to the event loop, with one call for all replies."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
_LOT = 8


class Courier(Generic[T]):
    """Puts things that another thread sends into queues of an event loop.

    Waking the loop is a system call, which costs more than every other step of a token's way. The loop delivers
    what has come in batches, and serves its other connections in between.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._sent = deque[tuple[asyncio.Queue[T], T]]()
        self._is_coming = False

    def send(self, queue: asyncio.Queue[T], thing: T) -> None:
        """Send something to a queue.

        Only the thread that steps may call this. Raises RuntimeError if the loop is closed.
        """
        self._sent.append((queue, thing))
        if not self._is_coming:
            self._is_coming = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_coming = False  # This comes first: things sent from now on are delivered below or by the next call.
        for _ in range(min(_LOT, len(self._sent))):
            queue, thing = self._sent.popleft()
            queue.put_nowait(thing)
        if self._sent and not self._is_coming:
            self._is_coming = True
            self._loop.call_soon(self._deliver)
