"""Answers /v1/sessions. It lists sessions, and shows and changes their trees."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem.chat.server.sessions.costs import Cost, find_costs
from hybridmem.chat.server.sessions.lists import as_page, read_limit
from hybridmem.chat.server.sessions.schema import SessionRequest
from hybridmem.chat.server.sessions.session_repository import SessionRepository
from hybridmem.chat.stored.items import text_of
from hybridmem.chat.stored.nodes import Node, StoredSession, new_id
from hybridmem.chat.stored.store import Counted


class Trees:
    """Shows sessions and their trees to their owners."""

    def __init__(self, repository: SessionRepository) -> None:
        self._repository = repository

    async def list(self, request: Request) -> Response:
        repository, limit, query = self._repository, read_limit(request), request.query_params
        owner, after = repository.owner_of(request), query.get("after")
        if after is not None:
            await repository.session(owner, after)
        found = await repository.ask(
            repository.store.sessions, owner, query.get("search", ""), limit=limit + 1, after=after
        )
        return JSONResponse(as_page([_as_json(counted) for counted in found[:limit]], has_more=len(found) > limit))

    async def create(self, request: Request) -> Response:
        asked, owner = await self._repository.read(request, SessionRequest)
        session = StoredSession(new_id("sess"), owner, asked.title or "", asked.instructions, asked.metadata or {})
        await self._repository.ask(self._repository.store.add_session, session, [])
        return await self._show(session.id)

    async def show(self, request: Request, session_id: str) -> Response:
        session = await self._repository.session(self._repository.owner_of(request), session_id)
        return await self._show(session.id)

    async def change(self, request: Request, session_id: str) -> Response:
        asked, owner = await self._repository.read(request, SessionRequest)
        session = await self._repository.session(owner, session_id)
        given = {name: getattr(asked, name) for name in ("title", "instructions", "metadata")}
        values = {name: value for name, value in given.items() if value is not None}
        if values:
            await self._repository.ask(self._repository.store.change_session, session.id, **values)
        return await self._show(session.id)

    async def delete(self, request: Request, session_id: str) -> Response:
        session = await self._repository.session(self._repository.owner_of(request), session_id)
        await self._repository.delete_session(session)
        return JSONResponse({"id": session.id, "object": "session.deleted", "deleted": True})

    async def _show(self, session_id: str) -> Response:
        return JSONResponse(_as_json(await self._repository.ask(self._repository.store.count, session_id)))

    async def tree(self, request: Request, session_id: str) -> Response:
        repository = self._repository
        session = await repository.session(repository.owner_of(request), session_id)
        nodes = await repository.ask(repository.store.tree, session.id)
        costs = await asyncio.to_thread(find_costs, repository.service.engine, session.owner, nodes)
        about = {"object": "session.tree", "id": session.id, "title": session.title, "head": session.head}
        return JSONResponse(about | {"nodes": nodes_as_json(nodes, costs)})


def _as_json(counted: Counted) -> dict[str, Any]:
    session = counted.session
    return {
        "id": session.id, "object": "session", "title": session.title, "instructions": session.instructions,
        "metadata": session.metadata, "head": session.head, "created_at": int(session.created_at),
        "updated_at": int(session.used_at), "n_nodes": counted.n_nodes, "bytes": counted.n_bytes,
        "pinned": counted.n_pinned > 0,
    }  # fmt: skip


def nodes_as_json(nodes: list[Node], costs: dict[str, Cost]) -> list[dict[str, Any]]:
    """Return nodes as JSON values, without their token ids, with the cost of continuing from each."""
    positions, written = dict[str | None, int]({None: 0}), []
    for node in nodes:
        positions[node.id] = positions[node.parent] + node.n_tokens
        if node.id not in costs:
            above = costs.get(node.parent or "", Cost("nothing", positions[node.parent]))
            costs[node.id] = Cost(above.source, above.compute_tokens + node.n_tokens)
        cost = costs[node.id]
        written.append({
            "id": node.id, "parent": node.parent, "role": node.role, "text": text_of(node.items), "items": node.items,
            "status": node.status, "created_at": int(node.created_at), "n_tokens": node.n_tokens,
            "position": positions[node.id], "cost": cost.to_json(),
            "bytes": {"own": cost.own_bytes, "shared": cost.shared_bytes},
            "pinned": node.pinned_until is not None, "expires_at": _seconds(node.pinned_until),
        })  # fmt: skip
    return written


def _seconds(until: float | None) -> int | None:
    return None if until is None or math.isinf(until) else int(until)
