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
from hybridmem.chat.sampling.token_bytes import TokenBytes
from hybridmem.chat.server.logprobs import completion_logprobs
from hybridmem.chat.server.replies import Piece

DONE = "data: [DONE]\n\n"


def as_event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


@dataclass(frozen=True)
class CompletionFormat:
    """Writes completions of plain text.

    Attributes:
        tokens: the model's tokens, for log probabilities.
        echoes: the text before the reply of each choice.
    """

    model: str
    tokens: TokenBytes
    echoes: list[str]
    id: str = field(default_factory=lambda: f"cmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, generations: list[Generation], usage: dict[str, object]) -> dict[str, Any]:
        choices = [
            self._choice(
                i,
                self.echoes[i] + generation.text,
                finish_reason_of(generation),
                completion_logprobs(self.tokens, generation.logprobs, len(self.echoes[i])),
            )
            for i, generation in enumerate(generations)
        ]
        return self._head() | {"choices": choices, "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._head() | {"choices": [self._choice(index, self.echoes[index])]} if self.echoes[index] else None

    def pieces(self, piece: Piece) -> list[dict[str, Any]]:
        chunks = []
        if piece.text or piece.logprobs:
            start = len(self.echoes[piece.index]) + piece.start
            logprobs = completion_logprobs(self.tokens, piece.logprobs, start)
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
    """Sends server-sent events, each as soon as it is there."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
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
