"""Limits connections: their number, how long clients may take, and what they may send before a request is complete.

uvicorn's h11 protocol waits forever for a head, and answers malformed requests in plain text. The protocol here does
neither. It collects heads, and hands each to h11 once it is complete and `check_head` accepts it. CONTRIBUTING.md says
which other servers were tried in its place.
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
"""A body may come in this many chunks. Each costs the event loop as much as a small request."""
MOST_READ_BYTES = 16 << 10
"""The server reads at most this many bytes from one connection before it serves the others."""
_WITH_BODY = b"POST "
"""The first bytes of requests that cause work. All other requests are answered at once."""
_LOG_SECONDS = 60.0


class Seldom(logging.Filter):
    """Logs each message at most once in an interval, with the number of repetitions that it held back.

    Args:
        seconds: the interval between two equal messages.
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
    """Lets requests that cause work begin one after the other. The event loop serves other connections in between.

    A new request goes through several callbacks, each as expensive as the callback of a token. If a hundred clients
    sent at once, a mere request for `/metrics` would wait for all of them, before each of its own callbacks.
    """

    def __init__(self) -> None:
        self._is_taken = False
        self._waiting: deque[Connection] = deque()

    def take(self, connection: Connection) -> bool:
        """Return whether a connection's request may begin now. Otherwise its `begin` is called later."""
        if self._is_taken:
            self._waiting.append(connection)
            return False
        self._give(connection)
        return True

    def leave(self, connection: Connection) -> None:
        """Forget a waiting connection, because it was lost or has begun its request without a turn."""
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
    """Holds the open connections, and limits their number, in all and for each peer address.

    If there are too many, the connection that has waited longest for its client is closed. So half-sent requests cannot
    keep other clients out.
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
        """Add a new connection. It is refused if no other connection can be closed for it."""
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
        connections: the set of open connections to which it belongs.
    Attributes:
        peer: the client's address, without its port.
        waits_since: when it began to wait for a request, in seconds of the event loop.
        is_refused: whether it was answered without the app, and is closing.
    """

    def __init__(self, connections: Connections, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self.conn = _Parser(h11.SERVER, MOST_HEAD_BYTES)
        self.logger = log  # uvicorn's messages about clients are rate-limited like those of this module.
        self.peer = ""
        self.waits_since = 0.0
        self.is_refused = False
        self._connections = connections
        self._head = bytearray()
        self._waiting: bytes | None = None  # This is a request that waits for its turn.
        self._head_timer: asyncio.TimerHandle | None = None

    @property
    def awaits_client(self) -> bool:
        """Return whether there is no complete request to answer.

        It then waits for the client's bytes, or to be closed.
        """
        if self._waiting is not None:
            return False
        return self.transport.is_closing() or self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    # asyncio calls the methods below.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Only asyncio's own transports have this attribute. One long read would delay all other connections.
        if hasattr(transport, "max_size"):
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
        if self._waiting is not None:  # These bytes came before reading was paused.
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

    # The methods below read heads.

    def _receive_head(self, data: bytes) -> None:
        if self._head_timer is None:  # These are the first bytes after an earlier request.
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
        """Hand the request that waited for its turn to h11. Do nothing if there is none."""
        received = self._leave_turn()
        if received is not None and not self.transport.is_closing():
            self.flow.resume_reading()
            self._take_in(received)

    def _leave_turn(self) -> bytes | None:
        """Stop waiting for a turn. Return the request that waited, or None."""
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
        """Close after the response in progress.

        Bytes that follow a request unasked are never read as another request.
        """
        self.cycle.keep_alive = False
        self.flow.resume_reading()  # Without this, a disconnect would not be noticed.

    # uvicorn calls the methods below.

    def send_400_response(self, msg: str) -> None:
        self.refuse(ApiError(400, "This is not valid HTTP.", code="malformed_http"))

    def _should_upgrade(self) -> bool:
        return False  # A server may ignore the offer of another protocol, and need not log it.

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
        """Respond without the app, unless a response has begun, and close.

        A connection that is already closing is cut.
        """
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
