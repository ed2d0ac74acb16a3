"""Turns the schema of a tool's arguments into a part of a grammar, and says which parts of it are not enforced."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybridmem.chat.sampling.dates import DATA
from hybridmem.chat.sampling.grammar import json_rule
from hybridmem.chat.tools.calls import Tool

_DEFINITIONS = ("$defs", "definitions")
_UNENFORCED = frozenset((
    "$dynamicRef", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "maxContains",
    "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
))  # fmt: skip
"""The keywords of JSON Schema that no grammar enforces here."""
_FORMATS = frozenset((
    "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid",
))  # fmt: skip
_LOOKS_AROUND = re.compile(r"\(\?[=!<]")
_OPENING = ("additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref")
"""With one of these keywords, an object may have members that its properties do not name."""
_OF_SCHEMAS = ("properties", "patternProperties", *_DEFINITIONS)
"""The keywords whose values are schemas by names."""


def arguments_rule(tool: Tool) -> str:
    """Return a part of a Lark rule that stands for all arguments of a tool, as an object of JSON."""
    return json_rule(enforceable(tool.parameters))


def argument_rule(tool: Tool, schema: Any) -> str:
    """Return a part of a Lark rule that stands for one argument of a tool, as JSON."""
    shared = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
    return json_rule(enforceable((schema if isinstance(schema, dict) else {}) | shared))


def properties_of(tool: Tool) -> dict[str, Any]:
    """Return the schemas of a tool's arguments by their names."""
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def required_of(tool: Tool) -> list[str]:
    """Return the names of the arguments that a call must have."""
    required = tool.parameters.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def enforceable(schema: Any, *, is_part: bool = False) -> Any:
    """Return the part of a schema that a grammar enforces.

    An object with named properties may have no others, unless the schema asks for them, because a model that is allowed
    to invent names does so.

    Args:
        is_part: whether the schema is a part of an `allOf`, whose other parts may name more properties.
    """
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if not _is_left_out(key, value)}
    told = {key: _inside(key, value) for key, value in kept.items()}
    if "oneOf" in told and "anyOf" not in told:
        told["anyOf"] = told.pop("oneOf")
    is_open = is_part or any(key in schema for key in _OPENING)
    return told if is_open or not isinstance(schema.get("properties"), dict) else told | {"additionalProperties": False}


def _inside(key: str, value: Any) -> Any:
    if key in DATA:
        return value
    if key in _OF_SCHEMAS and isinstance(value, dict):
        return {name: enforceable(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [enforceable(inner, is_part=key == "allOf") for inner in value]
    return enforceable(value)


def _is_left_out(key: str, value: Any) -> bool:
    if key == "format":
        return value not in _FORMATS
    return key in _UNENFORCED or (key == "pattern" and _LOOKS_AROUND.search(str(value)) is not None)


def left_out_of(tool: Tool) -> Iterator[str]:
    """Yield, in words, the parts of a tool's schema that no grammar enforces."""
    for key in sorted(set(_left_out(tool.parameters))):
        yield f"tools: {key!r} of the schema of {tool.name[:64]!r} is not enforced"


def _left_out(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for inner in schema:
            yield from _left_out(inner)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if _is_left_out(key, value) and value is not False:
            yield key
        elif key in _OF_SCHEMAS and isinstance(value, dict):
            yield from (found for inner in value.values() for found in _left_out(inner))
        elif key not in DATA:
            yield from _left_out(value)


def joined_members(members: Mapping[str, str], required: Sequence[str], comma: str) -> str:
    """Return an expression for members with commas between them. Required ones come first; others may be left out."""
    first = [members[key] for key in members if key in required]
    others = [members[key] for key in members if key not in required]
    terms = f" {comma} ".join(first)
    if first:
        return terms + "".join(f" ({comma} {other})?" for other in others)
    ways = [" ".join([other, *(f"({comma} {later})?" for later in others[i + 1 :])]) for i, other in enumerate(others)]
    return f"({' | '.join(ways)})?" if ways else ""
