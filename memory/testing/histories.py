"""Defines histories: operations on named sequences, and the tokens that each sequence has after them."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Fed:
    """Holds what one step fed to a sequence.

    Attributes:
        tokens: the tokens that count.
        taken_back: the tokens after them that the step fed as well, but that were taken back later.
    """

    tokens: tuple[int, ...]
    taken_back: tuple[int, ...] = ()


Parts = tuple[Fed, ...]
"""The tokens of a sequence, as they were cut into steps."""


def head(parts: Parts, to: int) -> Parts:
    """Return the first `to` tokens, cut as they were.

    If only a part of a step remains, the rest of it counts as taken back.
    """
    found, start = list[Fed](), 0
    for part in parts:
        if start >= to:
            break
        kept = part.tokens[: to - start]
        found.append(part if kept == part.tokens else Fed(kept, part.tokens[len(kept) :] + part.taken_back))
        start += len(part.tokens)
    return tuple(found)


def joined(parts: Parts) -> tuple[int, ...]:
    """Return the tokens that count, joined over all steps."""
    return tuple(token for part in parts for token in part.tokens)


def length_of(parts: Parts) -> int:
    """Return how many tokens count in all steps."""
    return sum(len(part.tokens) for part in parts)


@dataclass(frozen=True)
class Open:
    """Opens an empty sequence."""

    name: str


@dataclass(frozen=True)
class Step:
    """Feeds tokens to several sequences at once.

    Attributes:
        fail_after: after how many layers the model raises an error. None: it raises none.
    """

    requests: tuple[tuple[str, tuple[int, ...]], ...]
    fail_after: int | None = None


@dataclass(frozen=True)
class Branch:
    """Feeds a tree of tokens to a sequence in one step, and keeps one path of it.

    Attributes:
        parents: for each token, the index of the token before it, or -1 for the sequence's end.
        path: the tokens that are kept, by their indices. It may be empty.
    """

    name: str
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    path: tuple[int, ...]

    def path_to(self, node: int) -> tuple[int, ...]:
        """Return the indices of the tokens on the way to this one, which is the last of them."""
        return (*(self.path_to(self.parents[node]) if self.parents[node] >= 0 else ()), node)

    def tokens_of(self, path: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.tokens[node] for node in path)


@dataclass(frozen=True)
class Rollback:
    """Takes the newest tokens back, or all tokens if there are fewer."""

    name: str
    n_tokens: int


@dataclass(frozen=True)
class Checkpoint:
    """Makes a checkpoint of a sequence, with a name of its own."""

    source: str
    name: str


@dataclass(frozen=True)
class ReturnTo:
    """Lets a sequence continue as it was when the checkpoint with this name was made."""

    name: str
    checkpoint: str


@dataclass(frozen=True)
class Fork:
    """Opens a sequence that continues from another one."""

    source: str
    name: str


@dataclass(frozen=True)
class Reorder:
    """Lets each first name continue from the sequence of the second name, all at once."""

    moves: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Reload:
    """Saves a sequence, closes it, and loads it from the file.

    With `anew`, all sequences are reloaded, into another memory.
    """

    name: str
    anew: bool = False


@dataclass(frozen=True)
class Close:
    """Forgets a sequence."""

    name: str


@dataclass(frozen=True)
class CloseAll:
    """Forgets every sequence and checkpoint. Then no bytes may be in use."""


@dataclass(frozen=True)
class Retell:
    """Feeds the text of a sequence to a new one, cut in another way, whose outputs must have the same bits.

    Attributes:
        n_tokens: how many tokens a step feeds.
    """

    name: str
    n_tokens: int


@dataclass(frozen=True)
class Misuse:
    """Makes a call that is invalid. The memory must refuse it, with any message, and change nothing.

    Attributes:
        how: "no tokens", "a negative token", "a token too large", "a position too large" or "a negative position".
    """

    name: str
    how: str


Operation = (
    Open
    | Step
    | Branch
    | Rollback
    | Checkpoint
    | ReturnTo
    | Fork
    | Reorder
    | Reload
    | Close
    | CloseAll
    | Retell
    | Misuse
)
History = tuple[Operation, ...]


def smaller(history: History) -> list[History]:
    """Return histories that do less. Those with the fewest operations come first."""
    n = len(history)
    found, size = [], n // 2
    while size:
        found += [history[:start] + history[start + size :] for start in range(0, n - size + 1, size)]
        size //= 2
    for i, operation in enumerate(history):
        found += [(*history[:i], less, *history[i + 1 :]) for less in _lesser(operation)]
    return found


def _lesser(operation: Operation) -> list[Operation]:
    if isinstance(operation, Rollback):
        return [replace(operation, n_tokens=n) for n in {1, operation.n_tokens // 2} if 0 < n < operation.n_tokens]
    if isinstance(operation, Branch):
        n = len(operation.tokens) - 1
        path = tuple(node for node in operation.path if node < n)
        return [Branch(operation.name, operation.tokens[:n], operation.parents[:n], path)] if n else []
    if not isinstance(operation, Step):
        return []
    requests = operation.requests
    fewer = [replace(operation, requests=requests[:i] + requests[i + 1 :]) for i in range(len(requests))]
    shorter: list[Operation] = [
        replace(operation, requests=(*requests[:i], (name, tokens[:n]), *requests[i + 1 :]))
        for i, (name, tokens) in enumerate(requests)
        for n in {1, len(tokens) // 2, len(tokens) - 1}
        if 0 < n < len(tokens)
    ]
    return [*(fewer if len(requests) > 1 else ()), *shorter]


def describe(history: History) -> str:
    """Return the history as text, with one line for each operation."""
    return "\n".join(f"    {i}. {operation!r}" for i, operation in enumerate(history))
