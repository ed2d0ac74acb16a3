"""Reads and constrains calls in the format of LFM2: a list of Python calls, such as [weather(city="Paris", days=3)].

Names of tools and arguments need not be identifiers of Python: get-weather($filter="a", class=1) is a call, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridmem.chat.tools.calls import Block, CallPart, Literals, Tool, parse_json
from hybridmem.chat.tools.example import ITEM, LIST_KEY, NAME, NUMBER, NUMBER_KEY, TEXT, TEXT_KEY, Example
from hybridmem.chat.tools.frames import Frame, FramedCalls
from hybridmem.chat.tools.json_calls import call_of
from hybridmem.chat.tools.schemas import literal_of
from hybridmem.chat.tools.tool_schemas import argument_rule, joined_members, properties_of, required_of

_NAME = re.compile(r"\s*([^\s()\[\]{}\"',=]+)\s*\(\s*")
_KEY = re.compile(r"\s*([^\s()\[\]{}\"',=]+|\"[^\"]*\"|'[^']*')\s*=\s*")
_SIGNS = re.compile(r"'''|\"\"\"|['\"()\[\]{},\\]")
_PAIRS = {"(": ")", "[": "]", "{": "}"}


LFM_FRAME = Frame("<|tool_call_start|>[", join=", ", end="]<|tool_call_end|>")


@dataclass(frozen=True)
class PythonCalls(FramedCalls):
    """Defines the format in which a block holds a list of calls in Python's syntax."""

    frame: Frame = LFM_FRAME

    @property
    def literals(self) -> tuple[str, ...]:
        return self.frame.texts

    def open(self, tools: Sequence[Tool]) -> Block:
        return PythonBlock(self.frame.stop, tools)

    def rules_of(self, tools: Mapping[str, Tool], literals: Literals) -> list[str]:
        return [rule for name, tool in tools.items() for rule in _rules_of(name, tool)]


def infer_python_calls(example: Example) -> PythonCalls | None:
    """Return the format of the calls in an example. None: they are not written as in Python."""
    quoted = [re.escape(repr(value)) for value in (TEXT, NUMBER, [ITEM])]
    keys = (TEXT_KEY, NUMBER_KEY, LIST_KEY)
    arguments = r",\s*".join(f"{key}={value}" for key, value in zip(keys, quoted, strict=True))
    calls = list(re.finditer(rf"{NAME}\({arguments}\)", example.text))
    if len(calls) != example.n_calls:
        return None
    return PythonCalls(example.frame([call.span() for call in calls]))


def _rules_of(call: str, tool: Tool) -> list[str]:
    """Return the rules of one function. Required arguments come first, in the order of the schema.

    Values are written as JSON. Strings, numbers and lists are written the same way in Python, and the reader also
    accepts true and null.
    """
    rules, terms = list[str](), dict[str, str]()
    for k, (name, schema) in enumerate(properties_of(tool).items()):
        terms[name] = f"{call}arg{k}"
        rules.append(f"{terms[name]}: {json.dumps(name + '=')} {argument_rule(tool, schema)}")
    arguments = joined_members(terms, required_of(tool), '", "')
    return [f'{call}: {json.dumps(tool.name + "(")} {arguments} ")"', *rules]


class PythonBlock:
    """Reads a list of calls once it is complete. The mark that ends the list counts only outside of strings."""

    def __init__(self, stop: str, tools: Sequence[Tool]) -> None:
        self._stop, self._tools = stop, {tool.name: tool for tool in tools}
        self._text = ""
        self._strings = _Scan()
        self.rest: str | None = None
        self.is_text = False

    def feed(self, text: str) -> list[CallPart]:
        self._text += text
        end = self._strings.find_outside(self._text, self._stop)
        if end is None:
            return []
        calls = self._read(self._text[:end])
        if calls is None:
            self.is_text = True
            return []
        self.rest = self._text[end + len(self._stop) :]
        return calls

    def close(self) -> list[CallPart] | None:
        """Read a list whose strings are not well-formed, or that was cut after its last call."""
        if self.rest is not None:
            return []
        for body, _, rest in (
            self._text.rpartition(self._stop),
            self._text.partition(self._stop),
            (self._text, "", ""),
        ):
            if (calls := self._read(body)) is not None:
                self.rest = rest
                return calls
        return None

    def _read(self, text: str) -> list[CallPart] | None:
        try:
            calls = _calls_of(text.strip(), self._tools)
        except ValueError:
            return None
        return [CallPart(i, name, arguments) for i, (name, arguments) in enumerate(calls)] or None


class _Scan:
    """Looks for a text outside of the strings of Python, in a text that grows."""

    def __init__(self) -> None:
        self._at = 0
        self._quote = ""

    def find_outside(self, text: str, wanted: str) -> int | None:
        """Return the position of the wanted text. None: it has not come yet."""
        while self._at < len(text):
            if self._quote:
                self._pass_string(text)
                if self._quote:
                    return None
                continue
            quotes = [found for quote in ("'", '"') if (found := text.find(quote, self._at)) >= 0]
            end = text.find(wanted, self._at)
            if quotes and (end < 0 or min(quotes) < end):
                at = min(quotes)
                if len(text) < at + 3:  # More text is needed to know whether there are three quotation marks.
                    return None
                self._quote = text[at : at + 3] if text[at : at + 3] == text[at] * 3 else text[at]
                self._at = at + len(self._quote)
                continue
            if end < 0:
                self._at = max(self._at, len(text) - len(wanted) + 1)
                return None
            return end
        return None

    def _pass_string(self, text: str) -> None:
        while self._at < len(text):
            if text[self._at] == "\\":
                if self._at + 1 == len(text):
                    return
                self._at += 2
            elif text.startswith(self._quote, self._at):
                self._at += len(self._quote)
                self._quote = ""
                return
            elif self._quote.startswith(text[self._at :]):
                return  # More text is needed to see whether this ends the string.
            else:
                self._at += 1


def _calls_of(text: str, tools: dict[str, Tool]) -> list[tuple[str, str]]:
    """Return the names and arguments of calls, as JSON. Raises ValueError.

    A prompt may also tell LFM2 to write calls as JSON.
    """
    if text.startswith(("{", "[{")):
        value = parse_json(text)
        found = [call_of(item) for item in (value if isinstance(value, list) else [value])]
        if None in found:
            raise ValueError("no call")
        return [call for call in found if call is not None]
    text = text.removeprefix("[")
    calls, at = list[tuple[str, str]](), 0
    while (name := _NAME.match(text, at)) is not None:
        arguments, at = _arguments_of(text, name.end(), tools.get(name[1]))
        calls.append((name[1], json.dumps(arguments, ensure_ascii=False)))
        while at < len(text) and (text[at].isspace() or text[at] in ",;"):
            at += 1
    if text[at:].strip() not in ("", "]"):
        raise ValueError("something else stands between calls")
    return calls


def _arguments_of(text: str, at: int, tool: Tool | None) -> tuple[dict[str, Any], int]:
    """Return the arguments that begin at a position, and the position where the call ends. Raises ValueError."""
    arguments = dict[str, Any]()
    names = list(properties_of(tool)) if tool is not None else []
    while not text.startswith(")", at):
        key = _KEY.match(text, at)
        name = (
            key[1].strip("'\"") if key is not None else names[len(arguments)] if len(arguments) < len(names) else None
        )
        if name is None:
            raise ValueError("an argument has no name")
        start = key.end() if key is not None else at
        end = _end_of_value(text, start)
        arguments[name] = _value_of(text[start:end].strip())
        at = end
        while at < len(text) and (text[at].isspace() or text[at] == ","):
            at += 1
    return arguments, at + 1


def _value_of(text: str) -> Any:
    """Return the value of a literal. Its strings may have line breaks, which Python does not allow."""
    try:
        return literal_of(text)
    except ValueError:
        return literal_of(text.replace("\n", "\\n"))


def _end_of_value(text: str, start: int) -> int:
    """Return the position where a value ends: at a comma or bracket that does not belong to it. Raises ValueError."""
    closers, at, quote = list[str](), start, ""
    while (sign := _SIGNS.search(text, at)) is not None:
        at = sign.end()
        if sign[0] == "\\":
            at += 1
        elif quote:
            if sign[0].startswith(quote):
                at = sign.start() + len(quote)
                quote = ""
        elif sign[0][0] in "'\"":
            quote = sign[0]
        elif sign[0] in _PAIRS:
            closers.append(_PAIRS[sign[0]])
        elif closers and sign[0] == closers[-1]:
            closers.pop()
        elif not closers and sign[0] in ",)":
            return sign.start()
    raise ValueError("a value is not complete")
