"""Answers requests in one process of the fleet: one engine with its memory, behind the server's own app."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from starlette.types import Message, Scope

from chat.commands.serve import make_served
from chat.engine.engine import Engine
from chat.server import make_app
from cluster.routing.prompts import TokenPrompt
from cluster.routing.route import as_header
from cluster.serving.asgi import lifespan_of, messages_of, with_headers
from cluster.serving.fleet_options import FleetOptions
from cluster.serving.request import ForwardedRequest

log = logging.getLogger("hybrid_memory.cluster")
ROUTE_HEADER = "x-hybrid-memory-route"
MOST_REPORTED = 4096
"""Prefixes in one report: those that were used last come first."""


class ReplicaServer:
    """Runs the server's app for requests that a gateway forwards.

    Args:
        name: of this replica in the fleet.
    """

    def __init__(self, options: FleetOptions, name: str) -> None:
        served = make_served(options.chosen, log.info, keeps_prefixes=False)
        self.name = name
        self.engine: Engine = served.engine
        self.app = make_app(served.engine, served.tokenizer, served.name, served.options)
        self._n_requests = 0
        self._running = AsyncExitStack()

    async def start(self) -> None:
        """Begin to step the engine."""
        await self._running.enter_async_context(lifespan_of(self.app))

    async def stop(self) -> None:
        """End what runs, and save what is to be kept."""
        await self._running.aclose()

    async def answer(
        self, request: ForwardedRequest, prompt: TokenPrompt, why: dict[str, Any]
    ) -> AsyncIterator[list[Message]]:
        """Yield the messages of a response. Closing the iterator ends the request.

        Args:
            why: what the router says of its choice.
        """
        scope: Scope = {**request.scope(), "hybrid_memory.usage": {"route": why}}
        self._n_requests += 1
        try:
            async for messages in messages_of(self.app, scope, request.body):
                yield [with_headers(message, {ROUTE_HEADER: as_header(why)}) for message in messages]
        finally:
            self._n_requests -= 1

    async def metrics(self) -> str:
        """Return the text of the server's own /metrics."""
        text: bytes = await asyncio.to_thread(self.app.state.service.metrics.render)
        return text.decode()

    def check_health(self) -> None:
        """Raise RuntimeError if the server has closed itself, as when the memory's books do not balance."""
        if not self.app.state.service.is_open:
            raise RuntimeError("the server answers no more; see its log")

    async def stats(self) -> dict[str, Any]:
        """Return what routers and the autoscaler want to know, as plain values."""
        return await asyncio.to_thread(self._stats)

    def _stats(self) -> dict[str, Any]:
        engine = self.engine
        with engine.lock:
            load = engine.load
            prefixes = [] if engine.prefixes is None else engine.prefixes.resumable()
            free_bytes = engine.memory.free_bytes
        return {
            "requests": self._n_requests, "generations": load.total,
            "free_share": free_bytes / engine.memory.budget_bytes,
            "prefixes": [(prefix.n_tokens, prefix.digest) for prefix in prefixes[-MOST_REPORTED:]],
        }  # fmt: skip
