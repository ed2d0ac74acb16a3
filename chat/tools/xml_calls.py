"""Reads and constrains calls in which each argument is between its own marks, as in this format of Qwen3.5:

<tool_call>
<function=name>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>

Other families have other marks in the same places: GLM, Ling and Laguna <arg_key> and <arg_value>, MiniMax-M2 <invoke
name="..."> and <parameter name="...">, and DeepSeek V3.2 the same marks with attributes for the types.

Texts are written without escapes, so an argument may contain the marks of the call itself. A mark counts as the end of
an argument only if the text after it is possible there: a parameter of the function that has not come yet, or the end
of the function, and so on up to the end of the reply. So calls are known only when the reply has ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hybridmem.chat.tools.calls import Block, CallPart, Literals, Tool
from hybridmem.chat.tools.example import (
    ITEM,
    LIST_KEY,
    NAME,
    NUMBER,
    NUMBER_KEY,
    TEXT,
    TEXT_KEY,
    Example,
    common_end,
    spread_index,
)
from hybridmem.chat.tools.frames import Frame, FramedCalls, flexible
from hybridmem.chat.tools.schemas import allowed_by, longest_text, value_of
from hybridmem.chat.tools.tool_schemas import argument_rule, properties_of, required_of

_MOST_TRIES = 5_000
"""So many marks are tried as the end of an argument. After that, the first mark counts."""
_SURE_LENGTH = 256
"""Behind a mark, so many characters are looked at to see that no call follows."""


QWEN_FRAME = Frame(opening="<tool_call>\n<function=", closing="</function>\n</tool_call>", join="\n")


@dataclass(frozen=True)
class XmlCalls(FramedCalls):
    """Defines the texts around the parts of a call.

    Attributes:
        frame: what stands around the call, up to the function's name.
        name_end: stands between the name and the first argument.
        key_begin: stands before the name of an argument.
        key_ends: stand between the name of an argument and its value: the first for texts, the others for other values.
        value_end: stands after a value.
    """

    frame: Frame = QWEN_FRAME
    name_end: str = ">\n"
    key_begin: str = "<parameter="
    key_ends: tuple[str, ...] = (">\n",)
    value_end: str = "\n</parameter>\n"

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """Return the mark, and the text after it, with which models begin that leave the mark out."""
        second = self.inner_opening.strip()
        is_clear = len(second) > 3 and not second[0].isalnum()
        return (self.frame.mark, second) if is_clear else (self.frame.mark,)

    @cached_property
    def inner_opening(self) -> str:
        """Return the text between the mark and a function's name."""
        whole = self.frame.opening if self.frame.begin.strip() else self.frame.opening.strip()
        return whole.removeprefix(self.frame.mark)

    @property
    def literals(self) -> tuple[str, ...]:
        return (*self.frame.texts, self.name_end, self.key_begin, *self.key_ends, self.value_end)

    def open(self, tools: Sequence[Tool]) -> Block:
        return XmlBlock(self, tools)

    def rules_of(self, tools: Mapping[str, Tool], literals: Literals) -> list[str]:
        return [rule for name, tool in tools.items() for rule in self._rules_of(name, tool, literals)]

    def _rules_of(self, call: str, tool: Tool, literals: Literals) -> list[str]:
        """Return the rules of one function.

        Its parameters come in the order of the schema; optional ones may be left out.
        """
        rules, terms, required = [], [], required_of(tool)
        any_text, how = literals.until(self.value_end)
        for k, (name, schema) in enumerate(properties_of(tool).items()):
            allowed = allowed_by(schema, tool.parameters)
            key_end, texts = self.key_ends[0], allowed.literals
            if allowed.is_text:
                rules.append(f"{call}text{k}{how}: {any_text}")
                body = f"{call}text{k}"
            elif (most := longest_text(schema, tool.parameters)) is not None:
                bounded, how_bounded = literals.until(self.value_end, most)
                rules.append(f"{call}text{k}{how_bounded}: {bounded}")
                body = f"{call}text{k}"
            elif texts and all(isinstance(text, str) for text in texts):
                body = f"({' | '.join(json.dumps(text) for text in texts)}) {literals(self.value_end)}"
            else:
                key_end = self.key_ends[-1]
                body = f"{argument_rule(tool, schema)} {literals(self.value_end)}"
            rules.append(f"{call}param{k}: {literals(self.key_begin)} {json.dumps(name)} {literals(key_end)} {body}")
            terms.append(f"{call}param{k}" + ("" if name in required else "?"))
        return [" ".join([f"{call}: {json.dumps(tool.name)}", literals(self.name_end), *terms]), *rules]

    @cached_property
    def patterns(self) -> Patterns:
        return Patterns(self)


def infer_xml_calls(example: Example) -> XmlCalls | None:
    """Return the format of the calls in an example. None: their arguments are not between marks."""
    word = r"((?:(?!{}).)*?)"
    gap = word.format(NAME)
    pattern = re.compile(
        f"{NAME}{gap}{TEXT_KEY}{gap}{TEXT}{gap}{NUMBER_KEY}{gap}{NUMBER}{gap}{LIST_KEY}{gap}\\[.{ITEM}.\\]", re.DOTALL
    )
    calls = list(pattern.finditer(example.text))
    if len(calls) != example.n_calls:
        return None
    after_name = spread_index([call[1] for call in calls])
    _, text_end, between, number_end, between_too, list_end = calls[0].groups()
    key_begin = common_end(after_name, between)
    value_end = between.removesuffix(key_begin)
    if between != between_too or not key_begin.strip() or not value_end.strip():
        return None
    ends = [call.end() + len(value_end) * example.text.startswith(value_end, call.end()) for call in calls]
    frame = example.frame([(call.start(), end) for call, end in zip(calls, ends, strict=True)])
    key_ends = tuple(dict.fromkeys((text_end, number_end, list_end)))
    if len(key_ends) > 2:  # The mark names the value's type, by names that are not known.
        return None
    return XmlCalls(frame, after_name.removesuffix(key_begin), key_begin, key_ends, value_end)


class Patterns:
    """Holds the patterns by which a format is read. White space around marks may vary, except at the ends of values."""

    def __init__(self, calls: XmlCalls) -> None:
        frame = calls.frame
        mark, inner = re.escape(frame.mark), flexible(calls.inner_opening.strip())
        name = rf"([^\s<>\"'={{}}(),]+)\s*{flexible(calls.name_end.strip())}"
        # The text of a block may lack the mark, because the mark has begun the block.
        self.first = re.compile(rf"\s*(?:{mark})?\s*{inner}\s*{name}\s*")
        again = "" if frame.begin.strip() else f"{mark}\\s*" if not inner else f"(?:{mark}\\s*)?"
        self.next = re.compile(rf"\s*{again}{inner}\s*{name}\s*")
        keys = "|".join(f"({flexible(end.strip())})" + ("\n?" if end.endswith("\n") else "") for end in calls.key_ends)
        self.key = re.compile(rf"{flexible(calls.key_begin.strip())}\s*([^\s<>\"]+?)\s*(?:{keys})")
        self.value_end = re.compile(rf"{re.escape(calls.value_end.strip())}\s*")
        self.closing = re.compile(rf"\s*{_that_may_be_cut(frame.closing)}")
        begun = flexible(calls.key_begin.strip())
        self.any_end = re.compile(
            rf"({re.escape(calls.value_end.strip())}\s*)|{begun}|{_that_may_be_cut(frame.closing)}"
        )
        self.end = re.compile(rf"\s*{_that_may_be_cut(frame.end)}") if frame.end.strip() else None
        stray = [calls.value_end, *frame.closing.split("\n"), frame.end]
        self.stray = re.compile("|".join(re.escape(text.strip()) for text in stray if text.strip()))
        self.value_has_line = calls.value_end.startswith("\n")
        self.begun = "".join(calls.inner_opening.split())


def _that_may_be_cut(text: str) -> str:
    """Return a pattern for a text whose last lines may be missing if the reply ends there."""
    *lines, last = [re.escape(line) for line in text.split()] or [""]
    pattern = rf"(?:{last}|\Z)"
    for line in reversed(lines):
        pattern = rf"{line}\s*{pattern}"
    return pattern


class XmlBlock:
    """Reads calls once the reply is complete. Only then is it clear where the texts in its arguments end."""

    def __init__(self, calls: XmlCalls, tools: Sequence[Tool]) -> None:
        self._patterns, self._tools = calls.patterns, {tool.name: tool for tool in tools}
        self._pieces: list[str] = []
        self._n_characters = 0
        self.rest: str | None = None
        self.is_text = False

    def feed(self, text: str) -> list[CallPart]:
        self._pieces.append(text)
        if self._n_characters < _SURE_LENGTH:
            begun = "".join("".join(self._pieces).split())
            wanted = self._patterns.begun
            self.is_text = not (begun.startswith(wanted) or wanted.startswith(begun)) and bool(wanted)
        self._n_characters += len(text)
        return []

    def close(self) -> list[CallPart] | None:
        text = "".join(self._pieces)
        calls, self.rest = next(self._readings(text))
        parts = []
        for i, (name, arguments) in enumerate(calls):
            values = {key: self._value(name, key, *written) for key, written in arguments.items()}
            parts.append(CallPart(i, name, json.dumps(values, ensure_ascii=False)))
        return parts or None

    def _readings(self, text: str) -> Iterator[tuple[list[_Call], str]]:
        """Yield the possible readings of a text, the strictest first."""
        for keeps_schema, is_whole in ((True, True), (True, False), (False, False)):
            reading = _Reading(text, self._patterns, self._tools, keeps_schema=keeps_schema, is_whole=is_whole)
            yield from reading.all_calls(0, is_first=True)
        yield _read_leniently(text, self._patterns)

    def _value(self, name: str, key: str, text: str, is_text: bool) -> Any:
        tool = self._tools.get(name)
        schema = properties_of(tool).get(key) if tool is not None else None
        if is_text and schema is None:
            return text
        return value_of(text, schema, tool.parameters if tool is not None else None)


_Arguments = dict[str, tuple[str, bool]]
"""Name -> the text of its value, and whether the mark before it says that it is text."""
_Call = tuple[str, _Arguments]


class _Reading:
    """Reads the calls of a reply. If a mark could end an argument or be a part of it, both are tried.

    Args:
        keeps_schema: whether calls have only arguments that their functions have.
        is_whole: whether calls have all arguments that their functions require.
    """

    def __init__(
        self, text: str, patterns: Patterns, tools: dict[str, Tool], *, keeps_schema: bool, is_whole: bool
    ) -> None:
        self._text, self._patterns, self._tools = text, patterns, tools
        self._keeps_schema, self._is_whole = keeps_schema, is_whole
        self._failed = set[tuple[object, ...]]()  # No reading from these places reaches the end of the reply.
        self._n_tries = 0

    def all_calls(self, at: int, *, is_first: bool) -> Iterator[tuple[list[_Call], str]]:
        """Yield the calls from this place to the end of the reply, and the text after them."""
        if (at, is_first) in self._failed:
            return
        begun = (self._patterns.first if is_first else self._patterns.next).match(self._text, at)
        if begun is not None:
            for arguments, end in self._arguments(begun.end(), begun[1], ()):
                for more, rest in self._behind(end):
                    yield [(begun[1], arguments), *more], rest
        if not is_first and not self._patterns.stray.search(self._text, at):
            yield [], self._text[at:]
        self._failed.add((at, is_first))

    def _behind(self, at: int) -> Iterator[tuple[list[_Call], str]]:
        """Yield what may stand after a call."""
        if self._patterns.end is None:
            yield from self.all_calls(at, is_first=False)
            return
        if self._patterns.next.match(self._text, at):
            yield from self.all_calls(at, is_first=False)
        if (end := self._patterns.end.match(self._text, at)) is not None:
            again = self._patterns.first.match(self._text, end.end())
            yield from self.all_calls(end.end(), is_first=again is not None)

    def _arguments(self, at: int, name: str, seen: tuple[str, ...]) -> Iterator[tuple[_Arguments, int]]:
        """Yield the possible arguments of a call from this place on, and the place where the call ends."""
        if (at, name, seen) in self._failed:
            return
        closing = self._patterns.closing.match(self._text, at)
        # A word after a mark is a call only if it is a function's name, or if the call has more than the word.
        is_call = bool(seen) or name in self._tools or bool(closing and closing[0].strip())
        if closing is not None and is_call and (not self._is_whole or self._required(name) <= set(seen)):
            yield {}, closing.end()
        key = self._patterns.key.match(self._text, at)
        if key is not None and self._may_have(name, key[1], seen):
            for text, end in self._values(key.end()):
                for more, call_end in self._arguments(end, name, (*seen, key[1])):
                    is_text = len(key.groups()) > 2 and key[2] is not None
                    yield {key[1]: (text, is_text), **more}, call_end
        self._failed.add((at, name, seen))

    def _values(self, at: int) -> Iterator[tuple[str, int]]:
        """Yield the texts that a value may have, the shortest first, each with the place where the value ends."""
        for end in self._patterns.value_end.finditer(self._text, at):
            self._n_tries += 1
            if self._n_tries > _MOST_TRIES:
                return
            yield _without_line(self._text[at : end.start()], self._patterns), end.end()

    def _may_have(self, name: str, key: str, seen: tuple[str, ...]) -> bool:
        tool = self._tools.get(name)
        known = properties_of(tool) if tool is not None else {}
        return key not in seen and (not known or not self._keeps_schema or key in known)

    def _required(self, name: str) -> set[str]:
        tool = self._tools.get(name)
        return set(required_of(tool)) if tool is not None else set()


def _without_line(text: str, patterns: Patterns) -> str:
    """Return a value without the line break that belongs to the mark after it."""
    return text.removesuffix("\n") if patterns.value_has_line else text


def _read_leniently(text: str, patterns: Patterns) -> tuple[list[_Call], str]:
    """Read a reply that is not well-formed, for example because it was cut.

    A value ends at the first tag after it, whichever tag that is.
    """
    calls, at = list[_Call](), 0
    begun = patterns.first.match(text)
    while begun is not None:
        arguments, at = _Arguments(), begun.end()
        while (key := patterns.key.match(text, at)) is not None:
            end = patterns.any_end.search(text, key.end())
            stop, at = (end.start(), end.end() if end[1] else end.start()) if end else (len(text), len(text))
            is_text = len(key.groups()) > 2 and key[2] is not None
            arguments.setdefault(key[1], (_without_line(text[key.end() : stop], patterns), is_text))
        calls.append((begun[1], arguments))
        closing = patterns.closing.match(text, at)
        at = closing.end() if closing is not None else at
        begun = patterns.next.match(text, at)
    return (calls, text[at:]) if any(arguments for _, arguments in calls) else ([], text)
