"""Generates the reply to a stored history, and stores it before the client learns that it is complete."""

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

from hybridmem.chat.engine.engine import Generation
from hybridmem.chat.engine.output import Output
from hybridmem.chat.server.errors import ApiError, as_api_error, stopping
from hybridmem.chat.server.formats import EventStream
from hybridmem.chat.server.guard import exchange_of
from hybridmem.chat.server.lengths import check_length
from hybridmem.chat.server.pictures import NOTHING, sources_of
from hybridmem.chat.server.replies import Replies
from hybridmem.chat.server.sessions.objects import Events, Response, about_of, failed, finished, new_response, usage_of
from hybridmem.chat.server.sessions.prompting import History, count_nodes, find_base, make_prompt
from hybridmem.chat.server.sessions.schema import SampledRequest
from hybridmem.chat.server.sessions.session_repository import SessionRepository
from hybridmem.chat.server.sessions.speaking import Speaking
from hybridmem.chat.server.sessions.writing import Writing
from hybridmem.chat.server.shaping import NewReader
from hybridmem.chat.server.texts import LONG_BYTES
from hybridmem.chat.stored.continuing import Prompt, tokens_of_text
from hybridmem.chat.stored.items import make_nodes, make_title
from hybridmem.chat.stored.nodes import Ids, Item, Node, StoredSession
from hybridmem.chat.stored.rows import without_tokens

_PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class Place:
    """Says where a reply belongs.

    Attributes:
        session: the session in which it is stored. None: a new one, or none at all.
        path: the nodes before its input.
        items: the items of its input.
        opening: the token ids of an earlier reply with which this reply begins.
        names: the field by which the response names its history: `previous_response_id` or `conversation`.
    """

    owner: bytes
    session: StoredSession | None
    path: list[Node]
    items: list[Item]
    opening: tuple[int, ...] = ()
    names: dict[str, Any] | None = None
    title: str = ""
    is_stored: bool = True


@dataclass(frozen=True)
class Made:
    """Holds a reply that is being made: its generation, its prompt, and its reader."""

    replies: Replies
    prompt: Prompt
    speaking: Speaking
    output: Output


class Replying:
    """Makes one response, from the prompt to storing it.

    Args:
        new_id: draws the response's ids.
    """

    def __init__(
        self, repository: SessionRepository, asked: SampledRequest, place: Place, new_id: Ids | None = None
    ) -> None:
        session, new_id = place.session, new_id or Ids()
        self._is_new = session is None and place.is_stored
        if session is None:
            title = place.title or make_title(place.items)
            session = StoredSession(new_id("sess"), place.owner, title, is_implicit=True)
        instructions = asked.instructions if asked.instructions is not None else session.instructions
        self._repository, self._asked, self._place, self._session = repository, asked, place, session
        about = new_response(asked, new_id("resp"), model=repository.service.model_id, store=place.is_stored)
        self._response: Response = about | (place.names or {}) | {"instructions": instructions}
        self._inputs = make_nodes(session.id, place.path[-1].id if place.path else None, place.items)
        self._events = Events()
        self._writing = Writing(self._events, new_id, asked.namespaces)
        self._has_ended = False
        self._told: dict[str, Any] = {}
        self._seen = NOTHING

    async def answer(self, request: Request) -> HttpResponse:
        """Generate a reply, and send it whole or as a stream. Raises ApiError."""
        service, asked, opening = self._repository.service, self._asked, self._place.opening
        prompt, output, new_reader = await self._make_prompt(n_bytes=len(await request.body()))
        exchange_of(request.scope).note_left_out(
            [*asked.left_out, *asked.left_out_of(service.shaping.habits.template), *service.shaping.notes_on(asked)]
        )
        token_ids = [*prompt.token_ids, *opening]
        limits = service.options.default_tokens, service.context_tokens
        n_reply = check_length(len(token_ids), asked.max_output_tokens, *limits, param="input")
        prompt_request = service.asking.prompt_request(
            asked, token_ids, n_reply, service.owners.of_prefixes(request.headers.get, asked), output=output,
            reports_prefill=asked.stream and asked.return_progress,
        )  # fmt: skip
        if service.recorder is not None and not (self._place.is_stored or self._place.path):
            service.recorder.watch_items(request, asked, self._place.items, token_ids, new_reader)
        prompt_request, sampling = service.with_thoughts(prompt_request, new_reader), prompt_request.samplings[0]
        self._response |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        speaking = Speaking(
            self._writing, new_reader(), service.engine.tokenizer, opening, asked.stop_ids(service.asking.end_ids),
            shows_special=output.shows_special, hidden_ids=output.hidden_ids,
        )  # fmt: skip
        replies = service.begin(exchange_of(request.scope), [prompt_request])
        if self._place.is_stored:
            self._response["hybrid_memory"] = {"session": self._session.id, "history": prompt.history}
        made = Made(replies, prompt, speaking, output)
        if asked.stream:
            return EventStream(self._stream(made))
        try:
            speaking.begin()
            while (piece := await replies.next()) is not None:
                speaking.add(piece)
            speaking.end(replies.generations[0])
            return JSONResponse(await self._end(made))
        except Exception as error:
            raise as_api_error(error) from None

    async def _make_prompt(self, n_bytes: int) -> tuple[Prompt, Output, NewReader]:
        """Return the prompt, the form of the reply, and a function that makes its reader. Raises ApiError."""
        repository, service, path = self._repository, self._repository.service, [*self._place.path, *self._inputs]
        instructions, asked = self._response["instructions"], self._asked
        options = asked.told_options(service.shaping.habits.template)
        base, why = find_base(path, instructions, asked.told_tools, options)
        tokens = await repository.ask(repository.store.tokens, base.id) if base is not None else None
        history = History(path, instructions, asked.told_tools, options, base, tokens, why)
        self._told = {"told_tools": asked.told_tools, "told_options": options}
        n_before = sum(node.n_tokens for node in self._place.path)
        make = partial(
            make_prompt, history=history, stop_ids=service.engine.stop_ids,
            parse_special=service.options.parse_special,
        )  # fmt: skip

        sources = sources_of(item for node in path for item in node.items)

        def work(texts: Any) -> tuple[Prompt, bool]:
            self._seen = service.sight.read(sources, texts, param="input")
            prompt = make(texts.with_pictures(self._seen))
            self._inputs = count_nodes(texts, len(prompt.token_ids), n_before, self._inputs)
            return prompt, service.shaping.is_thinking(texts, prompt.token_ids)

        n_bytes += sum(len(str(node.items)) for node in path)
        n_bytes = max(n_bytes, LONG_BYTES + 1) if sources else n_bytes
        prompt, is_thinking = await service.texts.run(n_bytes, work, param="input")
        return prompt, *await service.shaping.shape(asked.form, asked, is_thinking=is_thinking)

    async def _stream(self, made: Made) -> AsyncGenerator[str, None]:
        events, replies, speaking = self._events, made.replies, made.speaking
        yield events.of_response("created", self._response)
        yield events.of_response("in_progress", self._response)
        try:
            for event in speaking.begin():
                yield event
            async for piece in replies.pieces():
                if piece is None:
                    yield events.of_response("in_progress", self._response)
                    continue
                if piece.progress is not None:
                    yield events.of_response("in_progress", self._response, prompt_progress=piece.progress)
                for event in speaking.add(piece):
                    yield event
            last = speaking.end(replies.generations[0])
            response = await self._end(made)
            for event in last:
                yield event
            yield events.of_response(response["status"], response)
        except (asyncio.CancelledError, GeneratorExit):  # The client has gone away, or stopped the reply.
            self._repository.finish(self._store_begun(made))
            raise
        except Exception as error:  # The status has been sent already, so the error is sent as an event.
            yield events.of_response("failed", failed(self._response, as_api_error(error)))

    async def _store_begun(self, made: Made) -> None:
        """Store the beginning of a reply whose client went away, so that the client finds it when it comes back.

        In a conversation nothing is stored, because a client that tries again would add its message a second time.
        """
        is_repeatable = not (self._place.items and "conversation" in (self._place.names or {}))
        if self._has_ended or not (self._place.is_stored and is_repeatable):
            return
        made.replies.cancel()
        generation = made.replies.generations[0]
        while not generation.is_finished:
            await asyncio.sleep(_PAUSE_SECONDS)
        if generation.error is not None:
            return
        made.speaking.end(generation)
        with suppress(ApiError):  # The session was deleted meanwhile, or the server stops.
            await self._end(made)

    async def _end(self, made: Made) -> Response:
        """Return the ended response. If it is to be stored, it is on the disk when this returns."""
        self._has_ended = True
        generation = made.replies.generations[0]
        usage = usage_of(dict(made.replies.usage()))
        response = finished(self._response, self._writing.items, generation.finish_reason, usage)
        if self._place.is_stored:
            await asyncio.shield(self._store(response, generation, made))
        return response

    async def _said(self, generation: Generation, made: Made) -> list[int] | None:
        """Return the token ids of a reply. None: a stop string has cut the text inside of a token."""
        said = [*self._place.opening, *generation.token_ids]
        if said and said[-1] in self._asked.stop_token_ids:  # This token ends the reply, and is no part of its text.
            said.pop()
        if generation.stopped_by is None:
            return said

        def cut(texts: Any) -> list[int] | None:
            def decode(ids: list[int]) -> str:
                shown = [i for i in ids if i not in made.output.hidden_ids]
                return str(texts.decode(shown, skip_special_tokens=not made.output.shows_special))

            return tokens_of_text(said, generation.text, decode)

        return await self._repository.service.texts.run(0, cut) if not self._place.opening else None

    async def _store(self, response: Response, generation: Generation, made: Made) -> None:
        repository, store, nodes = self._repository, self._repository.store, [*self._inputs]
        about = about_of(response) | {name: told for name, told in self._told.items() if told}
        prompt, said = made.prompt, await self._said(generation, made)
        own = [*prompt.token_ids[prompt.n_kept :], *(said or ())]
        reply = Node(
            response["id"], self._session.id, nodes[-1].id if nodes else self._place.path[-1].id, "assistant",
            response["output"], response["status"], about, prompt.base, prompt.n_kept,
            len(prompt.token_ids), len(said or generation.token_ids), np.array(own, np.int64),
        )  # fmt: skip
        if said is None:
            reply = without_tokens(reply)
        nodes.append(reply)
        try:
            if self._is_new:
                await repository.ask(store.add_session, replace(self._session, head=reply.id), nodes)
                return
            is_there = await repository.ask(store.add_nodes, self._session.id, nodes, reply.id)
        except RuntimeError:  # The thread of the store has ended.
            raise stopping() from None
        if not is_there:
            message = "What this reply continues was deleted while it was generated, so it is not stored."
            raise ApiError(409, message, code="conflict")
