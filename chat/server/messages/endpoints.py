"""Answers Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem.chat.server.guard import exchange_of
from hybridmem.chat.server.messages.format import MessageFormat
from hybridmem.chat.server.messages.schema import read_chat
from hybridmem.chat.server.service import Service


class Messages:
    """Answers requests in the form of Anthropic's Messages. `Service` makes the prompts and generates the replies."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def create(self, request: Request) -> Response:
        asked, prompt, new_reader = await self._service.ask_chat(request, read_chat)
        form = MessageFormat(asked.model, len(prompt.token_ids), new_reader)
        return await self._service.reply(exchange_of(request.scope), [prompt], form, form if asked.stream else None)

    async def count(self, request: Request) -> Response:
        """Count the tokens that a prompt would have."""
        body = await request.body()
        _, token_ids, _ = await self._service.read_chat_of(body, read_chat)
        return JSONResponse({"input_tokens": len(token_ids)})
