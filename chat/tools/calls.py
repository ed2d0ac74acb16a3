"""Holds the tools of a request, and the calls that a reply makes."""

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
"""Objects and arrays may be nested this deep, as in the bodies of requests."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str) -> Any:
    """Parse JSON from a client or a model. Raises ValueError, also for what `check_json` refuses."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    check_json(value)
    return value


def check_json(value: object) -> None:
    """Raise ValueError if a value was read from JSON but cannot be written again.

    Such values are numbers out of range (1e999), halves of surrogate pairs, and values that are nested too deeply.
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
    """Describes a function that a model may call.

    Attributes:
        parameters: the JSON Schema of its arguments.
        definition: the form that chat templates know, {"type": "function", "function": {...}}.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=lambda: ANY_OBJECT)
    definition: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CallPart:
    """Holds the next part of a call, as it becomes known.

    Attributes:
        index: the number of the call in the reply.
        name: the function's name. Only the first part has it.
        arguments: the next piece of its arguments, in JSON.
    """

    index: int
    name: str = ""
    arguments: str = ""


class Block(Protocol):
    """Reads the text between two marks, where a reply writes calls."""

    def feed(self, text: str) -> list[CallPart]:
        """Return the parts of calls that this text completes. Their `index` counts from 0 in the block."""
        ...

    def close(self) -> list[CallPart] | None:
        """Return what is left at the end mark. None: the block holds no calls, and is text after all."""
        ...


class CallFormat(Protocol):
    """Says how a family of models writes calls.

    The marks around a block are `begin` and `end`. Both are empty if the whole reply is one block.
    """

    @property
    def begin(self) -> str: ...
    @property
    def end(self) -> str: ...

    def open(self, tools: Sequence[Tool]) -> Block:
        """Return the reader of a new block."""
        ...

    def rules(self, tools: Sequence[Tool], mark: Marks, *, is_parallel: bool) -> str:
        """Return Lark rules. Their rule `calls` matches one call of one of the tools, or several."""
        ...


class Marks(Protocol):
    def __call__(self, text: str) -> str:
        """Return a mark as a term in Lark, which is a special token or the text itself."""
        ...


def call_of(value: object) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON, of a call that was read. None: this is not a call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def repeated(rule: str, separator: str, *, is_parallel: bool) -> str:
    """Return an expression that matches a rule once, or several times with a separator between."""
    return f"{rule} ({json.dumps(separator)} {rule})*" if is_parallel else rule


def either(names: Sequence[str]) -> str:
    return " | ".join(names)
