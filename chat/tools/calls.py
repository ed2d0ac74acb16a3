"""Holds the tools of a request, and the calls that a reply makes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

ID, INDEX = "\N{SYMBOL FOR START OF TEXT}", "\N{SYMBOL FOR END OF TEXT}"
"""They stand for a call's id and for its number in the texts around calls."""
_VARIABLE = {ID: "/[A-Za-z0-9]{9}/", INDEX: "/[0-9]+/"}
NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}}
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

    Such values are numbers out of range (1e999), single halves of surrogate pairs, and values that are nested too
    deeply.
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
        is_strict: whether the client asks that arguments keep to the schema. Whenever calls are constrained, the
            arguments of all tools are.
    """

    name: str
    parameters: dict[str, Any] = field(default_factory=lambda: NO_ARGUMENTS)
    definition: dict[str, Any] = field(default_factory=dict)
    is_strict: bool = True


@dataclass(frozen=True)
class CallPart:
    """Holds the next part of a call, as it becomes known.

    Attributes:
        index: the number of the call in the reply.
        name: the function's name. Only the first part has it.
        arguments: the next piece of its arguments, in JSON.
        id: the id of the call. Only the first part has one. Readers of blocks leave it empty unless the model wrote
            one.
    """

    index: int
    name: str = ""
    arguments: str = ""
    id: str = ""


@dataclass(frozen=True)
class Part:
    """Holds a piece of a reply, as one of thoughts, content or a call."""

    content: str = ""
    reasoning: str = ""
    call: CallPart | None = None


class Block(Protocol):
    """Reads the text after a mark that begins calls."""

    @property
    def rest(self) -> str | None:
        """Return the text after the end of the block. None: the block has not ended."""
        ...

    @property
    def is_text(self) -> bool:
        """Return whether the block is certainly no call, so that all text that it was fed is ordinary text."""
        ...

    def feed(self, text: str) -> list[CallPart]:
        """Return the parts of calls that this text completes. Their `index` counts from 0 in the block."""
        ...

    def close(self) -> list[CallPart] | None:
        """Return the remaining parts at the end of the reply. None: the block holds no calls, and is ordinary text."""
        ...


class Literals:
    """Writes the texts of a call format as terms in Lark.

    Marks that are tokens of the vocabulary are written as tokens.

    Args:
        token_ids: name -> id, of all tokens that were added to the vocabulary. Grammars refer to tokens by their ids.
    """

    def __init__(self, token_ids: Mapping[str, int]) -> None:
        self._terms = {name: f"<[{i}]>" for name, i in token_ids.items() if name.strip()} | _VARIABLE
        self._names = re.compile("|".join(map(re.escape, sorted(self._terms, key=len, reverse=True))))

    def __call__(self, text: str) -> str:
        """Return the terms that match a text."""
        return " ".join(part if is_token else json.dumps(part) for part, is_token in self._parts(text))

    def until(self, text: str, most: int | None = None) -> tuple[str, str]:
        """Return a term for any text that ends with the given text, and the attributes of the term's rule.

        Args:
            most: the most characters before the given text. None: any number.
        """
        parts = self._parts(text)
        first = "" if not parts or parts[0][1] else _in_pattern(parts[0][0])
        after = " ".join(part if is_token else json.dumps(part) for part, is_token in parts[1 if first else 0 :])
        # Ordinary text has no special tokens, so it ends before one. If the text has no special tokens, it ends where
        # the text is complete.
        times = "*" if most is None else f"{{0,{most}}}"
        return f"/(.|\\n){times}{first}/ {after}".rstrip(), "" if after else "[lazy]"

    def pieces(self, text: str) -> tuple[int | str, ...]:
        """Return the tokens and the ordinary texts of which a text consists."""
        return tuple(int(part[2:-2]) if is_token else part for part, is_token in self._parts(text))

    def _parts(self, text: str) -> list[tuple[str, bool]]:
        """Split a text into tokens and the texts between them."""
        parts, at = list[tuple[str, bool]](), 0
        for found in self._names.finditer(text):
            parts += [(text[at : found.start()], False), (self._terms[found[0]], True)]
            at = found.end()
        return [part for part in [*parts, (text[at:], False)] if part[0]]


def _in_pattern(text: str) -> str:
    """Return a text as a part of a regular expression in Lark."""
    return "".join("\\n" if sign == "\n" else f"\\{sign}" if sign in "/.^$*+?()[]{}|\\" else sign for sign in text)


class CallFormat(Protocol):
    """Says how a family of models writes calls."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Return the texts that begin a block. The block gets the text after the first, and from the others on."""
        ...

    @property
    def begun_by(self) -> str:
        """Return the mark with which the text of the format's grammar begins. It is empty if there is none."""
        ...

    @property
    def has_blocks(self) -> bool:
        """Return whether one block may hold several calls."""
        ...

    @property
    def is_bare(self) -> bool:
        """Return whether a reply may also begin with a call, without a mark."""
        ...

    @property
    def literals(self) -> tuple[str, ...]:
        """Return the texts around calls and around their parts.

        Special tokens that occur in these texts must be shown.
        """
        ...

    def open(self, tools: Sequence[Tool]) -> Block:
        """Return the reader of a new block."""
        ...

    def rules(self, tools: Sequence[Tool], literals: Literals, *, is_parallel: bool) -> str:
        """Return Lark rules. Their rule `calls` matches one call of one of the tools, or several."""
        ...


def n_begun(text: str, mark: str) -> int:
    """Count the characters at the end of a text that may be the beginning of a mark."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
