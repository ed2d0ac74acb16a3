"""Turns the schema of a tool's arguments into a part of a grammar."""

from __future__ import annotations

from typing import Any

from hybridmem.chat.sampling.grammar import json_rule
from hybridmem.chat.tools.calls import Tool

_DEFINITIONS = ("$defs", "definitions")


def arguments_rule(tool: Tool) -> str:
    """Return a part of a Lark rule that stands for all arguments of a tool, as an object of JSON."""
    return json_rule(tool.parameters)


def argument_rule(tool: Tool, schema: Any) -> str:
    """Return a part of a Lark rule that stands for one argument of a tool, as JSON."""
    shared = {key: tool.parameters[key] for key in _DEFINITIONS if key in tool.parameters}
    return json_rule((schema if isinstance(schema, dict) else {}) | shared)


def properties_of(tool: Tool) -> dict[str, Any]:
    """Return the schemas of a tool's arguments by their names."""
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def required_of(tool: Tool) -> list[str]:
    """Return the names of the arguments that a call must have."""
    required = tool.parameters.get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
