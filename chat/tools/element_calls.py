"""Reads and constrains calls whose arguments are XML elements, each named by its key.

MiniMax-M3 has such a format, shown here without its prefix:

<tool_call>
<invoke name="weather"><city>Paris</city><tags><item>a</item></tags></invoke>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridmem.chat.tools.calls import Block, CallPart, Literals, Tool
from hybridmem.chat.tools.example import ITEM, LIST_KEY, NAME, NUMBER, NUMBER_KEY, TEXT, TEXT_KEY, Example
from hybridmem.chat.tools.frames import FramedCalls
from hybridmem.chat.tools.schemas import allowed_by, value_of
from hybridmem.chat.tools.tool_schemas import properties_of, required_of
from hybridmem.chat.tools.value_rules import ValueRules, branches


@dataclass(frozen=True)
class ElementCalls(FramedCalls):
    """Defines the format.

    Attributes:
        frame: the texts around a call, up to the function's name.
        name_end: the text between the name and the first argument.
        prefix: the text before each < of an element.
        item: the element name of a list's items.
    """

    name_end: str
    prefix: str
    item: str

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.frame.texts, self.name_end, self.prefix)

    def open(self, tools: Sequence[Tool]) -> Block:
        return ElementBlock(self, tools)

    def rules_of(self, tools: Mapping[str, Tool], literals: Literals) -> list[str]:
        rules, writer = list[str](), _Writer(self, literals)
        for name, tool in tools.items():
            values = ValueRules(f"{name}v", tool.parameters, writer)
            members = {key: values.of(schema) for key, schema in properties_of(tool).items()}
            body = f"{json.dumps(tool.name)} {literals(self.name_end)} {writer.elements(members, required_of(tool))}"
            rules += [f"{name}: {body}", *values.rules]
        return [*rules, *writer.rules]


class _Writer:
    """Writes expressions for values.

    Each value includes the prefix of the mark that ends its element, because any text ends before that prefix.
    """

    def __init__(self, calls: ElementCalls, literals: Literals) -> None:
        self._calls, self._literals, self._prefix = calls, literals, literals(calls.prefix)
        self._texts: dict[int | None, str] = {}
        self.text(None)

    @property
    def rules(self) -> list[str]:
        return list(self._texts.values())

    def text(self, most: int | None) -> str:
        name = "element_text" if most is None else f"element_text{most}"
        text, how = self._literals.until(self._calls.prefix, most)
        self._texts[most] = f"{name}{how}: {text}"
        return name

    def word(self, text: str) -> str:
        return f"{json.dumps(text)} {self._prefix}"

    def scalar(self, rule: str) -> str:
        return f"{rule} {self._prefix}"

    def array(self, item: str, least: int, most: int | None) -> str:
        times = f"{{{least},{'' if most is None else most}}}"
        return f"({self._element(self._calls.item, item)}){times} {self._prefix}"

    def members(self, rules: Mapping[str, str], required: list[str]) -> str:
        return f"{self.elements(rules, required)} {self._prefix}"

    def anything(self) -> str:
        return "element_text"

    def elements(self, rules: Mapping[str, str], required: list[str]) -> str:
        """Return the elements of an object without what follows them."""
        parts = [f"({self._element(key, rule)})" + ("" if key in required else "?") for key, rule in rules.items()]
        return " ".join(parts)

    def _element(self, key: str, rule: str) -> str:
        return f"{self._literals(f'{self._calls.prefix}<{key}>')} {rule} {self._literals(f'</{key}>')}"


def infer_element_calls(example: Example) -> ElementCalls | None:
    """Return the format of the calls in an example. None: they are written in another way."""

    end = re.search(rf"{TEXT}(\S+?)</{TEXT_KEY}>", example.text)
    if end is None:
        return None
    prefix = re.escape(end[1])

    def element(key: str, value: str) -> str:
        return rf"{prefix}<{key}>{value}{prefix}</{key}>"

    listed = element(LIST_KEY, rf"{prefix}<(?P<item>\w+)>{ITEM}{prefix}</(?P=item)>")
    elements = element(TEXT_KEY, TEXT) + element(NUMBER_KEY, str(NUMBER)) + listed
    calls = list(re.finditer(rf"{NAME}([^\n]*?){elements}", example.text))
    if len(calls) != example.n_calls:
        return None
    return ElementCalls(example.frame([call.span() for call in calls]), calls[0][1], end[1], calls[0]["item"])


class ElementBlock:
    """Reads calls once a block is complete. A mark ends the block only where all its elements have ended."""

    def __init__(self, calls: ElementCalls, tools: Sequence[Tool]) -> None:
        self._calls, self._tools = calls, {tool.name: tool for tool in tools}
        opening = re.escape(calls.frame.opening.strip())
        closing = re.escape(calls.frame.closing.strip())
        self._opening = re.compile(rf"\s*{opening}([^\s<>\"]+){re.escape(calls.name_end.strip())}")
        self._closing = re.compile(rf"\s*{closing}")
        self._text = ""
        self._n_tried = 0  # No mark before this position ends the block.
        self.rest: str | None = None
        self.is_text = False

    def feed(self, text: str) -> list[CallPart]:
        self._text += text
        stop = self._calls.frame.stop
        while (end := self._text.find(stop, self._n_tried)) >= 0:
            self._n_tried = end + len(stop)
            calls = self._read(self._text[:end])
            if calls is not None:
                self.rest = self._text[self._n_tried :]
                return calls
        begun, wanted = "".join(self._text.split()), "".join(self._calls.frame.opening.split())
        self.is_text = not (begun.startswith(wanted) or wanted.startswith(begun))
        return []

    def close(self) -> list[CallPart] | None:
        """Read a block that was cut after its last call."""
        calls = self._read(self._text.rstrip())
        self.rest = "" if calls is not None else None
        return calls

    def _read(self, text: str) -> list[CallPart] | None:
        """Return the calls of a whole block. None: the block is not complete."""
        calls, at = list[CallPart](), 0
        while (head := self._opening.match(text, at)) is not None:
            tool = self._tools.get(head[1])
            try:
                arguments, at = _Elements(self._calls, text, tool.parameters if tool else {}).members(head.end(), {})
            except (ValueError, RecursionError):
                return None
            closing = self._closing.match(text, at)
            if closing is None:
                return None
            calls.append(CallPart(len(calls), head[1], json.dumps(arguments, ensure_ascii=False)))
            at = closing.end()
        return calls if calls and not text[at:].strip() else None


class _Elements:
    """Reads elements by the schema of a tool."""

    def __init__(self, calls: ElementCalls, text: str, root: dict[str, Any]) -> None:
        self._item, self._text, self._root = calls.item, text, root
        self._prefix = re.escape(calls.prefix)
        self._begin = re.compile(rf"\s*{self._prefix}<([^\s<>/]+)>")
        self._following = re.compile(rf"\s*{self._prefix}</?[^\s<>]+")

    def members(self, at: int, schema: object) -> tuple[dict[str, Any], int]:
        """Return the elements from a position on, by their names, and the position where they end.

        Raises ValueError.
        """
        schema = schema or self._root
        inner = [part.get("properties") for part in branches(schema, self._root)]
        properties = next((part for part in inner if isinstance(part, dict)), {})
        found: dict[str, Any] = {}
        while (begin := self._begin.match(self._text, at)) is not None:
            found[begin[1]], at = self._value(begin.end(), begin[1], properties.get(begin[1]))
        return found, at

    def _value(self, at: int, key: str, schema: object) -> tuple[Any, int]:
        types = allowed_by(schema, self._root).types
        inner = self._begin.match(self._text, at)
        if inner is not None and (types is None or types & {"array", "object"}):
            is_list = inner[1] == self._item if types is None or types >= {"array", "object"} else "array" in types
            value, at = self._items(at, schema) if is_list else self.members(at, schema or {"type": "object"})
            end = re.compile(rf"\s*{self._prefix}</{re.escape(key)}>").match(self._text, at)
            if end is None:
                raise ValueError("an element has no end")
            return value, end.end()
        for end in re.finditer(rf"{self._prefix}</{re.escape(key)}>", self._text[at:]):
            after = at + end.end()
            if self._following.match(self._text, after):  # Otherwise the mark is a part of the text.
                return self._scalar(self._text[at : at + end.start()], schema, types), after
        raise ValueError("an element has no end")

    def _scalar(self, text: str, schema: object, types: frozenset[str] | None) -> Any:
        if not text and types is not None and "string" not in types and types & {"array", "object"}:
            return [] if "array" in types else {}
        return value_of(text, schema, self._root)

    def _items(self, at: int, schema: object) -> tuple[list[Any], int]:
        inner = [part.get("items") for part in branches(schema, self._root)]
        item = next((part for part in inner if isinstance(part, dict)), None)
        found = []
        while (begin := self._begin.match(self._text, at)) is not None and begin[1] == self._item:
            value, at = self._value(begin.end(), self._item, item)
            found.append(value)
        return found, at
