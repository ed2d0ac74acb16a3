"""Writes replies for OpenAI's clients, whole or in pieces as server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybridmem.chat.engine.engine import Generation
from hybridmem.chat.sampling.logprobs import Chosen
from hybridmem.chat.sampling.token_bytes import TokenBytes
from hybridmem.chat.server.logprobs import completion_logprobs, prompt_logprobs
from hybridmem.chat.server.replies import Piece

DONE = "data: [DONE]\n\n"


def as_event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


@dataclass(frozen=True)
class CompletionFormat:
    """Writes completions of plain text.

    Attributes:
        tokens: the model's tokens, for log probabilities.
        prompts: the token ids of the prompt of each choice.
        echoes: the text before the reply of each choice.
        echoes_logprobs: whether the log probabilities of echoed prompts are sent.
        has_prompt_logprobs: whether the log probabilities of the prompt are sent in vLLM's form.
    """

    model: str
    tokens: TokenBytes
    prompts: list[list[int]]
    echoes: list[str]
    echoes_logprobs: bool = False
    has_prompt_logprobs: bool = False
    id: str = field(default_factory=lambda: f"cmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, generations: list[Generation], usage: dict[str, object]) -> dict[str, Any]:
        choices = [self._whole_choice(i, generation) for i, generation in enumerate(generations)]
        return self._head() | {"choices": choices, "usage": usage}

    def _whole_choice(self, index: int, generation: Generation) -> dict[str, Any]:
        text = self.echoes[index] + generation.text
        chosen = [*self._echoed(index, generation), *generation.logprobs]
        logprobs = completion_logprobs(self.tokens, chosen, text)
        choice = self._choice(index, text, finish_reason_of(generation), logprobs)
        if self.has_prompt_logprobs:
            told = prompt_logprobs(self.tokens, self.prompts[index], generation.prompt_logprobs)
            choice["prompt_logprobs"] = told
        return choice

    def _echoed(self, index: int, generation: Generation) -> list[Chosen]:
        """Return the tokens of an echoed prompt, with log probabilities. The first token has none."""
        if not self.echoes_logprobs:
            return []
        return [Chosen(self.prompts[index][0]), *generation.prompt_logprobs]

    def opening(self, piece: Piece) -> dict[str, Any] | None:
        echo = self.echoes[piece.index]
        if not echo and not self.echoes_logprobs:
            return None
        logprobs = completion_logprobs(self.tokens, self._echoed(piece.index, piece.generation), echo)
        return self._head() | {"choices": [self._choice(piece.index, echo, logprobs=logprobs)]}

    def pieces(self, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        if piece.text or piece.logprobs:
            start = len(self.echoes[piece.index]) + piece.start
            logprobs = completion_logprobs(self.tokens, piece.logprobs, piece.text, start)
            chunks.append(self._choice(piece.index, piece.text, logprobs=logprobs))
        if piece.is_last:
            chunks.append(self._choice(piece.index, "", finish_reason_of(piece.generation)))
        return [self._head() | {"choices": [chunk]} for chunk in chunks]

    def progress(self, index: int, progress: dict[str, int]) -> dict[str, Any]:
        return self._head() | {"choices": [self._choice(index, "")]} | {"prompt_progress": progress}

    def usage(self, usage: dict[str, object]) -> dict[str, Any]:
        return self._head() | {"choices": [], "usage": usage}

    def _choice(
        self, index: int, text: str, finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}


def finish_reason_of(generation: Generation) -> str | None:
    """Return why a reply ended, in OpenAI's words. A deadline cuts a reply as `max_tokens` does."""
    return "length" if generation.finish_reason == "deadline" else generation.finish_reason


class EventStream(Response):
    """Sends server-sent events, or lines of another type, each as soon as it is available."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None], media_type: str = media_type) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=media_type)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()
