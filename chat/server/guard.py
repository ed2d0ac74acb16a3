"""Guards every request on its way in and out.

It checks access and limits, counts requests, and ends those whose client disconnects.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import Counter
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridmem.chat.server.access import Access, Headers, preflight_headers
from hybridmem.chat.server.access_log import REQUEST_ID, read_request_id, write_line
from hybridmem.chat.server.error_forms import respond_with
from hybridmem.chat.server.errors import ApiError, as_api_error, clip, stopping, too_many
from hybridmem.chat.server.incoming import ClientGoneError, Incoming, Turnstile, declared_bytes
from hybridmem.chat.server.keys import Use
from hybridmem.chat.server.options import ServerOptions

RERANK_PATHS = ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking", "/v2/rerank")
"""The paths at which clients of Jina, llama.cpp, vLLM and Cohere ask for the order of documents."""
PATHS_WITH_BODIES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/score",
    *RERANK_PATHS,
    "/apply-template",
    "/completion",
    "/infill",
    "/embedding",
    "/embeddings",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/tokenize",
    "/detokenize",
)
PATHS_WITHOUT_STEPS = ("/v1/messages/count_tokens", "/apply-template", "/api/show", "/tokenize", "/detokenize")
"""Paths of these whose requests the engine does not compute: a fleet counts them against no limit."""
_PATHS = ("/", "/health", "/metrics", "/models", "/v1/memory", "/v1/memory/events", "/v1/models", *PATHS_WITH_BODIES)
_FAMILIES = ("/v1/models", "/v1/responses", "/v1/conversations", "/v1/sessions", "/slots")
"""Longer paths with ids begin with these. Their requests are counted under the path here."""
_FAMILIES_WITH_BODIES = tuple(f"{family}/" for family in _FAMILIES[1:])
_AT_ONCE = ("/health", "/metrics")
"""The answers at these paths wait for nothing. They get no task of their own, which would wait for its turn among all
replies.
"""
_DRAIN_SECONDS = 2.0
CLIENT_GONE = 499
"""The metrics count this status for a client that disconnected before its response. It is never sent."""


def takes_body(path: str) -> bool:
    """Return True if the guard reads the body of a POST to this path; at others it skips the body."""
    return path in PATHS_WITH_BODIES or f"{path}/".startswith(_FAMILIES_WITH_BODIES)


class Counting(Protocol):
    """Declares what the guard counts, which is requests by path and status."""

    @property
    def requests(self) -> Counter: ...


class Guarded(Protocol):
    """Declares the methods of the service that the guard calls."""

    options: ServerOptions
    is_open: bool

    @property
    def metrics(self) -> Counting: ...


@dataclass
class Places:
    """Counts the requests that are being answered, and limits their number."""

    limit: int
    n_taken: int = 0

    def check(self) -> None:
        """Raise ApiError 429 if there is no place left."""
        if self.n_taken >= self.limit:
            raise too_many("requests", n=self.n_taken)


@dataclass
class Exchange:
    """Holds a request on its way through the server.

    Attributes:
        places: the limited places for requests that are being answered. The request takes one of them.
        started: when it came in, in seconds of `time.perf_counter`.
        at_end: functions that are called when the request is over, however it ends.
        status: the status of the response. 0 until the response begins.
        is_complete: whether the whole response was handed to the server.
        has_place: whether it has a place among the requests that are being answered.
        is_counted: whether it is over. If so, its place is free again, and the metrics include it.
        request_id: the client's id, or a new one. The response has it too.
        use: the use of the client's key. None: the request needs no key.
        notes: additional fields of the access log.
        replies: what the request generates, once that has begun.
        more_usage: additional fields of `usage` in "hybrid_memory", such as how a fleet has routed the request.
    """

    path: str
    places: Places
    started: float = field(default_factory=time.perf_counter)
    at_end: list[Callable[[], None]] = field(default_factory=list)
    status: int = 0
    is_complete: bool = False
    has_place: bool = False
    is_counted: bool = False
    request_id: str = ""
    use: Use | None = None
    replies: object = None
    notes: dict[str, object] = field(default_factory=dict)
    more_usage: dict[str, object] = field(default_factory=dict)

    def note_left_out(self, left_out: Sequence[str]) -> None:
        """Add to the reply which parts of the request were accepted but not carried out."""
        if left_out:
            self.more_usage["left_out"] = list(left_out)

    def charge(self, usage: Mapping[str, Any]) -> None:
        """Charge the tokens of the finished request to its key, and add them to the access log."""
        if self.use is not None:
            self.use.charge(usage["total_tokens"])
        self.notes["prompt_tokens"] = usage["prompt_tokens"]
        if "completion_tokens" in usage:
            self.notes["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
            self.notes["completion_tokens"] = usage["completion_tokens"]

    def take_place(self) -> None:
        """Take a place among the requests that are being answered, until the end. Raises ApiError 429."""
        self.places.check()
        if self.use is not None:
            self.use.check()
            self.use.n_requests += 1
        self.has_place = True
        self.places.n_taken += 1


def exchange_of(scope: Mapping[str, object]) -> Exchange:
    exchange = scope["hybrid_memory.exchange"]
    assert isinstance(exchange, Exchange)
    return exchange


class Guard:
    """Runs the app for each request as a task. It is an ASGI middleware.

    If the client disconnects, the task is cancelled, and the functions in `at_end` are called. A request takes a place
    only once it is clear that it can be answered. So clients that send slowly, too much or invalid data cannot keep
    other clients out.
    """

    def __init__(self, app: ASGIApp, service: Guarded) -> None:
        self._app = app
        self._service = service
        self._places = Places(service.options.max_requests)
        self._access = Access(service.options)
        self._turnstile = Turnstile(self._places)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        more = {
            name: scope.get(f"hybrid_memory.{key}", {}) for name, key in (("more_usage", "usage"), ("notes", "notes"))
        }
        exchange = Exchange(scope["path"], self._places, **more)
        headers = dict(scope["headers"])
        exchange.request_id = read_request_id(headers)
        incoming = Incoming(receive, self._turnstile)
        try:
            await self._answer(exchange, headers, scope, incoming, self._watch(exchange, headers, incoming, send))
        except (ClientGoneError, asyncio.CancelledError) as error:
            if exchange.status != CLIENT_GONE and not isinstance(error, ClientGoneError):
                raise
            exchange.status = CLIENT_GONE
        finally:
            for end in exchange.at_end:
                end()
            # These functions refer to the exchange. Clearing the list breaks the reference cycle, which would have to
            # be collected as garbage.
            exchange.at_end.clear()
            self._count(exchange)
            self._log(exchange, scope)

    def _log(self, exchange: Exchange, scope: Scope) -> None:
        client = scope.get("client")
        about = {
            "client": client[0] if client else None, "method": scope["method"], "path": exchange.path,
            "status": exchange.status or CLIENT_GONE, "seconds": round(time.perf_counter() - exchange.started, 4),
            "request_id": exchange.request_id, "key": exchange.use and exchange.use.key.name, **exchange.notes,
        }  # fmt: skip
        write_line(self._service.options.access_log, about)

    def _count(self, exchange: Exchange) -> None:
        """Count a finished request, once.

        This happens before the client gets the last bytes, so that the client's next request finds a place.
        """
        if exchange.is_counted:
            return
        exchange.is_counted = True
        self._places.n_taken -= exchange.has_place
        if exchange.use is not None:
            exchange.use.n_requests -= exchange.has_place
        path = exchange.path
        family = next((family for family in _FAMILIES if f"{path}/".startswith(f"{family}/")), "other")
        name = path if path in _PATHS else family
        self._service.metrics.requests.labels(name, str(exchange.status or CLIENT_GONE)).inc()

    async def _answer(self, exchange: Exchange, headers: Headers, scope: Scope, incoming: Incoming, send: Send) -> None:
        try:
            try:
                exchange.use = self._access.check(scope["method"], scope["path"], headers)
                body = await self._take_body(headers, scope, incoming)
            except ApiError as error:
                if error.status != 408:  # With 408, the server has already waited too long for the body.
                    await self._drain(headers, incoming)
                raise
            if self._access.is_preflight(scope["method"], headers):
                await Response(status_code=204, headers=preflight_headers(headers))(scope, incoming.receive, send)
                return
            await self._run({**scope, "hybrid_memory.exchange": exchange}, exchange, body, incoming.receive, send)
        except ClientGoneError:
            raise
        except Exception as error:
            answer = as_api_error(error)
            if exchange.status == 0:
                await respond_with(answer, exchange.path)(scope, incoming.receive, send)

    # The methods below read bodies.

    async def _take_body(self, headers: Headers, scope: Scope, incoming: Incoming) -> bytes:
        """Read the body, or skip it at paths that take none.

        Raises:
            ApiError: 408, 413, 415, 429 or 503. ClientGoneError.
        """
        if scope["method"] != "POST" or not takes_body(scope["path"]):
            await self._drain(headers, incoming)
            return b""
        self._check_body(headers)
        return await self._read_body(incoming)

    def _check_body(self, headers: Headers) -> None:
        """Refuse a body by the headers of its request. Raises ApiError 413, 415, 429 or 503."""
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind != b"application/json":  # HTML forms on other sites' pages cannot send this type.
            message = f"The body must come as 'Content-Type: application/json', not {clip(kind.decode('latin-1'))!r}."
            raise ApiError(415, message, code="unsupported_media_type")
        if not self._service.is_open:
            raise stopping()
        if declared_bytes(headers) > self._service.options.max_body_bytes:
            raise self._too_large()
        self._places.check()

    async def _read_body(self, incoming: Incoming) -> bytes:
        """Read a body. Raises ApiError 408 if it is too slow, or 413 if it is too large."""
        options = self._service.options
        try:
            body = await incoming.read(options)
        except TimeoutError:
            rate = f"{options.body_bytes_per_second:,} bytes a second"
            message = f"The body took longer than {options.body_seconds:g} s, or came slower than {rate}."
            raise ApiError(408, message, code="request_timeout") from None
        if body is None:
            raise self._too_large()
        return body

    def _too_large(self) -> ApiError:
        most = self._service.options.max_body_bytes
        message = f"The body has more than {most:,} bytes, which this server's --max-body allows."
        return ApiError(413, message, code="request_too_large")

    async def _drain(self, headers: Headers, incoming: Incoming) -> None:
        """Read a little of a refused body. A client that is still sending would otherwise not see the response."""
        if b"transfer-encoding" not in headers and declared_bytes(headers) == 0:
            # This is set without awaiting anything, so that short requests are answered at once.
            incoming.has_ended = True
            return
        most = 16 * self._service.options.max_body_bytes
        if declared_bytes(headers) > most or b"100-continue" in headers.get(b"expect", b"").lower():
            return
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(incoming.skip(most), _DRAIN_SECONDS)

    async def _run(self, scope: Scope, exchange: Exchange, body: bytes, receive: Receive, send: Send) -> None:
        """Run the app until it is done or the client has disconnected."""
        given = False

        async def replay() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.Event().wait()  # This wait never ends. A disconnect is noticed below.
            raise AssertionError("this event is never set")

        if exchange.path in _AT_ONCE:
            await self._app(scope, replay, send)
            return
        task = asyncio.ensure_future(_as_coroutine(self._app(scope, replay, send)))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and exchange.is_complete:  # Servers report a disconnect after a complete response, too.
                await asyncio.wait({task})
        finally:
            was_done = task.done()
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
        if not was_done or task.cancelled():  # If the task was cancelled here, the timer of a send has cancelled it.
            raise ClientGoneError
        task.result()

    def _watch(self, exchange: Exchange, headers: Headers, incoming: Incoming, send: Send) -> Send:
        """Return a `send` that records what is sent.

        A client that takes nothing for too long counts as disconnected.
        """
        loop, seconds = asyncio.get_running_loop(), self._service.options.stall_seconds
        extra = [*self._access.headers_for(headers), (REQUEST_ID, exchange.request_id.encode())]

        async def watched(message: Message) -> None:
            task = asyncio.current_task()
            assert task is not None
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                # The unread part of a body must not be read as the next request.
                close = [] if incoming.has_ended else [(b"connection", b"close")]
                message = {**message, "headers": [*message.get("headers", []), *extra, *close]}
            elif is_last:
                self._count(exchange)

            def stall() -> None:
                exchange.status = CLIENT_GONE
                task.cancel()

            timer = loop.call_later(seconds, stall)
            try:
                await send(message)
            finally:
                timer.cancel()
            exchange.is_complete = is_last

        return watched


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _as_coroutine(awaitable: Awaitable[None]) -> None:
    await awaitable
