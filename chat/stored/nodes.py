"""Describes what is stored: sessions, and the nodes of their trees, each of them one message."""

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
from hybridmem.memory.blocks.arrays import EMPTY, Int64s

Role = Literal["system", "user", "assistant", "tool"]
Item = dict[str, Any]
"""An item in the words of OpenAI's Responses: a message, a call of a function, or what the function has returned."""


def new_id(kind: str) -> str:
    """Return an id that cannot be guessed, such as "resp_" and 32 hexadecimal digits."""
    return f"{kind}_{uuid4().hex}"


class Ids:
    """Draws the ids of a reply: new ones, or those of a seed, which are the same whenever the reply is made again.

    Args:
        seed: that nobody can guess.
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


@dataclass(frozen=True)
class StoredSession:
    """Describes a session: a tree of messages, one path of which is current.

    Attributes:
        owner: who may read and change it; nobody else learns that it exists.
        instructions: the first message of its prompts, for requests that give none.
        metadata: of a conversation.
        head: the last node of the path that is current; None where there is no node.
        is_implicit: a response began it, so it ends with its last node.
        created_at, used_at: unix seconds.
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

    The token ids of a reply are those of its whole prompt and its own. Only what differs from an earlier reply on its
    path is stored: the first `n_kept` ids are those of `base`, and `own_tokens` follow.

    Attributes:
        parent: the node before; None for the first message of a session.
        status: "completed", "incomplete", or "deleted": it is no response any more, and stays as history of others.
        about: of a reply: what its response says beside its output.
        base: the reply whose first token ids this one begins with; None for none.
        n_prompt: of a reply: the token ids of its prompt.
        n_tokens: token ids that this message added to its path. Estimated for messages that no prompt has had yet.
        own_tokens: see above; None where no token ids are known, as for text that somebody has edited.
        n_bytes: of all this in the database.
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
        """True if the model has written it: then it is a response, and its id begins with "resp_"."""
        return self.id.startswith("resp_")


def join_tokens(replies: list[Node]) -> Int64s:
    """Return the token ids of the last of these replies, each of which is the base of the next one.

    Raises FormatError if one of them has none, or the first one goes on from another.
    """
    tokens = EMPTY
    for number, reply in enumerate(replies):
        if reply.own_tokens is None or (number == 0 and reply.base is not None):
            raise FormatError(f"the token ids of the reply {reply.id!r:.80} are not all stored")
        tokens = np.concatenate([tokens[: reply.n_kept], reply.own_tokens])
    return tokens


def each_tokens(nodes: Iterable[Node]) -> Iterator[tuple[Node, Int64s]]:
    """Generate the replies of a tree whose token ids are known, each with all of them.

    Args:
        nodes: each behind its parent. No more token ids are held than later ones begin with.
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
