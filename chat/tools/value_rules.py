"""Makes grammars for values from their schemas, for a family of models that does not write values as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from hybridmem.chat.sampling.grammar import GrammarError, json_rule
from hybridmem.chat.tools.schemas import resolve, type_of

_MOST_RULES = 2_000
_SIMPLE = ("integer", "number", "boolean", "null")


class Writer(Protocol):
    """Writes expressions in Lark for values, as a family of models writes them."""

    def text(self, most: int | None) -> str:
        """Return an expression for any text, of at most this many characters."""
        ...

    def word(self, text: str) -> str:
        """Return an expression for exactly this text."""
        ...

    def array(self, item: str, least: int, most: int | None) -> str:
        """Return an expression for a list whose items match a rule."""
        ...

    def members(self, rules: Mapping[str, str], required: list[str]) -> str:
        """Return an expression for an object whose members match these rules.

        Members that are not required may be left out.
        """
        ...

    def scalar(self, rule: str) -> str:
        """Return an expression for a number, true, false or null that matches a rule."""
        ...

    def anything(self) -> str:
        """Return an expression for a value of any type."""
        ...


class ValueRules:
    """Collects the grammar rules for the values of one tool's arguments.

    Args:
        prefix: the beginning of the rules' names.
        root: the schema in which references are looked up.
    """

    def __init__(self, prefix: str, root: Mapping[str, Any], writer: Writer) -> None:
        self.rules: list[str] = []
        self._prefix, self._root, self._writer = prefix, root, writer
        self._names: dict[str, str] = {}

    def of(self, schema: object) -> str:
        """Return the name of the rule for values by a schema. Raises GrammarError if there would be too many rules."""
        key = json.dumps(schema, sort_keys=True)
        if key in self._names:
            return self._names[key]
        name = self._names[key] = f"{self._prefix}{len(self._names)}"
        if len(self._names) > _MOST_RULES:
            raise GrammarError("the schema has too many parts")
        ways = dict.fromkeys(self._way(branch) for branch in branches(schema, self._root))
        self.rules.append(f"{name}: {' | '.join(ways)}")
        return name

    def _way(self, schema: dict[str, Any]) -> str:
        """Return an expression for values of a schema that has one type."""
        literals = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(literals, list):
            return "(" + " | ".join(map(self._literal, literals)) + ")"
        kind = schema.get("type")
        if kind == "string":
            return self._writer.text(_number(schema, "maxLength"))
        if kind == "array":
            items = self.of(schema.get("items", {}))
            return self._writer.array(items, _number(schema, "minItems") or 0, _number(schema, "maxItems"))
        if kind == "object" and isinstance(properties := schema.get("properties"), dict):
            required = schema.get("required")
            names = [name for name in properties if isinstance(required, list) and name in required]
            return self._writer.members({name: self.of(inner) for name, inner in properties.items()}, names)
        if kind in _SIMPLE:
            bounds = {key: value for key, value in schema.items() if key in _BOUNDS}
            return self._writer.scalar(json_rule(bounds | {"type": kind}))
        return self._writer.anything()

    def _literal(self, value: object) -> str:
        if isinstance(value, str):
            return self._writer.word(value)
        is_simple = type_of(value) in _SIMPLE
        return self._writer.scalar(json.dumps(json.dumps(value))) if is_simple else self._writer.anything()


_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def branches(schema: object, root: object, depth: int = 16) -> Iterator[dict[str, Any]]:
    """Yield schemas of one type each, between which the given schema allows a choice."""
    if not isinstance(schema, dict) or depth == 0:
        yield {}
        return
    rest = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf", "oneOf", "allOf")}
    if isinstance(reference := schema.get("$ref"), str):
        target = resolve(reference, root)
        yield from branches({**target, **rest} if isinstance(target, dict) else rest, root, depth - 1)
        return
    for name in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(name), list) and parts:
            for part in parts:
                yield from branches({**rest, **part} if isinstance(part, dict) else rest, root, depth - 1)
            return
    if isinstance(parts := schema.get("allOf"), list):
        merged: dict[str, Any] = dict(rest)
        for part in parts:
            for found in [next(branches(part, root, depth - 1))]:
                inner = {**merged.get("properties", {}), **found.get("properties", {})}
                names = [*merged.get("required", []), *found.get("required", [])]
                merged = {**merged, **found} | ({"properties": inner, "required": names} if inner else {})
        yield merged
        return
    kind = schema.get("type")
    if isinstance(kind, list):
        for each in kind:
            yield {**schema, "type": each}
        return
    if kind is None and "properties" in schema:
        yield {**schema, "type": "object"}
        return
    yield schema


def _number(schema: Mapping[str, Any], key: str) -> int | None:
    value = schema.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10_000 else None
