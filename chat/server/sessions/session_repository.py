"""Gives all routes of stored sessions access to the sessions of each owner. The store runs in a separate thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from starlette.requests import Request

from hybridmem.chat.server.errors import ApiError, clip
from hybridmem.chat.server.owners import Sharing
from hybridmem.chat.server.schema import MOST_VALUES, read_request
from hybridmem.chat.server.service import Service
from hybridmem.chat.server.sessions.input import REFERENCE
from hybridmem.chat.server.sessions.schema import OwnedRequest, SampledRequest
from hybridmem.chat.stored.nodes import Item, Node, StoredSession, each_tokens, new_id, prefix_owner
from hybridmem.chat.stored.store import SessionStore
from hybridmem.memory.blocks import Int64s
from hybridmem.memory.prefix import PrefixCache

T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=OwnedRequest | SampledRequest)


_NAMED = ("prompt_cache_key", "safety_identifier", "cache_salt")


class SessionRepository:
    """Calls the store in a thread of its own, and finds sessions and nodes by their owners.

    Every owner sees only their own sessions. The sessions of others are answered as if they did not exist.

    Args:
        service: the service that generates replies.
    """

    def __init__(self, service: Service, store: SessionStore) -> None:
        self.service = service
        self.store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sessions")
        self._unfinished: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        """Finish the store's work, and close it."""
        self._thread.submit(self.store.close)
        self._thread.shutdown()

    async def ask(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call the store, after all earlier calls have ended."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*arguments, **options))

    def finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Finish work for which nobody waits any more."""
        task = asyncio.get_running_loop().create_task(work)
        self._unfinished.add(task)
        task.add_done_callback(self._unfinished.discard)

    # The methods below find out who asks, and for what.

    async def read(self, request: Request, model: type[ModelT]) -> tuple[ModelT, bytes]:
        """Read a request. Return its fields and its owner. Raises ApiError 400."""
        body = await request.body() or b"{}"
        # Reading such a body takes a while. Another thread does it, so that others are answered.
        if model.most_values > MOST_VALUES:
            asked = await asyncio.to_thread(read_request, model, body)
        else:
            with self.service.sight.collecting():
                asked = read_request(model, body)
        if isinstance(asked, SampledRequest) and asked.model:
            self.service.check_model(asked.model)
        return asked, self._owner(request, asked)

    def owner_of(self, request: Request) -> bytes:
        """Return the owner of a request without a body.

        Its query may name `prompt_cache_key`, `safety_identifier` and `cache_salt`.
        """
        return self._owner(request, OwnedRequest())

    def _owner(self, request: Request, asked: OwnedRequest | SampledRequest) -> bytes:
        """Return the owner of a request's sessions, joined with the owner of its prefixes."""
        query = request.query_params
        named = {name: given for name in _NAMED if (given := getattr(asked, name)) is None and name in query}
        asked = asked.model_copy(update={name: query[name] for name in named})
        header = request.headers.get
        owners = self.service.owners
        owner = owners.of_sessions(header, asked.prompt_cache_key, asked.safety_identifier)
        return owner + owners.of_prefixes(header, asked)

    def owner_of_agent(self, request: Request, asked: Sharing) -> bytes:
        """Return the owner of the sessions recorded from an agent's requests.

        Hints separate owners only if the server isolates them.
        """
        owners, header = self.service.owners, request.headers.get
        cache_key = asked.prompt_cache_key if owners.isolates else None
        return owners.of_sessions(header, cache_key, None) + owners.of_prefixes(header, asked)

    async def session(self, owner: bytes, session_id: str) -> StoredSession:
        """Return a session. Raises ApiError 404."""
        session = await self.ask(self.store.session, owner, session_id)
        if session is None:
            what = "conversation" if session_id.startswith("conv_") else "session"
            raise ApiError(404, f"There is no {what} {clip(session_id)!r}.", code="not_found")
        return session

    async def node(self, owner: bytes, node_id: str, session: StoredSession | None = None) -> Node:
        """Return a node; if a session is given, the node must belong to it. Raises ApiError 404."""
        node = await self.ask(self.store.node, owner, node_id)
        if node is None or (session is not None and node.session != session.id):
            raise ApiError(404, f"There is no node {clip(node_id)!r}.", param="node", code="not_found")
        return node

    async def reply(self, owner: bytes, response_id: str, param: str | None = None) -> Node:
        """Return the node of a response. Raises ApiError 404."""
        node = await self.ask(self.store.node, owner, response_id)
        if node is None or not node.is_reply or node.status == "deleted":
            message = f"There is no response {clip(response_id)!r}."
            code = "previous_response_not_found" if param == "previous_response_id" else "not_found"
            raise ApiError(404, message, param=param, code=code)
        return node

    async def tokens_at(self, node: Node) -> Int64s | None:
        """Return the token ids up to the end of a node, or None if they are not known."""
        if node.own_tokens is not None:
            return await self.ask(self.store.tokens, node.id)
        tree = await self.ask(self.store.tree, node.session)
        reply = next((other for other in tree if other.parent == node.id and other.own_tokens is not None), None)
        return None if reply is None else (await self.ask(self.store.tokens, reply.id))[: reply.n_prompt]

    async def resolve(self, owner: bytes, items: list[Item]) -> list[Item]:
        """Return items in which copies of stored items replace the references. Raises ApiError 404."""
        resolved = list[Item]()
        for item in items:
            found: Item | None = item
            if item["type"] == REFERENCE:
                found = await self.ask(self.store.item, owner, item["id"])
            if found is None:
                message = f"There is no item {clip(item['id'])!r}."
                raise ApiError(404, message, param="input", code="not_found")
            resolved.append(item if found is item else {**found, "id": new_id(found["id"].partition("_")[0])})
        return resolved

    # The methods below delete what is stored.

    async def delete_session(self, session: StoredSession) -> None:
        """Delete a session, and the checkpoints that only it uses."""
        tree = await self.ask(self.store.tree, session.id)
        await self.ask(self.store.delete_session, session.id)
        await self._forget(session.owner, tree, {node.id for node in tree})

    async def delete(self, owner: bytes, node: Node, how: Callable[[Node], list[Node]]) -> list[Node]:
        """Delete a node by the given method of the store, with the checkpoints that only it uses.

        Return the deleted nodes.
        """
        tree = await self.ask(self.store.tree, node.session)
        gone = await self.ask(how, node)
        await self._forget(owner, tree, {other.id for other in gone})
        return gone

    async def replace_items(self, owner: bytes, node: Node, items: list[Item]) -> None:
        """Change a message in place, and close the checkpoints that contain its old text."""
        tree = await self.ask(self.store.tree, node.session)
        await self.ask(self.store.replace_items, node.id, items)
        below = {node.id}
        for other in tree:
            below |= {other.id} if other.parent in below else set()
        await self._forget(owner, tree, below)

    async def _forget(self, owner: bytes, tree: list[Node], gone: set[str]) -> None:
        prefixes, lock = self.service.engine.prefixes, self.service.engine.lock
        if prefixes is not None and gone:
            await asyncio.to_thread(_forget, prefixes, lock, prefix_owner(owner), tree, gone)


def _forget(
    prefixes: PrefixCache, lock: AbstractContextManager[object], owner: bytes, tree: list[Node], gone: set[str]
) -> None:
    """Close the checkpoints of deleted nodes, except those that other nodes or pinned prompts share."""
    n_shared = dict[str, int]()
    for node, tokens in each_tokens(tree):
        if node.id in gone:
            n_shared[node.id] = min(node.n_kept, n_shared.get(node.base or "", node.n_kept))
            with lock:
                prefixes.forget(tokens, owner, behind=n_shared[node.id])
