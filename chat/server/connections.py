"""Limits connections: their number, the time of their clients, and bytes that are refused before there is a request.

uvicorn's h11 protocol waits for a head without end and answers what is malformed in plain text; this one does neither.
Heads are collected here and handed to h11 when they are whole and `check_head` has nothing against them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from hybridmem.chat.server.errors import RETRY, ApiError, stopping
from hybridmem.chat.server.heads import MOST_HEAD_BYTES, check_head, find_head_end
from hybridmem.chat.server.metrics import Metrics
from hybridmem.chat.server.options import ServerOptions

MOST_CHUNKS = 4096
"""Chunks of one body: each costs the event loop as much as a small request."""
MOST_READ_BYTES = 16 << 10
"""Bytes that are read from one connection before the event loop serves the others."""
_WITH_BODY = b"POST "
"""The start of requests that bring work; all others are answered from what is there."""
_LOG_SECONDS = 60.0


class Seldom(logging.Filter):
    """Logs each message once in a while, with the number of repetitions that it held back.

    Args:
        seconds: between two of the same message.
    """

    def __init__(self, seconds: float = _LOG_SECONDS) -> None:
        super().__init__()
        self._seconds = seconds
        self._last: dict[str, float] = {}
        self._n_held: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        message, now = record.msg, time.monotonic()
        if now - self._last.get(message, -float("inf")) < self._seconds:
            self._n_held[message] = self._n_held.get(message, 0) + 1
            return False
        self._last[message] = now
        n_held = self._n_held.pop(message, 0)
        if n_held:
            record.msg = f"{message.rstrip()} (and {n_held:,} times more since this was last written)"
        return True


class Turns:
    """Lets requests that bring work begin one after the other; the event loop serves other connections in between.

    What begins goes through several callbacks, each as expensive as that of a token. Where a hundred clients send at
    once, whoever asks for no more than `/metrics` would wait for all of them, at each of its own callbacks.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: deque[Connection] = deque()

    def take(self, connection: Connection) -> bool:
        """True if its request may begin; else its `begin` is called later."""
        if self._is_taken:
            self._waiting.append(connection)
            return False
        self._give(connection)
        return True

    def leave(self, connection: Connection) -> None:
        """Forget a connection that waits: it was lost, or begins by itself."""
        with suppress(ValueError):
            self._waiting.remove(connection)

    def _give(self, connection: Connection) -> None:
        self._is_taken = True
        connection.loop.call_soon(self._next)

    def _next(self) -> None:
        self._is_taken = False
        if self._waiting:
            connection = self._waiting.popleft()
            self._give(connection)
            connection.begin()


log = logging.getLogger("hybrid_memory.connections")
log.addFilter(Seldom())


class Connections:
    """Holds the open connections, bounded in number and per peer address.

    Where there are too many, the one that waits longest for its client is closed: half-sent requests cannot keep others
    out.
    """

    def __init__(self, options: ServerOptions, metrics: Metrics) -> None:
        self.options = options
        self.metrics = metrics
        self.turns = Turns()
        self._open: dict[Connection, None] = {}
        self._by_peer: dict[str, dict[Connection, None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> None:
        """Take a new connection in; it is refused if no other can give way."""
        peers = self._by_peer.get(connection.peer, {})
        if len(peers) >= self.options.max_peer_connections:
            self._make_way(connection, peers)
        elif len(self._open) >= self.options.max_connections:
            self._make_way(connection, self._open)
        if not connection.is_refused:
            self._open[connection] = None
            self._by_peer.setdefault(connection.peer, {})[connection] = None

    def discard(self, connection: Connection) -> None:
        if self._open.pop(connection, connection) is None:
            peers = self._by_peer[connection.peer]
            del peers[connection]
            if not peers:
                del self._by_peer[connection.peer]

    def _make_way(self, connection: Connection, crowd: dict[Connection, None]) -> None:
        waiting = [other for other in crowd if other.awaits_client]
        loser = min(waiting, key=lambda other: other.waits_since, default=connection)
        self.discard(loser)
        message = "There are too many connections; the one that waits longest for its client is closed."
        loser.refuse(ApiError(503, message, code="too_many_connections", headers=RETRY))


class _Parser(h11.Connection):
    """Parses HTTP by h11, and refuses bodies in very many chunks."""

    _n_chunks = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._n_chunks = 0
        elif isinstance(event, h11.Data):
            self._n_chunks += event.chunk_start
            if self._n_chunks > MOST_CHUNKS:
                raise h11.RemoteProtocolError(f"a body of more than {MOST_CHUNKS} chunks", error_status_hint=413)
        return event


class Connection(H11Protocol):
    """Holds one client's connection.

    Args:
        connections: those it counts among.
    Attributes:
        peer: the client's address, without its port.
        waits_since: when it began to wait for a request, in the event loop's seconds.
        is_refused: it was answered without the app, and closes.
    """

    def __init__(self, connections: Connections, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.conn = _Parser(h11.SERVER, MOST_HEAD_BYTES)
        self.logger = log  # uvicorn's messages about clients are limited like those of this module
        self.peer = ""
        self.waits_since = 0.0
        self.is_refused = False
        self._connections = connections
        self._head = bytearray()
        self._waiting: bytes | None = None  # a request that waits for its turn
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def awaits_client(self) -> bool:
        """True if there is no complete request to answer: it waits for the client's bytes, or to be closed."""
        if self._waiting is not None:
            return False
        return self.transport.is_closing() or self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    # What asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(transport, "max_size"):  # asyncio's own; a long read delays all other connections
            transport.max_size = MOST_READ_BYTES
        self.peer = self.client[0] if self.client is not None else ""
        self.waits_since = self.loop.time()
        self._start_head_timer()
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._leave_turn()
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._waiting is not None:  # what came before reading was paused
            self._waiting += data
        elif self.conn.their_state is h11.IDLE:
            self._receive_head(data)
        elif self.conn.their_state is h11.SEND_BODY:
            self._take_in(data)
        elif data:
            self._end_after_answer()

    def _take_in(self, data: bytes) -> None:
        """Hand a whole head, or part of a body, to h11."""
        super().data_received(data)
        if not self.transport.is_closing() and self.conn.their_state is h11.DONE and self.conn.trailing_data[0]:
            self._end_after_answer()

    # Heads

    def _receive_head(self, data: bytes) -> None:
        if self._head_timer is None:  # the first bytes behind an earlier request
            self._unset_keepalive_if_required()
            self._start_head_timer()
        n_searched = len(self._head)
        self._head += data
        end = find_head_end(self._head, n_searched)
        if (len(self._head) if end is None else end) > MOST_HEAD_BYTES:
            message = f"The request's head has more than {MOST_HEAD_BYTES:,} bytes."
            self.refuse(ApiError(431, message, code="headers_too_large"))
        elif end is not None:
            received, self._head = bytes(self._head), bytearray()
            self._stop_timers()
            try:
                check_head(received[:end])
            except ApiError as error:
                self.refuse(error)
                return
            if received.startswith(_WITH_BODY) and not self._connections.turns.take(self):
                self._waiting = received
                self.flow.pause_reading()
                return
            self._take_in(received)

    def begin(self) -> None:
        """Hand the request that has waited for its turn to h11; do nothing if there is none."""
        received = self._leave_turn()
        if received is not None and not self.transport.is_closing():
            self.flow.resume_reading()
            self._take_in(received)

    def _leave_turn(self) -> bytes | None:
        """Stop waiting for a turn, and return the request that waited; None if there was none."""
        received, self._waiting = self._waiting, None
        if received is not None:
            self._connections.turns.leave(self)
        return received

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._connections.options.head_seconds, self._refuse_slow_head)

    def _stop_timers(self) -> None:
        self._unset_keepalive_if_required()
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse_slow_head(self) -> None:
        message = f"The request's head took longer than {self._connections.options.head_seconds:g} s."
        self.refuse(ApiError(408, message, code="request_timeout"))

    def _end_after_answer(self) -> None:
        """Close after the response in progress: bytes that follow a request unasked are never read as another one."""
        self.cycle.keep_alive = False
        self.flow.resume_reading()  # else a disconnect would not be noticed

    # What uvicorn calls

    def send_400_response(self, msg: str) -> None:
        self.refuse(ApiError(400, "This is not valid HTTP.", code="malformed_http"))

    def _should_upgrade(self) -> bool:
        return False  # an offer of another protocol may be ignored, and need not be logged

    def on_response_complete(self) -> None:
        self.waits_since = self.loop.time()
        super().on_response_complete()

    def shutdown(self) -> None:
        self.begin()
        if self.cycle is not None and self.conn.their_state is h11.SEND_BODY:
            self.refuse(stopping())
        elif not self.transport.is_closing():
            super().shutdown()

    def refuse(self, error: ApiError) -> None:
        """Respond without the app, unless a response has begun, and close. A connection that is closing is cut."""
        self._stop_timers()
        self._leave_turn()
        if self.transport.is_closing():
            self.transport.abort()
            return
        self.is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            has_begun = self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        else:
            has_begun = False
        if not has_begun:
            self.transport.write(_as_bytes(error))
        self.transport.close()
        self._connections.metrics.refused_connections.labels(error.code).inc()
        log.warning(f"a connection was refused: {error}")


def _as_bytes(error: ApiError) -> bytes:
    response = error.response()
    fields = [*response.raw_headers, (b"connection", b"close")]
    start = b"HTTP/1.1 %d %s\r\n" % (response.status_code, STATUS_PHRASES[response.status_code])
    return start + b"".join(b"%s: %s\r\n" % field for field in fields) + b"\r\n" + bytes(response.body)
