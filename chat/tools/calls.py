"""Holds the tools of a request, and the calls of them that a reply makes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

ANY_OBJECT: dict[str, Any] = {"type": "object"}
_MOST_DEPTH = 200
"""Objects and arrays inside of each other: as many as bodies of requests may have."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str) -> Any:
    """Parse JSON that a client or a model has written. Raises ValueError, also for what `check_json` refuses."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_json(value)
    return value


def check_json(value: object) -> None:
    """Raise ValueError for what was read as JSON and cannot be written again.

    That is a number out of range (1e999), half of a surrogate pair, and what is nested too deeply.
    """
    level = [value]
    for _ in range(_MOST_DEPTH):
        if any(isinstance(each, float) and not math.isfinite(each) for each in level):
            raise ValueError("it has a number that is out of range")
        if any(isinstance(each, str) and not _is_unicode(each) for each in level):
            raise ValueError("it has half of a surrogate pair")
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return
    raise ValueError("it is nested too deeply")


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return chain(value, value.values())
    return value if isinstance(value, list) else ()


def _is_unicode(text: str) -> bool:
    return text.isascii() or not _SURROGATE.search(text)


@dataclass(frozen=True)
class Tool:
    """Is a function that a model may call.

    Attributes:
        parameters: JSON Schema of its arguments.
        definition: as chat templates know it, {"type": "function", "function": {...}}.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=lambda: ANY_OBJECT)
    definition: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CallPart:
    """Is a part of a call, as it becomes known.

    Attributes:
        index: of the call among those of the reply.
        name: in its first part.
        arguments: what follows of its arguments, a piece of JSON.
    """

    index: int
    name: str = ""
    arguments: str = ""


class Block(Protocol):
    """Reads the text between two marks, in which a reply writes calls."""

    def feed(self, text: str) -> list[CallPart]:
        """Return the parts of calls that this text completes; their `index` counts from 0 in the block."""
        ...

    def close(self) -> list[CallPart] | None:
        """Return what is left at the end mark; None if the block holds no calls, and is text after all."""
        ...


class CallFormat(Protocol):
    """Says how a family of models writes calls.

    The marks around a block are `begin` and `end`; both are empty if the whole reply is one.
    """

    @property
    def begin(self) -> str: ...
    @property
    def end(self) -> str: ...

    def open(self, tools: Sequence[Tool]) -> Block:
        """Return the reader of a new block."""
        ...

    def rules(self, tools: Sequence[Tool], mark: Marks, *, is_parallel: bool) -> str:
        """Return Lark rules of which `calls` writes one call of one of the tools, or several."""
        ...


class Marks(Protocol):
    def __call__(self, text: str) -> str:
        """Return a mark as a term in Lark: a special token, or the text itself."""
        ...


def call_of(value: object) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON, of a call that was read; None if this is no call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def repeated(rule: str, separator: str, *, is_parallel: bool) -> str:
    """Return an expression of one use of a rule, or of several with a text between them."""
    return f"{rule} ({json.dumps(separator)} {rule})*" if is_parallel else rule


def either(names: Sequence[str]) -> str:
    return " | ".join(names)
