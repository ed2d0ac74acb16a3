"""Stores the requests of agents as trees of sessions, without changes to the client.

A client sends its whole history with each request. A request continues the last node of the longest stored prefix of
its history. So a rewind, a fork, a subagent, or a compaction of the context becomes a branch, and earlier messages
stay.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request

from hybridmem.chat.engine.engine import Generation
from hybridmem.chat.server.agents.histories import (
    digests_of,
    digests_of_tree,
    groups_of,
    items_of,
    items_of_reply,
)
from hybridmem.chat.server.chat_format import read_whole
from hybridmem.chat.server.errors import log
from hybridmem.chat.server.guard import exchange_of
from hybridmem.chat.server.owners import session_named
from hybridmem.chat.server.replies import Replies
from hybridmem.chat.server.schema import ChatRequest
from hybridmem.chat.server.sessions.objects import usage_of
from hybridmem.chat.server.sessions.prompting import count_nodes
from hybridmem.chat.server.sessions.schema import SampledRequest
from hybridmem.chat.server.sessions.session_repository import SessionRepository
from hybridmem.chat.server.shaping import NewReader
from hybridmem.chat.stored.items import make_nodes, make_title, role_of, text_item
from hybridmem.chat.stored.nodes import Item, Node, StoredSession, new_id
from hybridmem.chat.stored.rows import without_tokens
from hybridmem.memory.sequences import common_prefix

_MOST_KNOWN = 8192
"""The digests of so many of the latest histories are known. A named session is read again when its are forgotten."""
_PAUSE_SECONDS = 0.01


@dataclass(frozen=True)
class Step:
    """Holds one request of an agent, and its reply.

    Attributes:
        name: the session that the request's headers name. None: the history alone says where it belongs.
        items: the history. beginning: the text that the request gave as the beginning of the reply.
        about: the fields that are stored of the reply besides its items.
    """

    owner: bytes
    name: str | None
    items: list[Item]
    beginning: str
    token_ids: list[int]
    new_reader: NewReader
    replies: Replies
    about: dict[str, Any]


@dataclass(frozen=True)
class Found:
    """Says at which node of a session a history continues, and that `n_known` of its turns come before."""

    session: str
    node: str | None = None
    n_known: int = 0
    is_new: bool = False


class Recorder:
    """Stores steps of agents one after the other, after their clients have received their replies."""

    def __init__(self, repository: SessionRepository) -> None:
        self._repository = repository
        self._turn = asyncio.Lock()
        # This maps the digest of a history to its session and its last node.
        self._known = OrderedDict[bytes, tuple[str, str]]()

    def watch(self, request: Request, asked: ChatRequest, token_ids: list[int], new_reader: NewReader) -> None:
        """Store a chat when its reply has ended, or when its client goes away."""
        messages = list(asked.messages)
        beginning = messages.pop().content if asked.continue_final_message else ""
        self._watch(request, asked, items_of(messages, asked.seen.sources), beginning, token_ids, new_reader)

    def watch_items(
        self, request: Request, asked: SampledRequest, items: list[Item], token_ids: list[int], new_reader: NewReader
    ) -> None:
        """Store a response that is not stored otherwise, if a header names its session, as `watch` stores a chat."""
        if session_named(request.headers.get) is not None:
            opening = [] if asked.instructions is None else [text_item("system", asked.instructions)]
            self._watch(request, asked, [*opening, *items], "", token_ids, new_reader)

    def _watch(
        self, request: Request, asked: ChatRequest | SampledRequest, items: list[Item], beginning: str,
        token_ids: list[int], new_reader: NewReader,
    ) -> None:  # fmt: skip
        repository, exchange = self._repository, exchange_of(request.scope)
        options = asked.told_options(repository.service.shaping.habits.template)
        told: dict[str, Any] = {"told_tools": asked.told_tools, "told_options": options}
        about: dict[str, Any] = {name: value for name, value in told.items() if value}
        about |= {"model": asked.model, "created_at": int(time.time()), "temperature": asked.temperature}
        about |= {"top_p": asked.top_p, "instructions": None, "metadata": {}, "error": None}
        step = partial(
            Step, repository.owner_of_agent(request, asked), session_named(request.headers.get), items, beginning,
            token_ids, new_reader, about=about,
        )  # fmt: skip

        def end() -> None:
            if isinstance(exchange.replies, Replies):
                repository.finish(self._store(step(replies=exchange.replies)))

        exchange.at_end.append(end)

    async def _store(self, step: Step) -> None:
        generation = step.replies.generations[0]
        try:
            while not generation.is_finished:  # The client has gone away, and the step in progress ends the generation.
                await asyncio.sleep(_PAUSE_SECONDS)
            if generation.error is not None:
                return
            async with self._turn:
                if not await self._add(step, generation):
                    self._known.clear()  # The session or node that the request continues was deleted meanwhile.
                    await self._add(step, generation)
        except Exception:
            if self._repository.service.is_open:  # A server that is stopping stores no more requests.
                log.exception("a step of an agent could not be stored")

    async def _add(self, step: Step, generation: Generation) -> bool:
        """Store a step. Return False if the node that it continues was deleted."""
        store, ask = self._repository.store, self._repository.ask
        start = hashlib.sha256(repr((step.owner, step.name)).encode()).digest()
        groups = groups_of(step.items)
        digests = digests_of(start, groups)
        found = await self._find(step, start, digests, [role_of(group[0]) for group in groups])
        rest = [item for group in groups[found.n_known :] for item in group]
        nodes = make_nodes(found.session, found.node, rest)
        path = [] if found.node is None else await ask(store.path, found.node)
        nodes = await self._repository.service.texts.run(
            sum(len(str(item)) for item in rest),
            lambda texts: count_nodes(texts, len(step.token_ids), sum(node.n_tokens for node in path), nodes),
        )
        reply = await self._reply_of(step, generation, found.session, nodes, path)
        nodes.append(reply)
        if found.is_new:
            session = StoredSession(found.session, step.owner, make_title(step.items), head=reply.id, is_implicit=True)
            await ask(store.add_session, session, nodes)
        elif not await ask(store.add_nodes, found.session, nodes, reply.id):
            return False
        digests.append(digests_of(digests[-1] if digests else start, [reply.items])[0])
        for digest, node in zip(digests[found.n_known :], nodes, strict=True):
            self._know(digest, found.session, node.id)
        return True

    async def _find(self, step: Step, start: bytes, digests: list[bytes], roles: list[str]) -> Found:
        """Return where a history continues.

        A history without a session's name continues a session only after one of the session's replies.
        """
        store, ask = self._repository.store, self._repository.ask
        session_id = new_id("sess")
        if step.name is not None:
            session_id = f"sess_{start.hex()[:32]}"
            if not any(digest in self._known for digest in digests):
                if await ask(store.session, step.owner, session_id) is None:
                    return Found(session_id, is_new=True)
                for digest, node_id in digests_of_tree(start, await ask(store.tree, session_id)).items():
                    self._know(digest, session_id, node_id)
        for n_known in range(len(digests), 0, -1):
            known = self._known.get(digests[n_known - 1])
            if known is not None and (step.name is not None or "assistant" in roles[:n_known]):
                self._known.move_to_end(digests[n_known - 1])
                return Found(*known, n_known)
        return Found(session_id, is_new=step.name is None)

    async def _reply_of(
        self, step: Step, generation: Generation, session_id: str, nodes: list[Node], path: list[Node]
    ) -> Node:
        """Return the node of a reply, with its token ids if they stand for exactly its text."""
        store, is_whole = self._repository.store, generation.finish_reason == "stop"
        items = items_of_reply(read_whole(step.new_reader(), generation.text), step.beginning)
        why = "cancelled" if generation.finish_reason == "cancelled" else "max_output_tokens"
        about = step.about | {
            "usage": usage_of(dict(step.replies.usage())),
            "incomplete_details": None if is_whole else {"reason": why},
        }
        tokens = np.array([*step.token_ids, *generation.token_ids], np.int64)
        base = next((node for node in reversed(path) if node.is_reply and node.own_tokens is not None), None)
        n_kept = 0
        if base is not None:
            n_kept = common_prefix(await self._repository.ask(store.tokens, base.id), tokens)
        parent = nodes[-1].id if nodes else path[-1].id if path else None
        node = Node(
            new_id("resp"), session_id, parent, "assistant", items, "completed" if is_whole else "incomplete", about,
            base.id if n_kept and base is not None else None, n_kept, len(step.token_ids),
            len(generation.token_ids), tokens[n_kept:],
        )  # fmt: skip
        # A stop string may have cut the text inside of a token.
        return node if generation.stopped_by is None else without_tokens(node)

    def _know(self, digest: bytes, session_id: str, node_id: str) -> None:
        self._known[digest] = session_id, node_id
        self._known.move_to_end(digest)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
