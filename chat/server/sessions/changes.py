"""Answers requests that change the tree of a session: edits, other replies, forks, the current path, and deletions."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.sessions.costs import find_costs
from hybridmem.chat.server.sessions.input import read_content
from hybridmem.chat.server.sessions.objects import output_message
from hybridmem.chat.server.sessions.pins import Pins
from hybridmem.chat.server.sessions.prompting import count_texts
from hybridmem.chat.server.sessions.replying import Place, Replying
from hybridmem.chat.server.sessions.schema import (
    EditRequest,
    ForkRequest,
    HeadRequest,
    RegenerateRequest,
    SampledRequest,
)
from hybridmem.chat.server.sessions.session_repository import SessionRepository
from hybridmem.chat.server.sessions.trees import nodes_as_json
from hybridmem.chat.server.tool_fields import read_tools
from hybridmem.chat.stored.copying import copy_path
from hybridmem.chat.stored.items import text_item
from hybridmem.chat.stored.nodes import Item, Node, StoredSession, new_id

AskedT = TypeVar("AskedT", bound=SampledRequest)
_KEPT = ("instructions", "max_output_tokens", "temperature", "top_p")
"""A new reply copies these fields from the reply to which it is an alternative, unless the request sets them."""


class Changes:
    """Changes the tree of a session. Nothing is overwritten: each change becomes a new branch."""

    def __init__(self, repository: SessionRepository, pins: Pins) -> None:
        self._repository = repository
        self._pins = pins

    async def edit(self, request: Request, session_id: str) -> Response:
        """Add a message with other content as an alternative to an existing one.

        Generate a reply to it if the request asks for one.
        """
        asked, owner = await self._repository.read(request, EditRequest)
        session, node, above = await self._find(owner, session_id, asked.node)
        items = _edited(node, asked.content, asked.item)
        if asked.answer:
            asked = await self._like(asked, node, above)
            return await Replying(self._repository, asked, _place(session, above, items)).answer(request)
        (written,) = await self._repository.service.texts.run(
            len(await request.body()),
            lambda texts: count_texts(texts, [Node(new_id("turn"), session.id, node.parent, node.role, items)]),
            param="content",
        )
        return await self._add(session, written)

    async def regenerate(self, request: Request, session_id: str) -> Response:
        """Generate an alternative to a reply, or the first reply to a message."""
        asked, owner = await self._repository.read(request, RegenerateRequest)
        session, node, above = await self._find(owner, session_id, asked.node)
        path = above if node.role == "assistant" else [*above, node]
        if not path:
            raise ApiError(400, "Nothing stands before this message to reply to.", param="node", code="invalid_value")
        asked = await self._like(asked, node, above)
        return await Replying(self._repository, asked, _place(session, path, [])).answer(request)

    async def fork(self, request: Request, session_id: str) -> Response:
        """Copy the path to a node into a new session.

        If `token` is given, the node must be a reply. The new session then begins another reply with the first tokens
        of that one, as many as `token` says.
        """
        asked, owner = await self._repository.read(request, ForkRequest)
        session, node, above = await self._find(owner, session_id, asked.node)
        if asked.token is not None:
            return await self._cut(request, asked, session, node, above)
        if asked.answer:
            message = "'answer' continues a reply from one of its tokens; give 'token', or ask for a response there."
            raise ApiError(400, message, param="answer", code="invalid_value")
        title = asked.title if asked.title is not None else session.title
        copy = StoredSession(new_id("sess"), owner, title, session.instructions, session.metadata)
        nodes = copy_path(copy.id, [*above, node])
        await self._repository.ask(self._repository.store.add_session, replace(copy, head=nodes[-1].id), nodes)
        about = {"id": copy.id, "object": "session", "title": title, "head": nodes[-1].id, "n_nodes": len(nodes)}
        return JSONResponse(about)

    async def _cut(
        self, request: Request, asked: ForkRequest, session: StoredSession, node: Node, above: list[Node]
    ) -> Response:
        if not node.is_reply or node.own_tokens is None:
            message = "Only a reply whose token ids are known can be cut: not one that was edited."
            raise ApiError(400, message, param="node", code="invalid_value")
        tokens = await self._repository.ask(self._repository.store.tokens, node.id)
        own, k = tokens[node.n_prompt :].tolist(), asked.token or 0
        if k > len(own):
            message = f"Invalid 'token': this reply has {len(own)} tokens; got {k}."
            raise ApiError(400, message, param="token", code="invalid_value")
        if asked.answer:
            asked = await self._like(asked, node, above)
            place = replace(_place(session, above, []), opening=tuple(own[:k]))
            return await Replying(self._repository, asked, place).answer(request)

        def decode(texts: Any) -> str:
            return str(texts.decode(own[:k], skip_special_tokens=True))

        text = await self._repository.service.texts.run(0, decode)
        about = node.about | {
            "usage": None,
            "completed_at": None,
            "incomplete_details": {"reason": "max_output_tokens"},
        }
        n_known = min(node.n_kept, node.n_prompt + k)
        cut = replace(
            node, id=new_id("resp"), items=[output_message(new_id("msg"), text, is_whole=False)], status="incomplete",
            about=about, n_kept=n_known, n_tokens=k, own_tokens=np.asarray(tokens[n_known : node.n_prompt + k]),
            created_at=self._repository.store.now(), pinned_until=None,
        )  # fmt: skip
        return await self._add(session, cut)

    async def set_head(self, request: Request, session_id: str) -> Response:
        asked, owner = await self._repository.read(request, HeadRequest)
        session, node, _ = await self._find(owner, session_id, asked.node)
        await self._repository.ask(self._repository.store.change_session, session.id, head=node.id)
        return JSONResponse({"id": session.id, "object": "session", "head": node.id})

    async def delete(self, request: Request, session_id: str, node_id: str) -> Response:
        owner = self._repository.owner_of(request)
        _, node, _ = await self._find(owner, session_id, node_id)
        gone = await self._repository.delete(owner, node, self._repository.store.delete_branch)
        await self._pins.forget([other.id for other in gone])
        about = {"id": node.id, "object": "session.node.deleted", "deleted": True}
        return JSONResponse(about | {"nodes": [other.id for other in gone]})

    async def _find(self, owner: bytes, session_id: str, node_id: str) -> tuple[StoredSession, Node, list[Node]]:
        """Return a session, one of its nodes, and the nodes before that. Raises ApiError 404."""
        session = await self._repository.session(owner, session_id)
        node = await self._repository.node(owner, node_id, session)
        return (
            session,
            node,
            await self._repository.ask(self._repository.store.path, node.parent) if node.parent else [],
        )

    async def _like(self, asked: AskedT, node: Node, above: list[Node]) -> AskedT:
        """Return the request, with missing fields copied from the reply to which it is an alternative."""
        tree = await self._repository.ask(self._repository.store.tree, node.session)
        replies = [node, *(other for other in tree if other.parent == node.id), *reversed(above)]
        model = next((other for other in replies if other.is_reply and other.about), None)
        given = {} if model is None else {name: model.about.get(name) for name in _KEPT}
        if model is not None and model.about.get("tools"):
            given["tools"] = read_tools(model.about["tools"])
        if model is not None and not {"reasoning", "reasoning_effort"} & asked.model_fields_set:
            given["chat_template_kwargs"] = model.about.get("told_options", {})
        return asked.model_copy(update={name: v for name, v in given.items() if name not in asked.model_fields_set})

    async def _add(self, session: StoredSession, node: Node) -> Response:
        """Store a node, make it the current one, and show it."""
        if not await self._repository.ask(self._repository.store.add_nodes, session.id, [node], node.id):
            raise ApiError(409, "This session was changed meanwhile; read it and try again.", code="conflict")
        path = await self._repository.ask(self._repository.store.path, node.id)
        costs = await asyncio.to_thread(find_costs, self._repository.service.engine, session.owner, path)
        return JSONResponse({"object": "session.node", **nodes_as_json(path, costs)[-1]})


def _place(session: StoredSession, path: list[Node], items: list[Item]) -> Place:
    last = next((node.id for node in reversed(path) if node.is_reply), None)
    return Place(session.owner, session, path, items, names={"previous_response_id": last})


def _edited(node: Node, content: object, item_id: str | None) -> list[Item]:
    """Return the items of a node, one of them with other content. Raises ApiError 400."""
    try:
        text = read_content(content)
    except ValueError as error:
        raise ApiError(400, f"Invalid 'content': {error}.", param="content", code="invalid_value") from None
    chosen = [item for item in node.items if item_id is None or item["id"] == item_id]
    if len(chosen) != 1 and item_id is not None:
        raise ApiError(400, f"Invalid 'item': this node has no {item_id[:80]!r}.", param="item", code="invalid_value")
    if len(chosen) != 1 and (node.role == "tool" or not all(item["type"] == "message" for item in node.items)):
        message = "This node has several items; say which one is edited: 'item' is its id."
        raise ApiError(400, message, param="item", code="invalid_value")
    if len(chosen) != 1:
        return [text_item(node.role, text)]
    (old,) = chosen
    new = _with_content(old, text) | {"id": new_id(str(old["id"]).partition("_")[0])}
    return [new if item is old else item for item in node.items]


def _with_content(item: Item, text: str) -> Item:
    if item["type"] == "function_call_output":
        return item | {"output": text}
    if item["type"] == "function_call":
        return item | {"arguments": text}
    role = "assistant" if item["type"] == "reasoning" else item["role"]
    return text_item(role, text)
