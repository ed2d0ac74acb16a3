"""Implements a gateway: an ASGI app that forwards each client's request to the replica that the router chooses.

The gateway checks hosts, keys and bodies as a single server does (`chat.server.guard`), tokenises the prompt, and sends
the request through a handle, whose router sees the tokens. The response of the replica's server is passed on unchanged.
If a replica is lost, another one answers, and a stream continues after the last text that the client has
(`cluster.serving.continuing`).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol
from uuid import uuid4

from prometheus_client import CollectorRegistry, Counter
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hybridmem.chat.server.error_forms import error_event
from hybridmem.chat.server.errors import RETRY, ApiError, log
from hybridmem.chat.server.guard import PATHS_WITH_BODIES, PATHS_WITHOUT_STEPS, Guard, exchange_of
from hybridmem.chat.server.keys import Use
from hybridmem.chat.server.options import ServerOptions
from hybridmem.cluster.routing.prompts import TokenPrompt
from hybridmem.cluster.serving.continuing import END, RESPONSES, ResponseSoFar
from hybridmem.cluster.serving.idempotency import KEY_HEADER, Idempotency, Shelf, name_of
from hybridmem.cluster.serving.metrics import join_metrics
from hybridmem.cluster.serving.parts import AnotherReplyError
from hybridmem.cluster.serving.reading import PromptReader
from hybridmem.cluster.serving.request import CHARGE, ForwardedRequest
from hybridmem.cluster.serving.stored import check_stored

MOST_TRIES = 4
"""A request is sent to at most this many replicas, if each dies in the middle of it."""
_COUNTED = frozenset((*PATHS_WITH_BODIES, RESPONSES)) - frozenset(PATHS_WITHOUT_STEPS)
"""Requests at these paths count against the limits of the gateway and of their key."""


class ReplicaLostError(Exception):
    """Says that a replica ended while it was answering."""


class Replicas(Protocol):
    """Declares the methods of the replicas that a gateway calls."""

    def answer(self, prompt: TokenPrompt, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
        """Yield a response's messages, from the replica that the router chooses. Raises ReplicaLostError."""
        ...

    async def metrics(self) -> dict[str, str]:
        """Return the text of /metrics of each replica."""
        ...


class GatewayMetrics:
    """Counts the events of the gateway itself."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name, what = "hybrid_memory_gateway_requests", "Requests answered; 499: the client went away."
        self.requests = Counter(name, what, ["path", "code"], registry=self.registry)
        name, what = "hybrid_memory_gateway_retries", "Requests sent to another replica, since the first one was lost."
        self.retries = Counter(name, what, registry=self.registry)
        name, what = "hybrid_memory_gateway_continued", "Streams that another replica went on with."
        self.continued = Counter(name, what, registry=self.registry)


class Gateway:
    """Answers clients from the replicas of one model.

    Args:
        shelf: keeps replies for clients that send a request again.
        keeps_sessions: whether all replicas share one folder of stored sessions.
    Attributes:
        is_open: whether it takes requests.
    """

    def __init__(
        self, replicas: Replicas, reader: PromptReader, options: ServerOptions, shelf: Shelf | None = None,
        *, keeps_sessions: bool = True,
    ) -> None:  # fmt: skip
        self.options = options
        self.metrics = GatewayMetrics()
        self.is_open = True
        self._replicas = replicas
        self._reader = reader
        self._keeps_sessions = keeps_sessions
        self._once = Idempotency(shelf)
        self._guard = Guard(self._forward, service=self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send, self._reader.close)
        else:
            await self._guard(scope, receive, send)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whose body the guard has read."""
        message = await receive()
        request = ForwardedRequest.of(scope, message.get("body", b""))
        if request.path == "/metrics":
            await Response(await self._all_metrics(), media_type="text/plain; version=0.0.4")(scope, receive, send)
            return
        exchange = exchange_of(scope)
        if not self._keeps_sessions:
            check_stored(request)
        if request.method == "POST" and request.path in _COUNTED:
            exchange.take_place()
        relay = _Relay(send, request.path)
        key = request.header(KEY_HEADER) if request.method == "POST" else None
        if request.path == RESPONSES:
            request = replace(request, reply_seed=_seed_of(request, key))
        answer = partial(self._answer, request, exchange.use)
        try:
            async for messages in answer() if key is None else self._once.play(request, key, answer):
                await relay.pass_on(messages)
        except ReplicaLostError:
            await relay.break_off()

    async def _answer(self, request: ForwardedRequest, use: Use | None) -> AsyncIterator[list[Message]]:
        """Yield a response, by other replicas if the first is lost. Raises ReplicaLostError.

        Args:
            use: the usage counter of the client's key, which is charged for the computed tokens.
        """
        read = await self._reader.read(request)
        request = read.request_of(request, self.options.max_body_bytes)
        response = ResponseSoFar(request.path)
        for n_tried in range(1, MOST_TRIES + 1):
            try:
                async for messages in self._replicas.answer(read.prompt, request):
                    news = response.news_in(_charged(messages, use))
                    if news:
                        yield news
                return
            except AnotherReplyError as error:
                log.warning("a stream could not go on: %s", error)
                raise ReplicaLostError(str(error)) from error
            except ReplicaLostError:
                if response.is_complete:
                    yield [END]
                    return
                if not response.can_go_on or n_tried == MOST_TRIES:
                    raise
                log.warning("a replica was lost while it answered (try %d of %d)", n_tried, MOST_TRIES)
                (self.metrics.continued if response.has_begun else self.metrics.retries).inc()
                response.begin_again()

    async def _all_metrics(self) -> str:
        return join_metrics(self.metrics.registry, await self._replicas.metrics())


def _charged(messages: list[Message], use: Use | None) -> list[Message]:
    """Return the messages of a response, without those that say how many tokens to charge.

    Charge these tokens to the key.
    """
    for message in messages:
        if message["type"] == CHARGE and use is not None:
            use.charge(message["n_tokens"])
    return [message for message in messages if message["type"] != CHARGE]


def _seed_of(request: ForwardedRequest, key: str | None) -> str:
    """Return the seed of a response's ids. It is the same for a request that a client sends again with the same key."""
    if key is None:
        return uuid4().hex
    return hashlib.sha256(name_of(request, key).encode() + request.body).hexdigest()[:32]


def lost() -> ApiError:
    """Return the error of a request whose replica ended."""
    message = "The replica that answered this request was lost; send it again."
    return ApiError(503, message, code="replica_lost", headers=RETRY)


class _Relay:
    """Passes a response on to the client."""

    def __init__(self, send: Send, path: str) -> None:
        self._send = send
        self._path = path
        self._is_stream = False

    async def pass_on(self, messages: list[Message]) -> None:
        for message in messages:
            if message["type"] == "http.response.start":
                kinds = [value for name, value in message.get("headers", []) if name.lower() == b"content-type"]
                self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
            await self._send(message)

    async def break_off(self) -> None:
        """End a response that cannot be completed. A stream gets an event that says so.

        Any other response raises ApiError.
        """
        if not self._is_stream:
            raise lost()
        await self._send(
            {"type": "http.response.body", "body": error_event(lost(), self._path).encode(), "more_body": False}
        )


async def _live(receive: Receive, send: Send, close: Callable[[], Any]) -> None:
    """Answer the ASGI events for the server's start and end."""
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    close()
    await send({"type": "lifespan.shutdown.complete"})
