"""Reads and constrains calls in the format of Gemma 4, with special tokens instead of quotation marks around texts:

<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3,tags:[<|"|>a<|"|>]}<tool_call|>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridmem.chat.tools.calls import Block, CallPart, Literals, Tool, parse_json
from hybridmem.chat.tools.example import ITEM, LIST_KEY, NAME, NUMBER, NUMBER_KEY, TEXT, TEXT_KEY, Example
from hybridmem.chat.tools.frames import FramedCalls
from hybridmem.chat.tools.tool_schemas import joined_members, properties_of, required_of
from hybridmem.chat.tools.value_rules import ValueRules

_NAME = re.compile(r"\s*([^\s{}]+)\s*\{")
_SCALAR = re.compile(r"\s*([^\s,{}\[\]]+)\s*")
_COMMA = '","'
_WORDS = {"None": None, "True": True, "False": False}


@dataclass(frozen=True)
class GemmaCalls(FramedCalls):
    """Defines the format.

    Attributes:
        frame: the texts around the call, up to the function's name.
        quote: the token on both sides of a text.
    """

    quote: str

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.frame.texts, self.quote)

    def open(self, tools: Sequence[Tool]) -> Block:
        return GemmaBlock(self)

    def rules_of(self, tools: Mapping[str, Tool], literals: Literals) -> list[str]:
        rules, writer = list[str](), _Writer(self.quote, literals)
        for name, tool in tools.items():
            values = ValueRules(f"{name}v", tool.parameters, writer)
            members = {key: values.of(schema) for key, schema in properties_of(tool).items()}
            rules += [f"{name}: {json.dumps(tool.name)} {writer.members(members, required_of(tool))}", *values.rules]
        return [*rules, *writer.rules]


class _Writer:
    def __init__(self, quote: str, literals: Literals) -> None:
        self._quote, self._text, self._literals = literals(quote), quote, literals
        self._texts: dict[int | None, str] = {}
        self.text(None)

    @property
    def rules(self) -> list[str]:
        """Return the rules of texts, and of values of any type."""
        return [
            *self._texts.values(),
            f'whatever: quoted | %json {{"type": ["number", "boolean", "null"]}} | {self.array("whatever", 0, None)}'
            ' | "{" (whatever_member ("," whatever_member)*)? "}"',
            'whatever_member: /[A-Za-z0-9_$-]+/ ":" whatever',
        ]

    def text(self, most: int | None) -> str:
        name = "quoted" if most is None else f"quoted{most}"
        text, how = self._literals.until(self._text, most)
        self._texts[most] = f"{name}: {self._quote} {name}_end\n{name}_end{how}: {text}"
        return name

    def word(self, text: str) -> str:
        return f"{self._quote} {json.dumps(text)} {self._quote}"

    def array(self, item: str, least: int, most: int | None) -> str:
        if most == 0:
            return '"[" "]"'
        times = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        listed = f'{item} ("," {item}){times}'
        return f'"[" {listed} "]"' if least else f'"[" ({listed})? "]"'

    def members(self, rules: Mapping[str, str], required: list[str]) -> str:
        members = {key: f"{json.dumps(key + ':')} {rule}" for key, rule in rules.items()}
        return f'"{{" {joined_members(members, required, _COMMA)} "}}"'

    def scalar(self, rule: str) -> str:
        return rule

    def anything(self) -> str:
        return "whatever"


def infer_gemma_calls(example: Example) -> GemmaCalls | None:
    """Return the format of the calls in an example. None: they are written in another way."""
    quote = r"(\S+?)"
    pattern = rf"{NAME}\{{{TEXT_KEY}:{quote}{TEXT}\1,{NUMBER_KEY}:{NUMBER},{LIST_KEY}:\[\1{ITEM}\1\]\}}"
    calls = [call for call in re.finditer(pattern, example.text) if call[1] != '"']
    if len(calls) != example.n_calls:
        return None
    return GemmaCalls(example.frame([call.span() for call in calls]), calls[0][1])


class GemmaBlock:
    """Reads one call once it is complete. The mark that ends the call counts only outside of quoted texts."""

    def __init__(self, calls: GemmaCalls) -> None:
        self._stop, self._quote = calls.frame.stop, calls.quote
        self._text = ""
        self._at = 0
        self._is_in_text = False
        self.rest: str | None = None
        self.is_text = False

    def feed(self, text: str) -> list[CallPart]:
        self._text += text
        if (end := self._find_end()) is None:
            return []
        call = self._read(self._text[:end])
        if call is None:
            self.is_text = True
            return []
        self.rest = self._text[end + len(self._stop) :]
        return [call]

    def close(self) -> list[CallPart] | None:
        """Read a call that was cut after its arguments."""
        call = self._read(self._text.strip())
        self.rest = "" if call is not None else None
        return [call] if call is not None else None

    def _find_end(self) -> int | None:
        """Return the position of the mark that ends the call. None: the mark has not come yet."""
        while True:
            quote = self._text.find(self._quote, self._at)
            end = -1 if self._is_in_text else self._text.find(self._stop, self._at)
            if end >= 0 and (quote < 0 or end < quote):
                return end
            if quote < 0:
                return None
            self._is_in_text, self._at = not self._is_in_text, quote + len(self._quote)

    def _read(self, text: str) -> CallPart | None:
        head = _NAME.match(text)
        if head is None:
            return None
        try:
            value, end = self._object(text, head.end())
        except (ValueError, IndexError, RecursionError):
            return None
        if text[end:].strip():
            return None
        return CallPart(0, head[1], json.dumps(value, ensure_ascii=False))

    def _object(self, text: str, at: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while not text[at:].lstrip().startswith("}"):
            at = _past_space(text, at)
            if text.startswith(self._quote, at):
                key, at = self._quoted(text, at)
                at = text.index(":", at) + 1
            else:
                colon = text.index(":", at)
                key, at = text[at:colon].strip(), colon + 1
            found[key], at = self._value(text, at)
            at = _past_comma(text, at)
        return found, text.index("}", at) + 1

    def _value(self, text: str, at: int) -> tuple[Any, int]:
        at = _past_space(text, at)
        if text.startswith(self._quote, at):
            return self._quoted(text, at)
        if text[at] == "{":
            return self._object(text, at + 1)
        if text[at] == "[":
            items, at = [], at + 1
            while not text[at:].lstrip().startswith("]"):
                item, at = self._value(text, at)
                items.append(item)
                at = _past_comma(text, at)
            return items, text.index("]", at) + 1
        scalar = _SCALAR.match(text, at)
        if scalar is None:
            raise ValueError("no value")
        word = scalar[1]
        return (_WORDS[word] if word in _WORDS else parse_json(word)), scalar.end()

    def _quoted(self, text: str, at: int) -> tuple[str, int]:
        start = at + len(self._quote)
        end = text.index(self._quote, start)
        return text[start:end], end + len(self._quote)


def _past_space(text: str, at: int) -> int:
    while text[at].isspace():
        at += 1
    return at


def _past_comma(text: str, at: int) -> int:
    at = _past_space(text, at)
    return at + 1 if text[at] == "," else at
