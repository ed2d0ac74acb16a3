"""Describes what is stored: sessions, and the nodes of their trees. Each node is one message."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Literal
from uuid import uuid4

import numpy as np

from hybridmem.memory import FormatError
from hybridmem.memory.blocks import EMPTY, Int64s

Role = Literal["system", "user", "assistant", "tool"]
Item = dict[str, Any]
"""An item of OpenAI's Responses: a message, a call of a function, or the function's result."""


def new_id(kind: str) -> str:
    """Return an id that cannot be guessed, such as "resp_" and 32 hexadecimal digits."""
    return f"{kind}_{uuid4().hex}"


class Ids:
    """Draws the ids of a reply. With a seed, they are the same whenever the reply is made again.

    Args:
        seed: a seed that nobody can guess. None: draw new ids.
    """

    def __init__(self, seed: str | None = None) -> None:
        self._seed = seed
        self._n_drawn = Counter[str]()

    def __call__(self, kind: str) -> str:
        """Return the next id of a kind, such as "resp"."""
        if self._seed is None:
            return new_id(kind)
        self._n_drawn[kind] += 1
        name = f"{self._seed}/{kind}/{self._n_drawn[kind]}"
        return f"{kind}_{sha256(name.encode()).hexdigest()[:32]}"


OWNER_BYTES = 32
"""An owner begins with so many bytes that say whose sessions these are. The owner of cached prefixes follows."""


def prefix_owner(owner: bytes) -> bytes:
    """Return the owner of the prefixes of a session."""
    return owner[OWNER_BYTES:]


@dataclass(frozen=True)
class StoredSession:
    """Describes a session, which is a tree of messages. One path of it is current.

    Attributes:
        owner: the client who may read and change it, and whose prefixes it uses; see `prefix_owner`. Nobody else learns
            that it exists.
        instructions: the first message of its prompts, if a request gives none.
        metadata: the metadata of a conversation.
        head: the last node of the current path. None: there is no node.
        is_implicit: whether a response created the session. If so, it is deleted with its last node.
        created_at, used_at: when it was made and last used, in unix seconds.
    """

    id: str
    owner: bytes
    title: str = ""
    instructions: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    head: str | None = None
    is_implicit: bool = False
    created_at: float = field(default_factory=time.time)
    used_at: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Node:
    """Describes one message: the items of a user's turn, or those of one reply.

    The token ids of a reply include those of its whole prompt. Only the difference from an earlier reply on its path is
    stored: the first `n_kept` ids are those of `base`, and `own_tokens` follow.

    Attributes:
        parent: the node before this one. None for the first message of a session.
        status: "completed", "incomplete" or "deleted". A deleted reply is no longer a response, but stays in the
            history of others.
        about: the fields of a reply's response, except its output.
        base: the earlier reply whose first token ids begin this one. None: there is none.
        n_prompt: the number of token ids in a reply's prompt.
        n_tokens: how many token ids this message added to its path. It is an estimate until a prompt has contained the
            message.
        own_tokens: see above. None: no token ids are known, as for text that somebody has edited.
        n_bytes: the bytes of the whole node in the database.
    """

    id: str
    session: str
    parent: str | None
    role: Role
    items: list[Item]
    status: str = "completed"
    about: dict[str, Any] = field(default_factory=dict)
    base: str | None = None
    n_kept: int = 0
    n_prompt: int = 0
    n_tokens: int = 0
    own_tokens: Int64s | None = None
    created_at: float = field(default_factory=time.time)
    pinned_until: float | None = None
    n_bytes: int = 0

    @property
    def is_reply(self) -> bool:
        """Return whether the model has written the message. If so, it is a response, and its id begins with "resp_"."""
        return self.id.startswith("resp_")


def join_tokens(replies: list[Node]) -> Int64s:
    """Return the token ids of the last of these replies. Each of them is the base of the next one.

    Raises FormatError if one of them has no token ids, or if the first one has a base.
    """
    tokens = EMPTY
    for number, reply in enumerate(replies):
        if reply.own_tokens is None or (number == 0 and reply.base is not None):
            raise FormatError(f"the token ids of the reply {reply.id!r:.80} are not all stored")
        tokens = np.concatenate([tokens[: reply.n_kept], reply.own_tokens])
    return tokens


def each_tokens(nodes: Iterable[Node]) -> Iterator[tuple[Node, Int64s]]:
    """Yield the replies of a tree with known token ids, each with all of its ids.

    Args:
        nodes: the nodes, each after its parent. Token ids are held only while later replies need them.
    Raises FormatError if a reply begins with the token ids of one that has none.
    """
    nodes = list(nodes)
    needed, held = Counter(node.base for node in nodes if node.base is not None), dict[str, Int64s]()
    for node in nodes:
        if node.own_tokens is None:
            continue
        if node.base is not None and node.base not in held:
            raise FormatError(f"the token ids of the reply {node.id!r:.80} are not all stored")
        before = held[node.base][: node.n_kept] if node.base is not None else EMPTY
        tokens = np.concatenate([before, node.own_tokens])
        if node.base is not None:
            needed[node.base] -= 1
            if not needed[node.base]:
                del held[node.base]
        if needed[node.id]:
            held[node.id] = tokens
        yield node, tokens
