"""Reads from a request what the router needs: the tokens of its prompt, their owner, and the session."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server.chat_prompts import encode_messages
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.messages.schema import read_chat
from hybridmem.chat.server.owners import Owners, credential_of, session_named
from hybridmem.chat.server.schema import ChatRequest, CompletionRequest, read_request
from hybridmem.chat.server.texts import Texts
from hybridmem.chat.tools.families import find_habits
from hybridmem.cluster.routing.prompts import TokenPrompt
from hybridmem.cluster.serving.request import ForwardedRequest
from hybridmem.memory import HybridMemoryError

REPLICA_HEADER = "x-hybrid-memory-replica"
_MOST_TOKENS = 1 << 20
_OF_SESSIONS = ("conversation", "previous_response_id")
"""The fields of a body that name a session if no header does."""


@dataclass(frozen=True)
class Reading:
    """Holds what was read from a request.

    Attributes:
        wants_seed: whether the reply is a stream of sampled tokens and the request names no seed.
    """

    prompt: TokenPrompt
    wants_seed: bool = False

    def request_of(self, request: ForwardedRequest, most_bytes: int) -> ForwardedRequest:
        """Return the request for replicas.

        The request gets a seed if it needs one, so that a second replica makes the same reply.

        Args:
            most_bytes: the most bytes of a body. A body that would be too large with a seed stays as it is.
        """
        if not self.wants_seed:
            return request
        # The seed comes last, so it counts even if there is a "seed": null.
        seed = f',"seed":{secrets.randbelow(1 << 62)}}}'.encode()
        body = request.body.rstrip()[:-1] + seed
        return replace(request, body=body) if len(body) <= most_bytes else request


class PromptReader:
    """Turns requests into prompts, in threads, in the same way as a replica's server.

    Args:
        parse_special: as in `ServerOptions`.
        owners: finds the owners of prefixes, as the replicas do. None: the replicas ask for no keys.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, parse_special: bool, max_requests: int, owners: Owners | None = None
    ) -> None:
        self._habits = find_habits(tokenizer)
        self._texts = Texts(tokenizer, _MOST_TOKENS, max(1, max_requests // 2), self._habits.write_calls)
        self._parse_special = parse_special
        self._owners = owners or Owners(has_keys=False)

    def close(self) -> None:
        self._texts.close()

    async def read(self, request: ForwardedRequest) -> Reading:
        """Return the prompt of a request. It has no tokens if the request has no prompt, or a bad one.

        The replica that gets a bad request answers with the error.
        """
        readers: dict[str, Callable[[Tokenizer, ForwardedRequest], Reading]] = {
            "/v1/chat/completions": self._read_chat,
            "/v1/completions": self._read_completion,
            "/v1/messages": self._read_messages,
        }
        pinned = request.header(REPLICA_HEADER)
        if request.method != "POST":
            return Reading(TokenPrompt(session=session_of(request, None), pinned=pinned))
        reader = readers.get(request.path)
        try:
            if reader is not None:
                read = await self._texts.run(len(request.body), lambda texts: reader(texts, request))
                return replace(read, prompt=replace(read.prompt, pinned=pinned))
        except (ApiError, HybridMemoryError):
            return Reading(TokenPrompt(pinned=pinned))
        return Reading(TokenPrompt(session=session_of(request, _name_in(request.body)), pinned=pinned))

    def _read_chat(self, texts: Tokenizer, request: ForwardedRequest) -> Reading:
        return self._read_messages_of(texts, request, read_request(ChatRequest, request.body))

    def _read_messages(self, texts: Tokenizer, request: ForwardedRequest) -> Reading:
        return self._read_messages_of(texts, request, read_chat(request.body))

    def _read_messages_of(self, texts: Tokenizer, request: ForwardedRequest, asked: ChatRequest) -> Reading:
        messages = [message.as_template_knows() for message in asked.messages]
        texts = asked.with_template(texts, self._habits.template)
        token_ids = encode_messages(
            texts, messages, parse_special=self._parse_special, continues=asked.continue_final_message,
            thoughts=self._habits.thoughts,
        )  # fmt: skip
        return self._reading(token_ids, asked, request)

    def _read_completion(self, texts: Tokenizer, request: ForwardedRequest) -> Reading:
        asked = read_request(CompletionRequest, request.body)
        # A request with several prompts goes to one replica, which is chosen by the first prompt.
        prompt = asked.prompt[0]
        return self._reading(list(texts.encode(prompt)) if isinstance(prompt, str) else prompt, asked, request)

    def _reading(
        self, token_ids: list[int], asked: ChatRequest | CompletionRequest, request: ForwardedRequest
    ) -> Reading:
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < 2**31:
            return Reading(TokenPrompt())
        owner = self._owners.of_prefixes(request.header, asked)
        session = session_of(request, asked.prompt_cache_key)
        prompt = TokenPrompt(np.array(token_ids, "<i4").tobytes(), owner, session)
        return Reading(prompt, wants_seed=asked.stream and asked.seed is None and asked.temperature != 0)


def session_of(request: ForwardedRequest, name: str | None) -> str | None:
    """Return the key of a request's session, or None. No client with another API key can name the same session.

    Args:
        name: the name of the session in the body, for requests whose headers name none.
    """
    name = session_named(request.header) or name
    if name is None:
        return None
    return hashlib.sha256(repr((credential_of(request.header), name)).encode()).hexdigest()[:32]


def _name_in(body: bytes) -> str | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    for field in _OF_SESSIONS:
        found = value.get(field)
        found = found.get("id") if isinstance(found, dict) else found
        if isinstance(found, str) and found:
            return found
    return None
