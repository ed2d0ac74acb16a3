"""Keeps the checkpoints of pinned nodes in the budget, until their time is over."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem.chat.server.errors import ApiError, as_api_error, too_many
from hybridmem.chat.server.guard import exchange_of
from hybridmem.chat.server.replies import PromptRequest
from hybridmem.chat.server.sessions.costs import missing_tokens
from hybridmem.chat.server.sessions.schema import PinRequest
from hybridmem.chat.server.sessions.session_repository import SessionRepository
from hybridmem.chat.stored.nodes import Node, prefix_owner
from hybridmem.memory import BatchError
from hybridmem.memory.blocks import Int64s
from hybridmem.memory.prefix import PrefixCache

_SHARE = 2
"""Pinned checkpoints take at most the budget divided by this. The rest is for replies."""
FOREVER = math.inf


@dataclass(frozen=True)
class Pin:
    """Holds the token ids of a pinned node, the owner of its prefix, and when the pin expires, in unix seconds."""

    owner: bytes
    tokens: Int64s
    until: float


class Pins:
    """Pins nodes, and unpins them at the end of their time to live."""

    def __init__(self, repository: SessionRepository) -> None:
        self._repository = repository
        self._pins: dict[str, Pin] = {}
        self._turn = asyncio.Lock()  # The pins here and those in the store must change together.

    async def pin(self, request: Request, session_id: str, node_id: str) -> Response:
        """Compute the missing part of a node's tokens, and keep it."""
        asked, owner = await self._repository.read(request, PinRequest)
        session = await self._repository.session(owner, session_id)
        node = await self._repository.node(owner, node_id, session)
        tokens = await self._repository.tokens_at(node)
        if tokens is None:
            message = "No token ids are known of this node: nothing has been computed that could be kept."
            raise ApiError(400, message, param="node", code="invalid_value")
        seconds = asked.seconds_to_live
        pin = Pin(prefix_owner(owner), tokens, self._repository.store.now() + (FOREVER if seconds is None else seconds))
        await self._compute(request, pin)
        async with self._turn:
            n_bytes = await asyncio.to_thread(self._keep, node.id, pin)
            await self._repository.ask(self._repository.store.pin, node.id, pin.until)
        expires_at = None if pin.until == FOREVER else int(pin.until)
        about = {"id": node.id, "object": "session.node", "pinned": True, "expires_at": expires_at, "bytes": n_bytes}
        return JSONResponse(about)

    async def unpin(self, request: Request, session_id: str, node_id: str) -> Response:
        owner = self._repository.owner_of(request)
        node = await self._repository.node(owner, node_id, await self._repository.session(owner, session_id))
        await self._repository.ask(self._repository.store.pin, node.id, None)
        await self.forget([node.id])
        return JSONResponse({"id": node.id, "object": "session.node", "pinned": False, "expires_at": None})

    async def _compute(self, request: Request, pin: Pin) -> None:
        """Feed the tokens that no checkpoint holds. Raises ApiError."""
        engine = self._repository.service.engine
        if engine.prefixes is None:
            message = "This server keeps no prefixes (--no-prefix-cache), so nothing can be pinned."
            raise ApiError(400, message, code="unsupported_value")
        if await asyncio.to_thread(missing_tokens, engine, pin.owner, pin.tokens) <= 1:
            return
        prompt = PromptRequest(pin.tokens.tolist(), max_tokens=0, owner=pin.owner)
        replies = self._repository.service.begin(exchange_of(request.scope), [prompt])
        try:
            while await replies.next() is not None:
                pass
        except Exception as error:
            raise as_api_error(error) from None

    def _keep(self, node_id: str, pin: Pin) -> int:
        """Pin the checkpoint of a node. Return the bytes that only this checkpoint holds.

        Raises ApiError if too much is pinned.
        """
        engine = self._repository.service.engine
        prefixes = engine.prefixes
        assert prefixes is not None, "it was asked for"
        with engine.lock:
            others = sum(_bytes_of(prefixes, other) for name, other in self._pins.items() if name != node_id)
            n_bytes, most_bytes = _bytes_of(prefixes, pin), engine.memory.budget_bytes // _SHARE
            if others + n_bytes > most_bytes:
                raise too_many(
                    "pins", n_bytes=others, n_more=n_bytes, n_most=most_bytes, seconds=None, code="too_much_pinned"
                )
            # The checkpoint was closed meanwhile. The node is computed again when somebody continues it.
            with suppress(BatchError):
                prefixes.pin(pin.tokens, pin.owner)
            self._pins[node_id] = pin
            return n_bytes

    async def forget(self, node_ids: list[str]) -> None:
        """Unpin the checkpoints of these nodes, so that they may be closed for room again."""
        if any(node_id in self._pins for node_id in node_ids):
            await asyncio.to_thread(self._forget, node_ids)

    def _forget(self, node_ids: list[str]) -> None:
        engine = self._repository.service.engine
        prefixes = engine.prefixes
        if prefixes is None:
            return
        with engine.lock:
            for pin in [self._pins.pop(node_id) for node_id in node_ids if node_id in self._pins]:
                with suppress(BatchError):
                    prefixes.unpin(pin.tokens, pin.owner)
            for pin in self._pins.values():  # Other pins may share the checkpoint that was unpinned.
                with suppress(BatchError):
                    prefixes.pin(pin.tokens, pin.owner)

    async def restore(self) -> None:
        """Pin the nodes that were pinned when the server stopped, if their checkpoints were kept."""
        for owner, node in await self._repository.ask(self._repository.store.pinned):
            tokens = await self._repository.tokens_at(node)
            if (
                tokens is not None
                and node.pinned_until is not None
                and self._repository.service.engine.prefixes is not None
            ):
                with suppress(ApiError):
                    await asyncio.to_thread(self._keep, node.id, Pin(prefix_owner(owner), tokens, node.pinned_until))

    async def expire(self) -> None:
        """Unpin nodes whose pins have expired, and nodes that were deleted."""
        async with self._turn:
            pinned: list[tuple[bytes, Node]] = await self._repository.ask(self._repository.store.pinned)
            now, known = self._repository.store.now(), {node.id for _, node in pinned}
            late = [node.id for _, node in pinned if node.pinned_until is not None and node.pinned_until <= now]
            for node_id in late:
                await self._repository.ask(self._repository.store.pin, node_id, None)
            await self.forget([*late, *(node_id for node_id in self._pins if node_id not in known)])


def _bytes_of(prefixes: PrefixCache, pin: Pin) -> int:
    """Return the bytes that only the last checkpoint along a pin's tokens holds. The caller holds the engine's lock."""
    marks = prefixes.checkpoints_of(pin.tokens, pin.owner)
    return prefixes.memory.private_bytes(marks[-1]) if marks else 0
