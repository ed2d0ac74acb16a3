"""Carries what a step of the engine brings to the event loop: with one call, however many replies it is for."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")
_LOT = 8


class Courier(Generic[T]):
    """Puts things that another thread sends into queues of an event loop.

    To wake the loop is a system call, which costs more than the rest of what a token takes on its way. What has come is
    delivered in lots, between which the loop looks after its other connections.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._sent = deque[tuple[asyncio.Queue[T], T]]()
        self._is_coming = False

    def send(self, queue: asyncio.Queue[T], thing: T) -> None:
        """Send something to a queue; from the thread that steps. Raises RuntimeError: the loop is closed."""
        self._sent.append((queue, thing))
        if not self._is_coming:
            self._is_coming = True
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._is_coming = False  # first: what is sent from now on is delivered here or by the next call
        for _ in range(min(_LOT, len(self._sent))):
            queue, thing = self._sent.popleft()
            queue.put_nowait(thing)
        if self._sent and not self._is_coming:
            self._is_coming = True
            self._loop.call_soon(self._deliver)
