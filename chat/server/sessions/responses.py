"""Answers OpenAI's /v1/responses."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.sessions.lists import page_of
from hybridmem.chat.server.sessions.objects import stored_response
from hybridmem.chat.server.sessions.replaying import response_again
from hybridmem.chat.server.sessions.replying import Place, Replying
from hybridmem.chat.server.sessions.schema import ResponseRequest
from hybridmem.chat.server.sessions.session_repository import SessionRepository
from hybridmem.chat.stored.nodes import Ids, Node

REPLY_SEED = "hybrid_memory.reply_seed"
"""The key in a request's scope for the seed of its ids, 32 hexadecimal digits. Whoever answers the request again, in
this process or another one, makes the same response, so it is stored once.
"""


class Responses:
    """Creates, shows and deletes responses."""

    def __init__(self, repository: SessionRepository) -> None:
        self._repository = repository

    async def create(self, request: Request) -> Response:
        asked, owner = await self._repository.read(request, ResponseRequest)
        seed = request.scope.get(REPLY_SEED)
        if seed is not None:
            made = await self._repository.ask(self._repository.store.node, owner, Ids(seed)("resp"))
            if made is not None and _is_whole(made):
                return response_again(made, seed, stream=asked.stream)
            if asked.seed is None:
                asked = asked.model_copy(update={"seed": int(seed[:15], 16)})
        place = await self._place(owner, asked)
        return await Replying(self._repository, asked, place, Ids(seed)).answer(request)

    async def _place(self, owner: bytes, asked: ResponseRequest) -> Place:
        """Return the place of a new response in its session. Raises ApiError 404."""
        repository, session, parent = self._repository, None, None
        names: dict[str, object] = {}
        if asked.conversation is not None:
            session = await repository.session(owner, asked.conversation)
            parent, names = session.head, {"conversation": {"id": session.id}}
        elif asked.previous_response_id is not None:
            reply = await repository.reply(owner, asked.previous_response_id, param="previous_response_id")
            session = await repository.session(owner, reply.session)
            parent, names = reply.id, {"previous_response_id": reply.id}
        path = await repository.ask(repository.store.path, parent) if parent is not None else []
        if not path and not asked.input:
            message = "This conversation has no items yet; give some as 'input'."
            raise ApiError(400, message, param="input", code="missing_required_parameter")
        items = await repository.resolve(owner, asked.input)
        return Place(owner, session, path, items, names=names, is_stored=asked.store)

    async def show(self, request: Request, response_id: str) -> Response:
        if request.query_params.get("stream", "false").lower() != "false":
            message = "Unsupported parameter: 'stream' is not supported here; a stored response is returned whole."
            raise ApiError(400, message, param="stream", code="unsupported_parameter")
        return JSONResponse(
            stored_response(await self._repository.reply(self._repository.owner_of(request), response_id))
        )

    async def delete(self, request: Request, response_id: str) -> Response:
        owner = self._repository.owner_of(request)
        reply = await self._repository.reply(owner, response_id)
        await self._repository.delete(owner, reply, self._repository.store.delete_response)
        return JSONResponse({"id": reply.id, "object": "response", "deleted": True})

    async def cancel(self, request: Request, response_id: str) -> Response:
        await self._repository.reply(self._repository.owner_of(request), response_id)
        message = "Only responses in the background can be cancelled, and this server has none: close the connection."
        raise ApiError(400, message, code="unsupported_value")

    async def list_input(self, request: Request, response_id: str) -> Response:
        """List the input items of a response: everything before it, without its output."""
        reply = await self._repository.reply(self._repository.owner_of(request), response_id)
        path = await self._repository.ask(self._repository.store.path, reply.parent)
        return JSONResponse(page_of(request, [item for node in path for item in node.items]))


def _is_whole(node: Node) -> bool:
    """Return whether a stored reply is complete. The replica that made it may have been lost in the middle."""
    return node.status != "deleted" and (node.about.get("incomplete_details") or {}).get("reason") != "cancelled"
