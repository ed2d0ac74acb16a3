"""Answers requests in one process of the fleet, by the server's own app with one engine and its memory."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from starlette.responses import JSONResponse
from starlette.types import Message, Scope

from hybridmem.chat.commands.serve import make_served
from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.server import make_app
from hybridmem.chat.server.owners import credential_of
from hybridmem.cluster.routing.prompts import TokenPrompt
from hybridmem.cluster.routing.route import as_header
from hybridmem.cluster.serving.asgi import lifespan_of, messages_of, response_messages, with_headers
from hybridmem.cluster.serving.fleet_options import FleetOptions
from hybridmem.cluster.serving.keeper import Keeper
from hybridmem.cluster.serving.metrics import StoreCollector
from hybridmem.cluster.serving.mover import Mover
from hybridmem.cluster.serving.request import CHARGE, ForwardedRequest
from hybridmem.cluster.serving.scaling import REPORTED
from hybridmem.cluster.store.health import StoreHealth
from hybridmem.cluster.store.leases import Leases
from hybridmem.cluster.store.place import Place
from hybridmem.cluster.store.sequences import SequenceStore, Subplace
from hybridmem.memory import SpecError
from hybridmem.memory.prefix import Resumable

if TYPE_CHECKING:
    from hybridmem.cluster.events.publisher import EventPublisher

log = logging.getLogger("hybrid_memory.cluster")
ROUTE_HEADER = "x-hybrid-memory-route"
MOST_REPORTED = 4096
"""A report has at most this many prefixes. Those used last come first."""


class ReplicaServer:
    """Runs the server's app for requests that a gateway forwards.

    Args:
        name: the name of this replica in the fleet.
    """

    def __init__(self, options: FleetOptions, name: str) -> None:
        served = make_served(options.of_replica.chosen, log.info, keeps_prefixes=False)
        self.name = name
        self.events: EventPublisher | None = None
        self._options = options
        self.engine: Engine = served.engine
        sessions = replace(served.options, sessions=options.sessions)
        self.app = make_app(served.engine, served.tokenizer, served.name, sessions)
        self.keeper = make_keeper(served.engine, options, name)
        self._n_requests = self._n_tokens = 0
        self._has_keys = bool(served.options.all_keys)
        # These counts of tokens, by key, have not been reported to any gateway yet.
        self._owed: Counter[str | None] = Counter()
        self._running = AsyncExitStack()
        if self.keeper is not None:
            self.app.state.service.metrics.registry.register(StoreCollector(self.keeper.health))

    async def start(self) -> None:
        """Begin to step the engine."""
        await self._running.enter_async_context(lifespan_of(self.app))
        if self.keeper is not None:
            self.keeper.start()
            self._running.push_async_callback(self.keeper.stop)
        if self._options["kv_events"] is not None:
            self._publish(self._options)

    async def stop(self) -> None:
        """Stop the engine, and save what is to be kept."""
        await self._running.aclose()

    async def answer(
        self, request: ForwardedRequest, prompt: TokenPrompt, why: dict[str, Any], alive: Collection[str] | None
    ) -> AsyncIterator[list[Message]]:
        """Yield the messages of a response.

        The last message says how many tokens to charge. Closing the iterator ends the request.

        If a client goes away early, its tokens are charged with the next request of its key.

        Args:
            why: the router's reason for its choice.
            alive: all replicas of this fleet that the router knows.
        """
        self._n_requests += 1
        self._n_tokens += prompt.n_tokens
        visit, notes = None, dict[str, Any]()
        key = credential_of(request.header) if self._has_keys else None
        try:
            if request.path == "/health":
                yield await self._health()
                return
            if self.keeper is not None:
                visit = await self.keeper.before(prompt, alive)
                why = why | {"fetched_tokens": visit.fetched_tokens}
                why |= {} if visit.held_by is None else {"held_by": visit.held_by.rpartition("/")[2]}
            scope: Scope = {**request.scope(), "hybrid_memory.usage": {"route": why}, "hybrid_memory.notes": notes}
            async for messages in messages_of(self.app, scope, request.body):
                yield [with_headers(message, {ROUTE_HEADER: as_header(why)}) for message in messages]
        finally:
            self._n_requests -= 1
            self._n_tokens -= prompt.n_tokens
            self._owed[key] += notes.get("prompt_tokens", 0) + notes.get("completion_tokens", 0)
            if self.keeper is not None and visit is not None:
                self.keeper.after(visit)
        if n_tokens := self._owed.pop(key, 0):
            yield [{"type": CHARGE, "n_tokens": n_tokens}]

    def _publish(self, options: FleetOptions) -> None:
        """Begin to publish KV events."""
        # This import needs packages of the extra.
        from hybridmem.cluster.events.publisher import EventOptions, EventPublisher

        if self.engine.prefixes is None:
            raise SpecError("--kv-events say what prefixes can be resumed; leave out --no-prefix-cache")
        medium = "GPU" if self.engine.memory.spec.device.type == "cuda" else "CPU"
        topic = f"kv@{self.name}@{self.app.state.service.model_id}"
        about = EventOptions(options["host"], options["kv_events"], topic, options["event_tokens"], medium)
        self.events = EventPublisher(about, self._resumable)
        self._running.callback(self.events.close)

    def _resumable(self) -> list[Resumable]:
        with self.engine.lock:
            return [] if self.engine.prefixes is None else self.engine.prefixes.resumable()

    async def _health(self) -> list[Message]:
        """Return the response of /health. If the store is down, the replica goes on serving, and says so here."""
        is_open = self.app.state.service.is_open
        about: dict[str, Any] = {"status": "ok" if is_open else "stopping", "replica": self.name}
        if self.keeper is not None:
            error = self.keeper.health.error
            about["store"] = "ok" if error is None else f"down: {error}"
        if self.events is not None:
            about["kv_events"] = self.events.address
        return response_messages(JSONResponse(about, 200 if is_open else 503))

    async def metrics(self) -> str:
        """Return the text of the server's own /metrics."""
        text: bytes = await asyncio.to_thread(self.app.state.service.metrics.render)
        return text.decode()

    def check_health(self) -> None:
        """Raise RuntimeError if the server has closed itself, for example because the memory's bookkeeping is wrong."""
        if not self.app.state.service.is_open:
            raise RuntimeError("the server answers no more; see its log")

    def scaling_stats(self) -> dict[str, float]:
        """Return the tokens of prompts in flight, and the bytes of the budget that are free or can be made free."""
        memory, prefixes = self.engine.memory, self.engine.prefixes
        with self.engine.lock:
            free_bytes = memory.free_bytes + (0 if prefixes is None else prefixes.stats().private_bytes)
        numbers = (self._n_tokens, min(free_bytes, memory.budget_bytes), memory.budget_bytes)
        return dict(zip(REPORTED, map(float, numbers), strict=True))

    async def stats(self) -> dict[str, Any]:
        """Return the report for routers and the autoscaler, as plain values."""
        return await asyncio.to_thread(self._stats)

    def _stats(self) -> dict[str, Any]:
        engine = self.engine
        prefixes = self._resumable()
        with engine.lock:
            load, free_bytes = engine.load, engine.memory.free_bytes
        return {
            "requests": self._n_requests, "generations": load.total,
            "free_share": free_bytes / engine.memory.budget_bytes,
            "prefixes": [(prefix.n_tokens, prefix.digest) for prefix in prefixes[-MOST_REPORTED:]],
        }  # fmt: skip


def make_keeper(engine: Engine, options: FleetOptions, name: str) -> Keeper | None:
    """Make the keeper of sessions for the store in the options. Return None if there is no store. Raises SpecError."""
    if options["store"] is None:
        return None
    if engine.prefixes is None:
        raise SpecError("--store keeps prefixes, which --no-prefix-cache does without; leave out one side")
    place, signature = Place(options["store"]), engine.memory.archive.signature
    health = StoreHealth(time.monotonic)
    store = SequenceStore(place, signature, options.quota, time.time)
    mover = Mover(engine, engine.prefixes, store, health, least_tokens=options["store_tokens"])
    holder = f"{options['fleet']}/{name}"
    return Keeper(mover, Leases(Subplace(place, signature), holder, options["lease"], time.time), health)
