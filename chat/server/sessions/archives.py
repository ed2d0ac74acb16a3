"""Writes a session as one JSON document, and reads documents that this or another server has written."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.schema import MOST_VALUES, Checked, Neutral
from hybridmem.chat.server.sessions.input import read_items
from hybridmem.chat.server.sessions.schema import Metadata, OwnedRequest, Title
from hybridmem.chat.server.sessions.session_repository import SessionRepository
from hybridmem.chat.server.tool_fields import Tools
from hybridmem.chat.stored.ancestors import Ancestors
from hybridmem.chat.stored.copying import copy_path
from hybridmem.chat.stored.database import is_same_model
from hybridmem.chat.stored.items import make_title, role_of
from hybridmem.chat.stored.nodes import Item, Node, StoredSession, new_id
from hybridmem.chat.stored.rows import without_tokens
from hybridmem.memory.sequences import plain_ids

FORMAT, VERSION = "hybrid-memory.session", 1
_MOST_NODES = 4096
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _About(BaseModel):
    """Holds those fields of an archived reply's response that the server uses again.

    The other fields are only shown.
    """

    model_config = ConfigDict(strict=True)
    instructions: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_output_tokens: int | None = Field(None, ge=1)
    tools: Tools = ()
    told_tools: list[dict[str, Any]] = Field(default_factory=list)
    told_options: dict[str, Any] = Field(default_factory=dict)
    previous_response_id: str | None = None
    incomplete_details: dict[str, Any] | None = None


def _check_about(value: dict[str, Any]) -> dict[str, Any]:
    """Refuse values that no request could have had, because a regenerated reply would copy them."""
    try:
        _About.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"its {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    return value


class ArchivedNode(Checked):
    """Holds a node of a document. The fields are those of `Node`."""

    id: Annotated[str, Field(max_length=64)]
    parent: str | None = None
    role: Literal["system", "user", "assistant", "tool"]
    items: Annotated[list[Item], BeforeValidator(read_items)]
    status: Literal["completed", "incomplete", "deleted"] = "completed"
    created_at: float = Field(0.0, ge=0, le=1e11)
    about: Annotated[dict[str, Any], AfterValidator(_check_about)] = Field(default_factory=dict)
    base: str | None = None
    n_kept: int = Field(0, ge=0)
    n_prompt: int = Field(0, ge=0)
    n_tokens: int = Field(0, ge=0, le=2**31)
    tokens: list[TokenId] | None = None


class Archive(OwnedRequest):
    """Holds a document, which is a session and its nodes. Each node comes after its parent."""

    neutral: ClassVar[Neutral] = {}
    most_values: ClassVar[int] = 8 * MOST_VALUES  # Each response has about forty keys for its sampling options.
    format: Literal["hybrid-memory.session"]
    version: Literal[1]
    model: str
    title: Title = ""
    instructions: str | None = None
    metadata: Metadata = Field(default_factory=dict)
    head: str | None = None
    nodes: Annotated[list[ArchivedNode], Field(max_length=_MOST_NODES)]


class Archives:
    """Exports and imports sessions."""

    def __init__(self, repository: SessionRepository) -> None:
        self._repository = repository

    async def save(self, request: Request, session_id: str) -> Response:
        session = await self._repository.session(self._repository.owner_of(request), session_id)
        nodes = await self._repository.ask(self._repository.store.tree, session.id)
        about = {"format": FORMAT, "version": VERSION, "model": self._repository.store.model, "title": session.title}
        about |= {"instructions": session.instructions, "metadata": session.metadata, "head": session.head}
        return JSONResponse(about | {"nodes": [_as_json(node) for node in nodes]})

    async def load(self, request: Request) -> Response:
        """Store a document as a new session, with new ids. It belongs to the client that sends it."""
        asked, owner = await self._repository.read(request, Archive)
        read = [self._read(node) for node in asked.nodes]
        # Token ids of another model would mean nothing here.
        if not is_same_model(asked.model, self._repository.store.model):
            read = [without_tokens(node) for node in read]
        session_id = new_id("sess")
        _check(read, asked.head, self._repository.service.engine.memory.spec.vocab_size)
        nodes = copy_path(session_id, read)
        heads = {old.id: new.id for old, new in zip(read, nodes, strict=True)}
        title = asked.title or make_title(item for node in read for item in node.items)
        session = StoredSession(
            session_id, owner, title, asked.instructions, asked.metadata, heads.get(asked.head or "")
        )
        await self._repository.ask(self._repository.store.add_session, session, nodes)
        about = {"id": session.id, "object": "session", "title": title, "head": session.head, "n_nodes": len(nodes)}
        return JSONResponse(about)

    def _read(self, node: ArchivedNode) -> Node:
        tokens = None if node.tokens is None else np.array(node.tokens, np.int64)
        return Node(
            node.id, "", node.parent, node.role, node.items, node.status, node.about, node.base, node.n_kept,
            node.n_prompt, node.n_tokens, tokens, node.created_at or self._repository.store.now(),
        )  # fmt: skip


def _as_json(node: Node) -> dict[str, Any]:
    names = ("id", "parent", "role", "items", "status", "created_at", "about", "base", "n_kept", "n_prompt", "n_tokens")
    tokens = None if node.own_tokens is None else node.own_tokens.tolist()
    return {name: getattr(node, name) for name in names} | {"tokens": tokens}


def _check(nodes: list[Node], head: str | None, vocab_size: int) -> None:
    """Raise ApiError 400 for a document that contradicts itself."""
    above, lengths = Ancestors(), dict[str, int]()
    for number, node in enumerate(nodes):
        wrong = _find_fault(node, above, lengths, vocab_size)
        if wrong:
            message = f"Invalid 'nodes[{number}]': {wrong}."
            raise ApiError(400, message, param=f"nodes[{number}]", code="invalid_value")
        above.add(node.id, node.parent)
        if node.own_tokens is not None:
            lengths[node.id] = node.n_kept + len(node.own_tokens)
    if head is not None and head not in above:
        raise ApiError(400, "Invalid 'head': it is none of the nodes.", param="head", code="invalid_value")


def _find_fault(node: Node, above: Ancestors, lengths: dict[str, int], vocab_size: int) -> str:
    """Return what is wrong with a node, or an empty text. Its ancestors have already been checked."""
    if node.id in above or not node.id.startswith(("turn_", "resp_")):
        return "its id is there twice, or begins with neither 'turn_' nor 'resp_'"
    if node.parent is not None and node.parent not in above:
        return "its parent does not stand before it"
    if any(role_of(item) != node.role for item in node.items) or (node.is_reply and node.role != "assistant"):
        return "its items are of another role"
    if node.own_tokens is None:
        is_bare = node.base is None and not (node.n_kept or node.n_prompt)
        return "" if is_bare else "it has no tokens, and says where they begin"
    if max(plain_ids(node.own_tokens.tolist()), default=0) >= vocab_size:
        return f"its token ids are not 0 ... {vocab_size - 1}"
    n_base = 0 if node.base is None else lengths.get(node.base, -1)
    if node.role != "assistant" or (node.base is not None and not above.has(node.base, over=node.parent)):
        return "its tokens go on from a node that is not above it"
    if node.n_kept > n_base or not 0 < node.n_prompt <= node.n_kept + len(node.own_tokens):
        return "its numbers of tokens contradict each other"
    return ""
