"""Generates the reply to a stored history, and stores it before its client learns that it is whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.responses import Response as HttpResponse

from chat.engine.engine import Generation
from chat.engine.streaming import TextStream
from chat.server.errors import ApiError, as_api_error, stopping
from chat.server.formats import EventStream
from chat.server.lengths import check_length
from chat.server.limits import exchange_of
from chat.server.replies import Piece, Replies
from chat.server.sessions.desk import Desk
from chat.server.sessions.objects import (
    Events,
    Response,
    about_of,
    failed,
    finished,
    new_response,
    output_message,
    usage_of,
)  # fmt: skip
from chat.server.sessions.prompting import History, count_nodes, find_base, make_prompt
from chat.server.sessions.schema import SampledRequest
from chat.stored.continuing import Prompt, tokens_of_text
from chat.stored.items import make_nodes, make_title
from chat.stored.nodes import Item, Node, StoredSession, new_id
from chat.stored.rows import without_tokens

_PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class Place:
    """Says where a reply belongs.

    Attributes:
        session: the one that it is stored in; None: a new one, or none at all.
        path: the nodes before its input.
        items: its input.
        opening: token ids of an earlier reply that it begins with.
        names: what its response says of its history: `previous_response_id` or `conversation`.
    """

    owner: bytes
    session: StoredSession | None
    path: list[Node]
    items: list[Item]
    opening: tuple[int, ...] = ()
    names: dict[str, Any] | None = None
    title: str = ""
    is_stored: bool = True


class Replying:
    """Makes one response, from its prompt to its place in the store."""

    def __init__(self, desk: Desk, asked: SampledRequest, place: Place) -> None:
        session = place.session
        self._is_new = session is None and place.is_stored
        if session is None:
            title = place.title or make_title(place.items)
            session = StoredSession(new_id("sess"), place.owner, title, is_implicit=True)
        instructions = asked.instructions if asked.instructions is not None else session.instructions
        self._desk, self._asked, self._place, self._session = desk, asked, place, session
        model = desk.service.model_id
        self._response: Response = new_response(asked, model=model, store=place.is_stored) | (place.names or {})
        self._response["instructions"] = instructions
        self._inputs = make_nodes(session.id, place.path[-1].id if place.path else None, place.items)
        self._item_id = new_id("msg")
        self._has_ended = False
        self._begun, self._n_read = TextStream(desk.service.engine.tokenizer), 0
        for token_id in place.opening:
            self._begun.add(token_id)

    async def answer(self, request: Request) -> HttpResponse:
        """Generate and answer, whole or as a stream. Raises ApiError."""
        service = self._desk.service
        prompt = await self._make_prompt(n_bytes=len(await request.body()))
        token_ids = [*prompt.token_ids, *self._place.opening]
        n_reply = check_length(
            len(token_ids), self._asked.max_output_tokens, service.options.default_tokens, service.context_tokens,
            param="input",
        )  # fmt: skip
        is_reporting = self._asked.stream and self._asked.return_progress
        ask = service.asking.ask(self._asked, token_ids, n_reply, self._place.owner, reports_prefill=is_reporting)
        sampling = ask.samplings[0]
        self._response |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        replies = service.begin(exchange_of(request.scope), [ask])
        if self._place.is_stored:
            self._response["hybrid_memory"] = {"session": self._session.id, "history": prompt.history}
        if self._asked.stream:
            return EventStream(self._events(replies, prompt))
        try:
            while (piece := await replies.next()) is not None:
                self._text_of(piece)
            return JSONResponse(await self._end(replies, prompt))
        except Exception as error:
            raise as_api_error(error) from None

    async def _make_prompt(self, n_bytes: int) -> Prompt:
        desk, service, path = self._desk, self._desk.service, [*self._place.path, *self._inputs]
        instructions = self._response["instructions"]
        base, why = find_base(path, instructions)
        tokens = await desk.ask(desk.store.tokens, base.id) if base is not None else None
        history = History(path, instructions, base, tokens, why)
        n_before = sum(node.n_tokens for node in self._place.path)
        make = partial(
            make_prompt, history=history, stop_ids=service.engine.stop_ids,
            parse_special=service.options.parse_special,
        )  # fmt: skip

        def work(texts: Any) -> Prompt:
            prompt = make(texts)
            self._inputs = count_nodes(texts, len(prompt.token_ids), n_before, self._inputs)
            return prompt

        n_bytes += sum(len(str(node.items)) for node in path)
        return await service.texts.run(n_bytes, work, param="input")

    async def _events(self, replies: Replies, prompt: Prompt) -> AsyncGenerator[str, None]:
        events = Events()
        yield events.of_response("created", self._response)
        yield events.of_response("in_progress", self._response)
        try:
            for event in events.opening(self._item_id):
                yield event
            if self._begun.text:
                yield events.delta(self._item_id, self._begun.text)
            while (piece := await replies.next()) is not None:
                if piece.progress is not None:
                    yield events.of_response("in_progress", self._response, prompt_progress=piece.progress)
                elif text := self._text_of(piece):
                    yield events.delta(self._item_id, text)
            response = await self._end(replies, prompt)
            for event in events.closing(*response["output"]):
                yield event
            yield events.of_response(response["status"], response)
        except (asyncio.CancelledError, GeneratorExit):  # the client has gone away, or stopped the reply
            self._desk.finish(self._store_begun(replies, prompt))
            raise
        except Exception as error:  # the status has been sent already
            yield events.of_response("failed", failed(self._response, as_api_error(error)))

    async def _store_begun(self, replies: Replies, prompt: Prompt) -> None:
        """Store what there is of a reply whose client went away, so that it is there when the client comes back.

        Not a message in a conversation: a client that tries again would say it twice there.
        """
        is_repeatable = not (self._place.items and "conversation" in (self._place.names or {}))
        if self._has_ended or not (self._place.is_stored and is_repeatable):
            return
        replies.cancel()
        generation = replies.generations[0]
        while not generation.is_finished:
            await asyncio.sleep(_PAUSE_SECONDS)
        if generation.error is not None:
            return
        for token_id in generation.token_ids[self._n_read :] if self._place.opening else ():
            self._begun.add(token_id)
        with suppress(ApiError):  # it was deleted meanwhile, or the server stops
            await self._end(replies, prompt)

    def _text_of(self, piece: Piece) -> str:
        """Return the text of a piece; behind an opening, whose last token may decide whether a space stands there."""
        if not self._place.opening:
            return piece.text
        token_ids, text = piece.generation.token_ids, ""
        for token_id in token_ids[self._n_read :]:
            self._n_read += 1
            if token_id not in self._desk.service.engine.stop_ids:
                text += self._begun.add(token_id)
        return text + (self._begun.flush() if piece.is_last else "")

    async def _end(self, replies: Replies, prompt: Prompt) -> Response:
        """Return the response that has ended. If it is to be stored, it is on the disk then."""
        self._has_ended = True
        generation = replies.generations[0]
        text = self._begun.text if self._place.opening else generation.text
        message = output_message(self._item_id, text, is_whole=generation.finish_reason == "stop")
        usage = usage_of(dict(replies.usage()))
        response = finished(self._response, [message], generation.finish_reason, usage)
        if self._place.is_stored:
            await asyncio.shield(self._store(response, generation, prompt))
        return response

    async def _said(self, generation: Generation) -> list[int] | None:
        """Return the token ids of a reply; None if a stop string has cut its text inside of one."""
        said = [*self._place.opening, *generation.token_ids]
        if generation.stopped_by is None:
            return said

        def cut(texts: Any) -> list[int] | None:
            decode = partial(texts.decode, skip_special_tokens=True)
            return tokens_of_text(said, generation.text, decode)

        return await self._desk.service.texts.run(0, cut) if not self._place.opening else None

    async def _store(self, response: Response, generation: Generation, prompt: Prompt) -> None:
        desk, store, nodes = self._desk, self._desk.store, [*self._inputs]
        said = await self._said(generation)
        own = [*prompt.token_ids[prompt.n_kept :], *(said or ())]
        reply = Node(
            response["id"], self._session.id, nodes[-1].id if nodes else self._place.path[-1].id, "assistant",
            response["output"], response["status"], about_of(response), prompt.base, prompt.n_kept,
            len(prompt.token_ids), len(said or generation.token_ids), np.array(own, np.int64),
        )  # fmt: skip
        if said is None:
            reply = without_tokens(reply)
        nodes.append(reply)
        try:
            if self._is_new:
                await desk.ask(store.add_session, replace(self._session, head=reply.id), nodes)
                return
            is_there = await desk.ask(store.add_nodes, self._session.id, nodes, reply.id)
        except RuntimeError:  # the thread of the store has ended
            raise stopping() from None
        if not is_there:
            message = "What this reply continues was deleted while it was generated, so it is not stored."
            raise ApiError(409, message, code="conflict")
