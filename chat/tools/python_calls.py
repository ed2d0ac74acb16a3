"""Reads and constrains calls in the format of LFM2: a list of Python calls, such as [weather(city="Paris", days=3)]."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridmem.chat.sampling.grammar import json_rule
from hybridmem.chat.tools.calls import Block, CallPart, Marks, Tool, call_of, either, parse_json, repeated

_AS_IN_JSON = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class PythonCalls:
    """Defines the format in which a block holds a list of calls in Python's syntax."""

    begin: str = "<|tool_call_start|>"
    end: str = "<|tool_call_end|>"

    def open(self, tools: Sequence[Tool]) -> Block:
        return PythonBlock()

    def rules(self, tools: Sequence[Tool], mark: Marks, *, is_parallel: bool) -> str:
        rules = [rule for i, tool in enumerate(tools) for rule in _rules_of(i, tool)]
        one = f"call: {either([f'call{i}' for i in range(len(tools))])}"
        listed = repeated("call", ", ", is_parallel=is_parallel)
        return "\n".join([f'calls: {mark(self.begin)} "[" {listed} "]" {mark(self.end)}', one, *rules])


def _rules_of(i: int, tool: Tool) -> list[str]:
    """Return the rules of one function. Required arguments come first, in the order of the schema.

    Values are written as JSON. Strings, numbers and lists are the same in Python, and the reader knows true and null.
    """
    properties = tool.parameters.get("properties") or {}
    required = [name for name in properties if name in (tool.parameters.get("required") or ())]
    optional = [name for name in properties if name not in required]
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    rules = []
    for k, name in enumerate([*required, *optional]):
        schema = properties[name] if isinstance(properties[name], dict) else {}
        rules.append(f"arg{i}_{k}: {json.dumps(name + '=')} {json_rule(schema | shared)}")
    terms = ' ", " '.join(f"arg{i}_{k}" for k in range(len(required)))
    for k in range(len(required), len(properties)):
        terms += f' (", " arg{i}_{k})?' if required else f" arg{i}_{k}?" if k == 0 else ""
    return [f'call{i}: {json.dumps(tool.name + "(")} {terms} ")"', *rules]


class PythonBlock:
    """Reads a list of calls once it is complete."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def feed(self, text: str) -> list[CallPart]:
        self._pieces.append(text)
        return []

    def close(self) -> list[CallPart] | None:
        text = "".join(self._pieces).strip()
        try:
            calls = _calls_of(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
        return [CallPart(i, name, arguments) for i, (name, arguments) in enumerate(calls)] or None


def _calls_of(text: str) -> list[tuple[str, str]]:
    """Return the names and arguments of calls, as JSON. Raises ValueError.

    A prompt may also tell LFM2 to write calls as JSON.
    """
    if text.startswith(("{", "[{")):
        value = parse_json(text)
        found = [call_of(item) for item in (value if isinstance(value, list) else [value])]
        if None in found:
            raise ValueError("no call")
        return [call for call in found if call is not None]
    node = ast.parse(text, mode="eval").body
    listed = node.elts if isinstance(node, ast.List) else [node]
    return [(_name_of(call), json.dumps(_arguments_of(call), ensure_ascii=False)) for call in listed]


def _name_of(node: ast.expr) -> str:
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    return ast.unparse(node.func)


def _arguments_of(node: ast.expr) -> dict[str, Any]:
    if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
        raise ValueError("arguments need names")
    return {str(keyword.arg): _literal(keyword.value) for keyword in node.keywords}


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal of Python or of JSON. Raises ValueError for anything else."""
    if isinstance(node, ast.Name) and node.id in _AS_IN_JSON:
        return _AS_IN_JSON[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise ValueError("no literal")
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True) if key}
    return ast.literal_eval(node)
