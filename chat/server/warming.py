"""Computes recurring prompts, such as system prompts with their tools, before anybody sends them, and keeps them.

The file has one request on each line, in the form of /v1/chat/completions or /v1/messages. A request without a user's
message stands for all requests that begin like it.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server.checked import read_request
from hybridmem.chat.server.errors import ApiError, log
from hybridmem.chat.server.messages.schema import read_chat
from hybridmem.chat.server.schema import ChatRequest
from hybridmem.chat.server.service import Service
from hybridmem.memory import BatchError, HybridMemoryError, SpecError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.sequences import common_prefix

_SHARE = 4
"""Warmed prompts are pinned in at most the budget divided by this. The rest is for replies."""

Body = dict[str, Any]


def read_warmed(path: str | None) -> list[Body]:
    """Read the file of prompts. Raises SpecError, which names the wrong line."""
    if path is None:
        return []
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"warm={path!r} cannot be read: {error}; name a file with one request a line") from None
    bodies = list[Body]()
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                body = json.loads(line)
                bodies.append(_checked(body))
            except (ValueError, ApiError) as error:
                raise SpecError(f"{path}, line {number}: {error}") from None
    return bodies


def _checked(body: object) -> Body:
    if not isinstance(body, dict):
        raise ValueError("give a request as an object, such as {'messages': [...], 'tools': [...]}")
    body = {"model": "", **body}
    _read(body, "a")
    return body


def _read(body: Body, text: str) -> ChatRequest:
    """Read a request, and add a user's message if it has none. Raises ApiError."""
    messages = list(body.get("messages") or [])
    if not any(isinstance(message, dict) and message.get("role") == "user" for message in messages):
        messages.append({"role": "user", "content": text})
    sent = json.dumps(body | {"messages": messages}).encode()
    tools = body.get("tools")
    is_anthropics = "system" in body or (
        isinstance(tools, list) and any(isinstance(tool, dict) and "input_schema" in tool for tool in tools)
    )
    return read_chat(sent) if is_anthropics else read_request(ChatRequest, sent)


class Warming:
    """Computes and pins the prompts of a file, for each owner that may send them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._bodies = read_warmed(service.options.warm)
        if self._bodies and service.engine.prefixes is None:
            raise SpecError("warm=... computes prompts to keep them, which prefix_cache=False does not; leave out one")

    async def run(self) -> None:
        """Compute the prompts one after the other, while the server answers clients."""
        for number, body in enumerate(self._bodies, 1):
            try:
                await self._warm(number, body)
            except (ApiError, HybridMemoryError) as error:
                log.warning("prompt %d of %s was not computed: %s", number, self._service.options.warm, error)

    async def _warm(self, number: int, body: Body) -> None:
        service = self._service
        tokens = await service.texts.run(0, lambda texts: self._encode(texts, body))
        if not tokens:
            raise BatchError("no two chats that begin with it have a token in common")
        for owner in service.owners.of_everybody(body.get("cache_salt")):
            async for _ in service.engine.stream(tokens, max_tokens=0, owner=owner):
                pass
            n_bytes = await asyncio.to_thread(self._pin, tokens, owner)
            log.info("prompt %d of %s: %d tokens, %d bytes", number, service.options.warm, len(tokens), n_bytes)

    def _encode(self, texts: Tokenizer, body: Body) -> list[int]:
        """Return the tokens that all chats with this prompt begin with."""
        template = self._service.shaping.habits.template
        found = list[list[int]]()
        for text in (f"a{uuid4().hex}", f"Z{uuid4().hex}"):
            texts = texts.for_another_prompt()
            asked = _read(body, text)
            messages = [message.as_template_knows() for message in asked.messages]
            found.append(self._service.encode_chat(asked.with_template(texts, template), asked, messages))
        n_common = common_prefix(np.array(found[0], np.int64), np.array(found[1], np.int64))
        return found[0][:n_common]

    def _pin(self, tokens: list[int], owner: bytes) -> int:
        """Pin a prompt's checkpoint, unless too much is pinned already.

        Return the bytes that only this checkpoint holds.
        """
        engine = self._service.engine
        prefixes = engine.prefixes
        assert isinstance(prefixes, PrefixCache), "it was asked for"
        with engine.lock, suppress(BatchError):
            marks = prefixes.checkpoints_of(tokens, owner)
            n_bytes = engine.memory.private_bytes(marks[-1]) if marks else 0
            if self._n_pinned + n_bytes <= engine.memory.budget_bytes // _SHARE:
                prefixes.pin(tokens, owner)
                self._n_pinned += n_bytes
            return n_bytes
        return 0

    _n_pinned = 0
