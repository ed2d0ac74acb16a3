"""Reads the bodies of requests. It limits their size, how slowly they may come, and how many come at once."""

from __future__ import annotations

import asyncio
from asyncio import sleep
from typing import Protocol

from starlette.types import Receive

from hybridmem.chat.server.access import Headers
from hybridmem.chat.server.options import ServerOptions
from hybridmem.chat.server.texts import LONG_BYTES

_PATIENCE_SECONDS = 5.0
"""A body may take this many seconds before its rate is checked."""
_LARGE_BYTES_PER_SECOND = 8_000_000
"""While a reply is in progress, all large bodies together are read at this rate at most. The engine's steps wait for
the loop that reads them.
"""


class ClientGoneError(Exception):
    """Says that the client has closed the connection."""


class Answering(Protocol):
    """Declares the number of requests that are being answered."""

    @property
    def n_taken(self) -> int: ...


class Turnstile:
    """Lets pieces of large bodies pass one at a time, so slowly that other clients can be answered meanwhile."""

    def __init__(self, places: Answering) -> None:
        self._places = places
        self._lock = asyncio.Lock()

    async def wait(self, n_bytes: int) -> None:
        """Wait for the turn of a body whose newest piece had `n_bytes` bytes."""
        async with self._lock:
            await sleep(n_bytes / _LARGE_BYTES_PER_SECOND if self._places.n_taken else 0)


class Incoming:
    """Reads a body as it comes in.

    Args:
        turnstile: the turnstile that all large bodies share.
    Attributes:
        has_ended: whether the whole body has come.
    """

    def __init__(self, receive: Receive, turnstile: Turnstile) -> None:
        self.receive = receive
        self._turnstile = turnstile
        self._n_bytes = 0
        self._n_newest = 0
        self.has_ended = False

    async def read(self, options: ServerOptions) -> bytes | None:
        """Read the whole body. Return None as soon as it has too many bytes.

        Raises:
            asyncio.TimeoutError: the body takes too long as a whole, or comes too slowly. ClientGoneError.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        body = bytearray()
        reading = asyncio.ensure_future(self._collect(body, options.max_body_bytes))
        try:
            while not reading.done():
                seconds = min(options.body_seconds, _PATIENCE_SECONDS + len(body) / options.body_bytes_per_second)
                seconds_left = started + seconds - loop.time()
                if seconds_left <= 0:
                    raise TimeoutError
                await asyncio.wait({reading}, timeout=seconds_left)
            return bytes(body) if reading.result() else None
        finally:
            reading.cancel()

    async def _collect(self, body: bytearray, most: int) -> bool:
        """Collect the body. Return True once it is whole, or False if it has more bytes than `most`."""
        while not self.has_ended and len(body) <= most:
            body += await self._next()
        return len(body) <= most

    async def skip(self, most: int) -> None:
        """Discard the body, until it ends or `most` bytes have passed. Raises ClientGoneError."""
        n_skipped = 0
        while not self.has_ended and n_skipped <= most:
            n_skipped += len(await self._next())

    async def _next(self) -> bytes:
        if self._n_bytes > LONG_BYTES:
            await self._turnstile.wait(self._n_newest)
        message = await self.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self.has_ended = not message.get("more_body", False)
        piece = bytes(message.get("body", b""))
        self._n_newest = len(piece)
        self._n_bytes += self._n_newest
        return piece


def declared_bytes(headers: Headers) -> int:
    declared = headers.get(b"content-length", b"0")
    return int(declared) if declared.isdigit() else 0
