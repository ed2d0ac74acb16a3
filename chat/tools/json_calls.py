"""Reads and constrains calls that are written as JSON objects: {"name": ..., "arguments": {...}}, between marks.

Granite 4, Falcon-H1 and Qwen3-Next write one object between <tool_call> and </tool_call>; Jamba writes a list between
<tool_calls> and </tool_calls>, Nemotron-H a list between <TOOLCALL> and </TOOLCALL>, and Mistral Nemo a list after
[TOOL_CALLS]. Llama 3 writes one object and nothing else. Command R calls the fields "tool_name" and "parameters", and
Apertus writes {name: arguments}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridmem.chat.tools.calls import Block, CallPart, Literals, Tool, parse_json
from hybridmem.chat.tools.example import NAME, Example
from hybridmem.chat.tools.frames import FramedCalls
from hybridmem.chat.tools.tool_schemas import arguments_rule

_NAMES, _ARGUMENTS, _IDS = ("name", "tool_name"), ("arguments", "parameters"), ("id", "tool_call_id")
_OTHERS = ("type", "function", *_IDS)
_KEY = re.compile(r'\s*("(?:[^"\\]|\\.)*")\s*:\s*(?=\S)')
_KEY_BEGUN = re.compile(r'"(?:[^"\\]|\\.)*(?:\\|"\s*(?::\s*)?)?', re.DOTALL)
_SCALAR = re.compile(r"[^\s,\]}]+(?=[\s,\]}])")
_BETWEEN = " \n\r\t,;"


@dataclass(frozen=True)
class JsonCalls(FramedCalls):
    """Defines the format in which a block holds objects, or a list of objects.

    Attributes:
        frame: the texts around the objects.
        name_key: the key of the function's name. Empty: the name is itself the key of the arguments.
        arguments_key: the key of the arguments.
        id_key: the key of the call's id. Empty: calls have no ids.
        is_id_first: whether the id comes before the name.
        is_bare: whether a call without a mark may be the whole reply.
    """

    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    is_id_first: bool = False
    is_bare: bool = False
    other_marks: tuple[str, ...] = ()

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.frame.mark, *self.other_marks) if mark)

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.frame.texts, *self.other_marks)

    def open(self, tools: Sequence[Tool]) -> Block:
        return JsonBlock(self, tools)

    def rules_of(self, tools: Mapping[str, Tool], literals: Literals) -> list[str]:
        call_id = ['call_id: "\\"" /[A-Za-z0-9]{9}/ "\\""'] if self.id_key else []
        return [*(f"{name}: {self._body(tool)}" for name, tool in tools.items()), *call_id]

    def _body(self, tool: Tool) -> str:
        """Return an expression for an object that calls one function."""
        before = json.dumps(tool.name) if not self.name_key else f"{json.dumps(self.name_key)}: {json.dumps(tool.name)}"
        if self.name_key:
            before += f", {json.dumps(self.arguments_key)}"
        opening, closing = json.dumps(f"{{{before}: "), json.dumps("}")
        key = json.dumps(self.id_key)
        if self.id_key and self.is_id_first:
            opening = f"{json.dumps(f'{{{key}: ')} call_id {json.dumps(f', {before}: ')}"
        elif self.id_key:
            closing = f"{json.dumps(f', {key}: ')} call_id {closing}"
        return f"{opening} {arguments_rule(tool)} {closing}"


def infer_json_calls(example: Example) -> JsonCalls | None:
    """Return the format of the calls in an example. None: they are not JSON objects."""
    spans, found, at = list[tuple[int, int]](), list[dict[str, Any]](), 0
    while (at := example.text.find("{", at)) >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(example.text, at)
        except ValueError:
            at += 1
            continue
        if isinstance(value, dict) and (NAME in value or NAME in value.values()):
            spans.append((at, end))
            found.append(value)
            at = end
        at += 1
    if len(spans) != example.n_calls:
        return None
    call, frame = found[0], example.frame(spans)
    keys = list(call)
    if NAME in call:
        return JsonCalls(frame, name_key="", is_bare=not frame.mark)
    name_key = keys[list(call.values()).index(NAME)]
    arguments_key = next((key for key in keys if isinstance(call[key], dict | str) and key in _ARGUMENTS), "")
    id_key = next((key for key in keys if key in _IDS), "")
    if name_key not in _NAMES or not arguments_key:
        return None
    is_first = bool(id_key) and keys.index(id_key) < keys.index(name_key)
    return JsonCalls(frame, name_key, arguments_key, id_key, is_id_first=is_first, is_bare=not frame.mark)


class JsonBlock:
    """Reads objects one after the other, and returns the arguments of each while they are written.

    The text that ends a block counts only outside of strings.
    """

    def __init__(self, calls: JsonCalls, tools: Sequence[Tool]) -> None:
        self._frame, self._is_bare = calls.frame, calls.is_bare and not calls.frame.mark
        self._tools = frozenset(tool.name for tool in tools)
        self._text = ""  # This text has not been read yet.
        self._index = 0
        self._object: _Object | None = None
        self._is_list = self._has_calls = False
        self.rest: str | None = None
        self.is_text = False

    def feed(self, text: str) -> list[CallPart]:
        self._text += text
        parts = list[CallPart]()
        while self.rest is None and not self.is_text:
            n_before = len(self._text)
            if self._object is None:
                self._pass_gap()
            else:
                parts += self._feed_object(self._object)
            if self._object is None and len(self._text) == n_before:
                break
            if self._object is not None and not self._text:
                break
        self._has_calls = self._has_calls or bool(parts)
        return parts

    def close(self) -> list[CallPart] | None:
        if self._object is not None and not self._object.has_begun:
            return [] if self._has_calls else None
        self.rest = self.rest or ""
        return [] if self._has_calls else None

    def _pass_gap(self) -> None:
        """Read the text around an object: white space, brackets and commas of a list, and the texts of the frame."""
        text = self._text.lstrip(_BETWEEN)
        if not text:
            return
        for mark in (self._frame.stop, self._frame.closing.strip(), self._frame.opening.strip()):
            if mark and text.startswith(mark):
                self._text = text[len(mark) :]
                if mark == self._frame.stop:
                    self._end()
                return
            if mark and mark.startswith(text):
                return  # More text is needed to decide.
        if text[0] == "[" and not self._is_list and self._index == 0:
            self._is_list, self._text = True, text[1:]
        elif text[0] == "]" and self._is_list:
            self._is_list, self._text = False, text[1:]
            if not self._frame.stop:
                self._end()
        elif text[0] == "{":
            self._object, self._text = _Object(self._index, self._tools, is_known=self._is_bare), text
        elif not self._has_calls:
            self.is_text = True
        elif not self._frame.stop:
            self._text = text
            self._end()
        elif self._frame.stop in text:  # Something else stands after the last object, or in it.
            self._text = text.partition(self._frame.stop)[2]
            self._end()

    def _end(self) -> None:
        if self._has_calls or self._index:
            self.rest = self._text
        else:
            self.is_text = True

    def _feed_object(self, found: _Object) -> list[CallPart]:
        parts = found.feed(self._text)
        self._text = ""
        self._has_calls = self._has_calls or bool(parts)
        if found.is_broken:
            self._text, self._object = found.rest, None
            self._index += bool(found.has_begun)
            self.is_text = not self._has_calls
        elif found.is_closed:
            self._text, self._object = found.rest, None
            self._index += bool(found.has_begun)
        return parts


class _Object:
    """Reads one call. Its fields may come in any order, and there may be other fields.

    Attributes:
        has_begun: whether its name was returned.
        is_closed: whether it has ended. `rest` is the text after it then.
        is_broken: whether it is no call.
    """

    def __init__(self, index: int, tools: frozenset[str], *, is_known: bool) -> None:
        self.has_begun = self.is_closed = self.is_broken = False
        self.rest = ""
        self._index, self._tools, self._is_known = index, tools, is_known
        self._text, self._is_open = "", False
        self._fields: dict[str, Any] = {}
        self._nesting: Nesting | None = None  # This finds the end of the arguments that are being read.

    def feed(self, text: str) -> list[CallPart]:
        self._text += text
        parts = list[CallPart]()
        while not (self.is_closed or self.is_broken):
            n_before = len(self._text)
            parts += self._read_arguments(self._nesting) if self._nesting is not None else self._read_member()
            if len(self._text) == n_before:
                break
        if self.is_closed or self.is_broken:
            self.rest, self._text = self._text, ""
        return parts

    def _read_arguments(self, nesting: Nesting) -> list[CallPart]:
        n = nesting.count_inside(self._text)
        written, self._text = self._text[:n], self._text[n:]
        if nesting.is_closed:
            self._nesting = None
        return [CallPart(self._index, arguments=written)] if written else []

    def _read_member(self) -> list[CallPart]:
        text = self._text.lstrip(_BETWEEN)
        if not self._is_open and text:
            self._is_open, self._text = True, text[1:]
            return []
        if text.startswith("}"):
            self.is_closed, self._text = True, text[1:]
            return self._finish()
        key = _KEY.match(text)
        if key is None:
            self.is_broken = bool(text) and not _KEY_BEGUN.fullmatch(text)
            return []
        name = name_in(key[1])
        if self._is_known and name not in (*_NAMES, *_ARGUMENTS, *_OTHERS):
            self.is_broken = True
            return []
        if text[key.end()] == "{" and (told := self._name_before(name)) is not None:
            self._text, self._nesting = text[key.end() :], Nesting()
            return [self._begin(told)]
        end = end_of_value(text, key.end())
        if end is None:
            return []
        self._text = text[end:]
        try:
            self._fields[name] = parse_json(text[key.end() : end])
        except ValueError:
            self._fields[name] = name_in(text[key.end() : end]) if name in _NAMES else None
        return []

    def _name_before(self, key: str) -> str | None:
        """Return the function's name if this key's value is the arguments and can be returned while it is written."""
        name = next((self._fields[each] for each in _NAMES if isinstance(self._fields.get(each), str)), None)
        if key in _ARGUMENTS and name is not None and not self.has_begun:
            return name if not self._is_known or name in self._tools else None
        return key if key in self._tools and key not in _OTHERS and not self._fields else None

    def _begin(self, name: str) -> CallPart:
        self.has_begun = True
        call_id = next((self._fields[each] for each in _IDS if isinstance(self._fields.get(each), str)), "")
        return CallPart(self._index, name, id=call_id)

    def _finish(self) -> list[CallPart]:
        """Return a call whose fields did not come in the usual order, such as arguments before the name."""
        if self.has_begun:
            return []
        inner = self._fields.get("function")
        fields = inner if isinstance(inner, dict) else self._fields
        call = call_of(fields)
        if call is None or (self._is_known and call[0] not in self._tools):
            self.is_broken = True
            return []
        begun = self._begin(call[0])
        return [CallPart(begun.index, begun.name, call[1], begun.id)]


def call_of(value: object) -> tuple[str, str] | None:
    """Return the name and the arguments, as JSON, of a call that was read. None: this is not a call."""
    fields = value if isinstance(value, dict) else {}
    name = next((fields[key] for key in _NAMES if isinstance(fields.get(key), str)), None)
    if name is None:
        return None
    arguments: Any = next((fields[key] for key in _ARGUMENTS if key in fields), {})
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def name_in(quoted: str) -> str:
    """Return the name in a JSON string. If the model wrote an invalid escape, return the text unchanged."""
    try:
        return str(parse_json(quoted))
    except ValueError:
        return quoted.strip('"')


def end_of_value(text: str, start: int) -> int | None:
    """Return the position at which the JSON value that begins at `start` ends. None: the value is not complete."""
    if text[start] in '{["':
        nesting = Nesting()
        n = nesting.count_inside(text[start:])
        return start + n if nesting.is_closed else None
    found = _SCALAR.match(text, start)
    return found.end() if found else None


class Nesting:
    """Finds the end of an object, a list or a string of JSON whose text comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self.is_closed = False

    def count_inside(self, text: str) -> int:
        """Return how many characters of the text belong to the value."""
        if self.is_closed:
            return 0
        for i, sign in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
                continue
            if self._is_in_string:
                self._is_escaped = sign == "\\"
                self._is_in_string = sign != '"'
            elif sign == '"':
                self._is_in_string = True
            elif sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
            if self._depth == 0 and sign in '"}]' and not self._is_in_string:
                self.is_closed = True
                return i + 1
        return len(text)
