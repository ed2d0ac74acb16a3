"""Streams snapshots of the memory to listeners. It takes no snapshots while nobody listens."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.server.errors import ApiError, clip, too_many
from hybridmem.chat.server.formats import EventStream
from hybridmem.chat.server.memory_view.snapshot import Chosen, engine_counts, snapshot
from hybridmem.chat.server.metrics import Metrics
from hybridmem.chat.server.usage import usage_of

LEAST_SECONDS = 0.25
"""At least this many seconds lie between two snapshots."""
_MOST_SHARE = 0.01
"""Snapshots may take this share of one processor's time, and steps may wait for them for this share of all time. So a
large memory is shown less often, and steps are slowed by 2 % at most.
"""
_QUIET_SECONDS = 10.0
"""If nothing has changed for this many seconds, a stream sends a sign of life."""
_MOST_LISTENERS = 64


class Served(Protocol):
    """Declares the attributes of the service that the view reads."""

    engine: Engine
    model_id: str
    metrics: Metrics
    is_open: bool


class Taken(NamedTuple):
    """Holds a snapshot, its event for all listeners, and the engine's counts just before it."""

    state: object
    shown: dict[str, Any]
    event: str


class MemoryView:
    """Answers /v1/memory and /v1/memory/events.

    All listeners share the pause between two snapshots, so many listeners slow the engine no more than one does.
    """

    def __init__(self, service: Served) -> None:
        self._service = service
        self._lock = asyncio.Lock()
        self._next_at = 0.0
        self._last: tuple[Chosen, Taken] | None = None
        self.n_listeners = 0
        self.n_snapshots = 0

    async def show(self, request: Request) -> Response:
        """Return one snapshot. Raises ApiError 400 or 404."""
        return JSONResponse((await self._take(_sequence_of(request))).shown)

    async def stream(self, request: Request) -> Response:
        """Return a stream of snapshots.

        The first comes at once, and each other when something has changed. Raises ApiError 400, 404 or 429.

        A listener may ask for a sequence. When that is closed, the listener gets an event "closed", and the stream goes
        on.
        """
        if self.n_listeners >= _MOST_LISTENERS:
            raise too_many("listeners", n=self.n_listeners)
        sequence_id = _sequence_of(request)
        return EventStream(self._events(await self._take(sequence_id), sequence_id))

    async def _events(self, taken: Taken, sequence_id: Chosen) -> AsyncGenerator[str, None]:
        self.n_listeners += 1
        try:
            yield taken.event
            sent_at = time.perf_counter()
            while self._service.is_open:
                await asyncio.sleep(LEAST_SECONDS)
                if self._state() != taken.state:
                    try:
                        taken = await self._take(sequence_id)
                    except ApiError as error:
                        sequence_id, event = None, json.dumps(error.body, separators=(",", ":"))
                        yield f"event: closed\ndata: {event}\n\n"
                        taken = await self._take(None)
                    yield taken.event
                    sent_at = time.perf_counter()
                elif time.perf_counter() - sent_at > _QUIET_SECONDS:
                    yield ": nothing has changed\n\n"
                    sent_at = time.perf_counter()
        finally:
            self.n_listeners -= 1

    def _state(self) -> object:
        """Return values that differ whenever the memory or the engine has changed. This waits for no step."""
        memory = self._service.engine.memory
        return engine_counts(self._service.engine), memory.free_bytes, len(memory.sequences)

    async def _take(self, sequence_id: Chosen) -> Taken:
        """Take a snapshot.

        Return the last one instead if nothing has changed, or if the next one would come too soon.
        """
        async with self._lock:
            if self._last is not None and self._last[0] == sequence_id:
                if time.perf_counter() < self._next_at or self._state() == self._last[1].state:
                    return self._last[1]
            await asyncio.sleep(self._next_at - time.perf_counter())
            started, state = time.perf_counter(), self._state()
            shown, event, seconds = await asyncio.to_thread(self._count, sequence_id)
            self.n_snapshots += 1
            self._next_at = started + seconds / _MOST_SHARE
            self._last = sequence_id, Taken(state, shown, event)
            return self._last[1]

    def _count(self, sequence_id: Chosen) -> tuple[dict[str, Any], str, float]:
        """Return a snapshot, its event, and the seconds for which steps waited."""
        began = time.thread_time()
        shown = snapshot(self._service.engine, self._service.model_id, sequence_id)
        ended = self._service.metrics.last_generation
        shown["last_request"] = None if ended is None else usage_of([ended], [ended])
        event = f"data: {json.dumps(shown, separators=(',', ':'))}\n\n"
        return shown, event, max(time.thread_time() - began, shown["cost"]["held_seconds"])


def _sequence_of(request: Request) -> Chosen:
    """Return the id that `?sequence=` names, or "newest". Raises ApiError 400."""
    text = request.query_params.get("sequence")
    if text is None:
        return None
    if text == "newest":
        return "newest"
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        message = f"Invalid 'sequence': {clip(text)!r} is no id of a sequence; give one, or 'newest'."
        raise ApiError(400, message, param="sequence", code="invalid_value")
    return int(text)
