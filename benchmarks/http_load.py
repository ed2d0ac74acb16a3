"""Sends a server streamed chat completions, a fixed number of them at once, and measures when first tokens come.

The client runs beside the server, so it does little work: one event loop, HTTP by hand, no parsing of events. It sends
the same load as GuideLLM's concurrent profile: each of N clients sends its next request when it has received the whole
reply to its last request.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from benchmarks.metrics_probe import Readings, probing

_END = b"data: [DONE]\n\n"
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_PATIENCE_SECONDS = 120.0


@dataclass
class Load:
    """Holds the measured times and tokens of some requests.

    Attributes:
        seconds: from the first request to the end of the last reply.
        n_tokens: tokens of all replies, as the server's `usage` says.
        first_token_seconds: for each request, the time from the first byte sent to the first event of the reply. The
            first request of each client is left out, because all of them come at the same moment.
        metrics: readings of `GET /metrics` during the load, about eight a second, by another process.
    """

    seconds: float = 0.0
    n_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)
    metrics: Readings = field(default_factory=Readings)

    @property
    def tokens_per_second(self) -> float:
        return self.n_tokens / self.seconds


class _Client(asyncio.Protocol):
    """Sends requests over one connection, one after the other."""

    def __init__(self, requests: Iterator[bytes], load: Load) -> None:
        self._requests = requests
        self._load = load
        self._received = bytearray()
        self._started = 0.0
        self._has_begun = False
        self._n_sent = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send_next()

    def _send_next(self) -> None:
        request = next(self._requests, None)
        if request is None:
            self.done.set_result(None)
            return
        self._received.clear()
        self._has_begun = False
        self._n_sent += 1
        self._started = time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._has_begun and b"data: " in self._received:
            self._has_begun = True
            if self._n_sent > 1:
                self._load.first_token_seconds.append(time.perf_counter() - self._started)
        if self._received.endswith(b"0\r\n\r\n") and _END in self._received:
            usage = _USAGE.findall(self._received)
            self._load.n_tokens += int(usage[-1])
            self._send_next()
        elif not self._has_begun and len(self._received) > 12 and not self._received.startswith(b"HTTP/1.1 200"):
            self._fail(RuntimeError(f"the server refused: {bytes(self._received[:500])!r}"))

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(error or RuntimeError(f"the server closed the connection: {bytes(self._received[-500:])!r}"))

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


def ask(url: str, bodies: Sequence[dict[str, object]], n_at_once: int) -> Load:
    """Send chat completions, `n_at_once` at a time. Raises RuntimeError if one is not answered."""
    with probing(url) as metrics:
        load = asyncio.run(_ask(url, bodies, n_at_once))
    load.metrics = metrics
    return load


async def _ask(url: str, bodies: Sequence[dict[str, object]], n_at_once: int) -> Load:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    load, requests = Load(), iter([_as_http(f"{host}:{port}", body) for body in bodies])
    started = time.perf_counter()
    connections = [
        await asyncio.get_running_loop().create_connection(lambda: _Client(requests, load), host, port)
        for _ in range(min(n_at_once, len(bodies)))
    ]
    try:
        await asyncio.wait_for(asyncio.gather(*(client.done for _, client in connections)), _PATIENCE_SECONDS)
    finally:
        for transport, _ in connections:
            transport.close()
    load.seconds = time.perf_counter() - started
    return load


def _as_http(host: str, body: dict[str, object]) -> bytes:
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
