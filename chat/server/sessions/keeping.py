"""Enforces the limits of stored sessions, and keeps pinned nodes pinned, from the server's start to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hybridmem.chat.server.errors import log
from hybridmem.chat.server.sessions.pins import Pins
from hybridmem.chat.server.sessions.session_repository import SessionRepository

_PIN_SECONDS = 2.0
_LIMIT_SECONDS = 60.0


@asynccontextmanager
async def keeping(repository: SessionRepository, pins: Pins) -> AsyncIterator[None]:
    """Restore the pins, and enforce the limits of sessions while the block runs. Close the store at the end."""
    try:
        await pins.restore()
        task = asyncio.create_task(_keep(repository, pins))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    finally:
        repository.close()


async def _keep(repository: SessionRepository, pins: Pins) -> None:
    seconds = _LIMIT_SECONDS
    while True:
        try:
            await pins.expire()
            if seconds >= _LIMIT_SECONDS:
                seconds = 0.0
                options = repository.service.options
                used_before = repository.store.now() - options.session_days * 86400
                for session in await repository.ask(repository.store.overdue, used_before, options.session_bytes):
                    await repository.delete_session(session)
        except Exception:
            log.exception("stored sessions could not be kept within their limits")
        await asyncio.sleep(_PIN_SECONDS)
        seconds += _PIN_SECONDS
