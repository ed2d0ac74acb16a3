"""Answers OpenAI's /v1/conversations. A conversation is the current path of a session, as a list of items."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem.chat.server.errors import ApiError, clip
from hybridmem.chat.server.sessions.lists import as_page, page_of
from hybridmem.chat.server.sessions.prompting import count_texts
from hybridmem.chat.server.sessions.schema import ConversationRequest, ItemsRequest
from hybridmem.chat.server.sessions.session_repository import SessionRepository
from hybridmem.chat.stored.items import make_nodes, make_title
from hybridmem.chat.stored.nodes import Item, Node, StoredSession, new_id


class Conversations:
    """Creates, shows, changes and deletes conversations and their items."""

    def __init__(self, repository: SessionRepository) -> None:
        self._repository = repository

    async def create(self, request: Request) -> Response:
        asked, owner = await self._repository.read(request, ConversationRequest)
        conversation_id = new_id("conv")
        nodes = await self._make_nodes(request, conversation_id, None, asked.items)
        session = StoredSession(
            conversation_id, owner, make_title(asked.items), metadata=asked.metadata or {},
            head=nodes[-1].id if nodes else None,
        )  # fmt: skip
        await self._repository.ask(self._repository.store.add_session, session, nodes)
        return _answer(session)

    async def show(self, request: Request, conversation_id: str) -> Response:
        return _answer(await self._repository.session(self._repository.owner_of(request), conversation_id))

    async def change(self, request: Request, conversation_id: str) -> Response:
        asked, owner = await self._repository.read(request, ConversationRequest)
        session = await self._repository.session(owner, conversation_id)
        if asked.items:
            message = "Items are added at /v1/conversations/{id}/items; leave them out."
            raise ApiError(400, message, param="items", code="invalid_value")
        await self._repository.ask(self._repository.store.change_session, session.id, metadata=asked.metadata or {})
        return _answer(await self._repository.session(owner, conversation_id))

    async def delete(self, request: Request, conversation_id: str) -> Response:
        session = await self._repository.session(self._repository.owner_of(request), conversation_id)
        await self._repository.delete_session(session)
        return JSONResponse({"id": session.id, "object": "conversation.deleted", "deleted": True})

    # The methods below are about items.

    async def list_items(self, request: Request, conversation_id: str) -> Response:
        _, path = await self._path(self._repository.owner_of(request), conversation_id)
        return JSONResponse(page_of(request, [item for node in path for item in node.items]))

    async def add_items(self, request: Request, conversation_id: str) -> Response:
        asked, owner = await self._repository.read(request, ItemsRequest)
        session = await self._repository.session(owner, conversation_id)
        nodes = await self._make_nodes(request, session.id, session.head, asked.items)
        if not await self._repository.ask(self._repository.store.add_nodes, session.id, nodes, nodes[-1].id):
            raise ApiError(409, "This conversation was changed meanwhile; read it and try again.", code="conflict")
        return JSONResponse(as_page(asked.items, has_more=False))

    async def show_item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        return JSONResponse((await self._item(self._repository.owner_of(request), conversation_id, item_id))[2])

    async def delete_item(self, request: Request, conversation_id: str, item_id: str) -> Response:
        """Remove an item from the history. The replies after it continue from text without that item."""
        session, node, item = await self._item(self._repository.owner_of(request), conversation_id, item_id)
        left = [other for other in node.items if other is not item]
        await self._repository.replace_items(session.owner, node, left)
        return _answer(session)

    async def _path(self, owner: bytes, conversation_id: str) -> tuple[StoredSession, list[Node]]:
        session = await self._repository.session(owner, conversation_id)
        return session, await self._repository.ask(self._repository.store.path, session.head) if session.head else []

    async def _item(self, owner: bytes, conversation_id: str, item_id: str) -> tuple[StoredSession, Node, Item]:
        session, path = await self._path(owner, conversation_id)
        for node in path:
            for item in node.items:
                if item["id"] == item_id:
                    return session, node, item
        raise ApiError(404, f"There is no item {clip(item_id)!r} in this conversation.", code="not_found")

    async def _make_nodes(self, request: Request, session_id: str, parent: str | None, items: list[Item]) -> list[Node]:
        """Make nodes of items, with an estimate of their tokens. Raises ApiError 400 for texts that are too long."""
        nodes, n_bytes = make_nodes(session_id, parent, items), len(await request.body())
        return await self._repository.service.texts.run(n_bytes, lambda texts: count_texts(texts, nodes), param="items")


def _answer(session: StoredSession) -> Response:
    about: dict[str, Any] = {"id": session.id, "object": "conversation", "created_at": int(session.created_at)}
    return JSONResponse(about | {"metadata": session.metadata})
