"""What every request passes on its way in and out: the key, the limits, the counters, and the end of it when its client goes away."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from chat.server.errors import RETRY, ApiError, as_api_error, stopping
from chat.server.metrics import Metrics
from chat.server.options import ServerOptions

_PATHS = ("/health", "/metrics", "/v1/models", "/v1/chat/completions", "/v1/completions")
_DRAIN_SECONDS = 2.0
CLIENT_GONE = 499
"""What is counted for a client that did not wait for its answer; nobody is sent it."""


class ClientGoneError(Exception):
    """The client has closed the connection."""


class Guarded(Protocol):
    """What the guard asks of the service behind it."""

    options: ServerOptions
    metrics: Metrics
    is_open: bool


@dataclass
class Exchange:
    """A request on its way.

    Attributes:
        started: when it came in, in seconds of time.perf_counter.
        at_end: called when it is over, in any way.
        status: what was answered; 0 as long as nothing was.
        is_complete: the whole answer was handed to the server.
        has_place: it counts among those that are answered at once.
        is_counted: it does not any more, and stands in the metrics.
    """

    path: str
    started: float = field(default_factory=time.perf_counter)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    status: int = 0
    is_complete: bool = False
    has_place: bool = False
    is_counted: bool = False


def exchange_of(scope: Mapping[str, object]) -> Exchange:
    exchange = scope["hybrid_memory.exchange"]
    assert isinstance(exchange, Exchange)
    return exchange


class Guard:
    """ASGI middleware. The app behind it runs as a task that is cancelled when the client goes, and what it left in `at_end` is called."""

    def __init__(self, app: ASGIApp, service: Guarded) -> None:
        self._app = app
        self._service = service
        self._n_active = 0
        key = service.options.api_key
        self._key_hash = None if key is None else _hash(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = Exchange(scope["path"])
        refusal = self._refuse(scope)
        if refusal is None and scope["method"] == "POST":
            exchange.has_place = True
            self._n_active += 1
        try:
            await self._answer(exchange, refusal, scope, receive, self._watch(exchange, send))
        except ClientGoneError:
            exchange.status = CLIENT_GONE
        finally:
            for end in exchange.at_end:
                end()
            self._count(exchange)

    def _count(self, exchange: Exchange) -> None:
        """A request is over: once, and before its client can know, or the client's next request might not be let in."""
        if exchange.is_counted:
            return
        exchange.is_counted = True
        self._n_active -= exchange.has_place
        path = exchange.path
        name = path if path in _PATHS else "/v1/models" if path.startswith("/v1/models/") else "other"
        self._service.metrics.requests.labels(name, str(exchange.status or CLIENT_GONE)).inc()

    def _refuse(self, scope: Scope) -> ApiError | None:
        """What can be told from the head of a request."""
        headers = dict(scope["headers"])
        if self._key_hash is not None and scope["path"] != "/health":
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not key:
                message = "This server wants an API key; send it as 'Authorization: Bearer KEY'."
                return ApiError(401, message, code="missing_api_key", headers={"WWW-Authenticate": "Bearer"})
            if not hmac.compare_digest(_hash(key.strip()), self._key_hash):  # of hashes: not even the key's length shows
                return ApiError(401, "This is not the server's API key.", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if scope["method"] != "POST":
            return None
        if not self._service.is_open:
            return stopping()
        if self._n_active >= self._service.options.max_requests:
            message = f"The server is answering {self._n_active} requests already; try again."
            return ApiError(429, message, code="rate_limit_exceeded", headers=RETRY)
        return None

    async def _answer(self, exchange: Exchange, refusal: ApiError | None, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if refusal is not None:
                await self._drain(scope, _Incoming(receive))
                raise refusal
            body = await self._read_body(scope, receive)
            await self._run({**scope, "hybrid_memory.exchange": exchange}, exchange, body, receive, send)
        except ClientGoneError:
            raise
        except Exception as error:
            answer = as_api_error(error)
            if exchange.status == 0:
                if answer.status in (401, 408, 413, 429):  # some of the body may still be on its way
                    answer.headers = {**answer.headers, "Connection": "close"}
                await answer.response()(scope, receive, send)

    async def _run(self, scope: Scope, exchange: Exchange, body: bytes, receive: Receive, send: Send) -> None:
        """Run the app until it is done or the client is gone."""
        given = False

        async def replay() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()  # that the client goes is seen below
            raise AssertionError("nobody sets it")

        task = asyncio.ensure_future(_as_coroutine(self._app(scope, replay, send)))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and exchange.is_complete:  # "gone" is also what a server says when all is sent
                await asyncio.wait({task})
        finally:
            was_done = task.done()
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
        if not was_done or task.cancelled():  # cancelled: a send that took too long
            raise ClientGoneError
        task.result()

    def _watch(self, exchange: Exchange, send: Send) -> Send:
        """`send`, noting what is sent; a client that takes nothing for too long counts as gone."""
        loop, seconds = asyncio.get_running_loop(), self._service.options.stall_seconds

        async def watched(message: Message) -> None:
            task = asyncio.current_task()
            assert task is not None
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
            elif is_last:
                self._count(exchange)
            timer = loop.call_later(seconds, task.cancel)
            try:
                await send(message)
            finally:
                timer.cancel()
            exchange.is_complete = is_last

        return watched

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        """Raises ApiError 408 or 413. What is too much is not kept."""
        limit = self._service.options.max_body_bytes
        incoming = _Incoming(receive)
        if _declared_bytes(scope) <= limit:
            try:
                body = await asyncio.wait_for(incoming.read(limit), self._service.options.body_seconds)
            except asyncio.TimeoutError:
                message = f"The body took longer than {self._service.options.body_seconds:g} s."
                raise ApiError(408, message, code="request_timeout") from None
            if body is not None:
                return body
        await self._drain(scope, incoming)
        raise ApiError(413, f"The body has more than {limit:,} bytes, which this server's --max-body allows.", code="request_too_large")

    async def _drain(self, scope: Scope, incoming: _Incoming) -> None:
        """Read a little of a body that nobody wants: a client that is still sending would not see the answer."""
        most = 16 * self._service.options.max_body_bytes
        if _declared_bytes(scope) > most or b"100-continue" in dict(scope["headers"]).get(b"expect", b"").lower():
            return
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(incoming.skip(most), _DRAIN_SECONDS)


class _Incoming:
    """A body as it comes in."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._has_ended = False

    async def read(self, most: int) -> bytes | None:
        """All of it, or None as soon as it has more bytes than `most`. Raises ClientGoneError."""
        body = bytearray()
        while not self._has_ended:
            body += await self._next()
            if len(body) > most:
                return None
        return bytes(body)

    async def skip(self, most: int) -> None:
        """Let go of what comes, until it ends or `most` bytes have gone by. Raises ClientGoneError."""
        n_skipped = 0
        while not self._has_ended and n_skipped <= most:
            n_skipped += len(await self._next())

    async def _next(self) -> bytes:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        self._has_ended = not message.get("more_body", False)
        return bytes(message.get("body", b""))


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _as_coroutine(awaitable: Awaitable[None]) -> None:
    await awaitable


def _declared_bytes(scope: Scope) -> int:
    declared = dict(scope["headers"]).get(b"content-length", b"0")
    return int(declared) if declared.isdigit() else 0


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
