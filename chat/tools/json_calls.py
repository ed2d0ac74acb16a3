"""Reads and constrains calls that are written as JSON: {"name": ..., "arguments": {...}}, between marks.

Granite 4, Falcon-H1 and Qwen3-Next write one object between <tool_call> and </tool_call>; Jamba a list between
<tool_calls> and </tool_calls>, Nemotron-H one between <TOOLCALL> and </TOOLCALL>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hybridmem.chat.sampling.grammar import json_rule
from hybridmem.chat.tools.calls import Block, CallPart, Marks, Tool, call_of, either, parse_json, repeated

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


@dataclass(frozen=True)
class JsonCalls:
    """Defines the format in which each block holds an object, or a list of objects.

    Attributes:
        is_list: whether a block holds a list.
        padding: the white space that models write inside of the marks.
    """

    begin: str
    end: str
    is_list: bool = False
    padding: str = ""

    def open(self, tools: Sequence[Tool]) -> Block:
        return JsonBlock()

    def rules(self, tools: Sequence[Tool], mark: Marks, *, is_parallel: bool) -> str:
        rules = [
            f"call{i}: {json.dumps(_before(tool))} {json_rule(tool.parameters)} {json.dumps('}')}"
            for i, tool in enumerate(tools)
        ]
        one = f"call: {either([f'call{i}' for i in range(len(tools))])}"
        opening, closing = f"{mark(self.begin)} ", f" {mark(self.end)}"
        if not self.begin:
            opening = closing = ""
        pad = f"{json.dumps(self.padding)} " if self.padding else ""
        pad_end = f" {json.dumps(self.padding)}" if self.padding else ""
        if self.is_list:
            listed = repeated("call", ", ", is_parallel=is_parallel)
            calls = f'calls: {opening}{pad}"[" {listed} "]"{pad_end}{closing}'
            return "\n".join([calls, one, *rules])
        block = f"block: {opening}{pad}call{pad_end}{closing}"
        return "\n".join([f"calls: {repeated('block', chr(10), is_parallel=is_parallel)}", block, one, *rules])


def _before(tool: Tool) -> str:
    return f'{{"name": {json.dumps(tool.name)}, "arguments": '


class JsonBlock:
    """Reads objects one after the other, and returns the arguments of each while they are written."""

    def __init__(self) -> None:
        self._text = ""  # This text has not been read yet.
        self._index = 0
        self._nesting: _Nesting | None = None  # This finds the end of the arguments that are being read.
        self._has_calls = False

    def feed(self, text: str) -> list[CallPart]:
        self._text += text
        parts = list[CallPart]()
        while True:
            if self._nesting is None:
                head = _HEAD.match(self._text.lstrip("[, \n\t\r"))
                if head is None:
                    return parts
                self._text = self._text.lstrip("[, \n\t\r")[head.end() :]
                parts.append(CallPart(self._index, _name_in(head[1])))
                self._nesting, self._has_calls = _Nesting(), True
            n = self._nesting.count_inside(self._text)
            if n:
                parts.append(CallPart(self._index, arguments=self._text[:n]))
            self._text = self._text[n:]
            if not self._nesting.is_closed:
                return parts
            end = self._text.find("}")
            if end < 0:
                return parts
            self._text, self._nesting = self._text[end + 1 :], None
            self._index += 1

    def close(self) -> list[CallPart] | None:
        """Read calls whose fields are not in the usual order, such as arguments before the name."""
        if self._has_calls:
            return []
        try:
            value = parse_json(self._text)
        except ValueError:
            return None
        calls = [call_of(item) for item in (value if isinstance(value, list) else [value])]
        if not calls or None in calls:
            return None
        return [CallPart(i, *call) for i, call in enumerate(calls) if call is not None]


def _name_in(quoted: str) -> str:
    """Return the name in a JSON string. If a model wrote an impossible escape, return the text as it stands."""
    try:
        return str(parse_json(quoted))
    except ValueError:
        return quoted[1:-1]


class _Nesting:
    """Finds the end of a JSON object whose text comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self.is_closed = False

    def count_inside(self, text: str) -> int:
        """Return how many characters of the text belong to the object."""
        if self.is_closed:
            return 0
        for i, sign in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_escaped = sign == "\\"
                self._is_in_string = sign != '"'
            elif sign == '"':
                self._is_in_string = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_closed = True
                    return i + 1
        return len(text)
