"""Finds calls in a reply that break the schemas of their tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hybridmem.chat.sampling.grammar import Grammar, Grammars
from hybridmem.chat.tools.calls import CallFormat, Tool, parse_json
from hybridmem.chat.tools.families import Habits
from hybridmem.chat.tools.grammars import Required
from hybridmem.chat.tools.reading import make_reader
from hybridmem.chat.tools.schemas import resolve
from hybridmem.chat.tools.tool_schemas import arguments_rule

_MOST_DEPTH = 32
_PARTS = ("allOf", "anyOf", "oneOf")


@dataclass(frozen=True)
class CallCheck:
    """Knows which calls a reply may make.

    Attributes:
        grammar: matches the name of a tool, a space, and its arguments as JSON.
        is_parallel: whether there may be several calls.
    """

    grammar: Grammar
    tools: Sequence[Tool]
    is_parallel: bool

    @classmethod
    def of(cls, grammars: Grammars, calls: Required) -> CallCheck:
        """Return the check of calls. Raises GrammarError if something cannot be enforced."""
        names = [f"call{i}" for i in range(len(calls.tools))]
        rules = [
            f"{name}: {json.dumps(f'{tool.name} ')} {arguments_rule(tool)}"
            for name, tool in zip(names, calls.tools, strict=True)
        ]
        grammar = grammars.lark("\n".join([f"start: {' | '.join(names)}", *rules]))
        return cls(grammar, calls.tools, calls.is_parallel)

    def is_valid(self, name: str, arguments: str) -> bool:
        """Return whether a call keeps to the schema of its tool. Its arguments may come in any order."""
        tool = next((tool for tool in self.tools if tool.name == name), None)
        try:
            value = parse_json(arguments)
        except ValueError:
            return False
        if tool is None:
            return False
        text = f"{name} {json.dumps(_ordered(value, tool.parameters, tool.parameters), ensure_ascii=False)}"
        ids, matcher = self.grammar.tokenize(text.encode()), self.grammar.matcher()
        if matcher.count_allowed(ids) < len(ids):
            return False
        for token_id in ids:
            matcher.add(token_id)
        return matcher.is_accepting


def _ordered(value: Any, schema: Any, root: Any, depth: int = _MOST_DEPTH) -> Any:
    """Return a value with the members of its objects in the order of the schema, as grammars require."""
    if depth == 0:
        return value
    if isinstance(value, list):
        of_items = list(_values_of(schema, root, "items", depth))
        return [_ordered(item, {"anyOf": of_items}, root, depth - 1) for item in value]
    if not isinstance(value, dict):
        return value
    known = dict[str, list[Any]]()
    for properties in _values_of(schema, root, "properties", depth):
        for key, inner in properties.items() if isinstance(properties, dict) else ():
            known.setdefault(key, []).append(inner)
    keys = [*(key for key in known if key in value), *(key for key in value if key not in known)]
    return {key: _ordered(value[key], {"anyOf": known.get(key, [])}, root, depth - 1) for key in keys}


def _values_of(schema: Any, root: Any, keyword: str, depth: int) -> Iterator[Any]:
    """Yield the values of a keyword in a schema and in the schemas that it consists of."""
    if not isinstance(schema, dict) or depth == 0:
        return
    if keyword in schema:
        yield schema[keyword]
    if isinstance(reference := schema.get("$ref"), str):
        yield from _values_of(resolve(reference, root), root, keyword, depth - 1)
    for name in _PARTS:
        for part in schema[name] if isinstance(schema.get(name), list) else ():
            yield from _values_of(part, root, keyword, depth - 1)


class CheckedReply:
    """Reads one reply, and checks its calls once they are complete. Calls that a grammar has chosen need no check.

    Args:
        is_thinking: whether the prompt ended with the mark that begins thoughts.
    """

    def __init__(self, check: CallCheck, habits: Habits, calls: CallFormat, *, is_thinking: bool) -> None:
        self._check = check
        self._reader = make_reader(habits, check.tools, calls, is_thinking=is_thinking)
        self._calls = dict[int, list[str]]()  # These are the name and the arguments of each unchecked call.
        self._is_constrained = False

    @property
    def begun_at(self) -> int:
        return self._reader.begun_at

    @property
    def is_quiet(self) -> bool:
        return self._reader.is_quiet

    def feed(self, text: str, *, is_constrained: bool) -> bool:
        """Read more text. Return whether a call in it is complete and breaks its schema."""
        return self._take(self._reader.feed(text), is_constrained=is_constrained)

    def close(self, *, is_cut: bool) -> bool:
        """Read the end of the reply. Return as `feed`. If the reply was cut, its last call is not checked."""
        return self._take(self._reader.close(), is_constrained=False, is_cut=is_cut)

    def _take(self, parts: Sequence[Any], *, is_constrained: bool, is_cut: bool = False) -> bool:
        self._is_constrained = self._is_constrained or is_constrained
        for part in parts:
            if part.call is not None:
                call = self._calls.setdefault(part.call.index, ["", ""])
                call[0], call[1] = call[0] + part.call.name, call[1] + part.call.arguments
        if self._reader.is_in_call:
            return False
        calls, is_free = list(self._calls.values()), not self._is_constrained
        self._calls, self._is_constrained = {}, False
        if is_free and len(calls) > 1 and not self._check.is_parallel:
            return True
        return is_free and not all(self._check.is_valid(*call) for call in (calls[:-1] if is_cut else calls))
