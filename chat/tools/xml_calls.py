"""Reads and constrains calls in the format of Qwen3.5 and Nemotron 3. Each argument stands between marks of its own:

<tool_call>
<function=name>
<parameter=city>
Paris
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hybridmem.chat.sampling.grammar import json_rule
from hybridmem.chat.tools.calls import Block, CallPart, Marks, Tool, either, parse_json, repeated

_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|(?=</function>)|\Z)", re.DOTALL
)


@dataclass(frozen=True)
class XmlCalls:
    """Defines the format in which a function and its parameters stand between marks."""

    begin: str = "<tool_call>"
    end: str = "</tool_call>"

    def open(self, tools: Sequence[Tool]) -> Block:
        return XmlBlock(tools)

    def rules(self, tools: Sequence[Tool], mark: Marks, *, is_parallel: bool) -> str:
        rules = [rule for i, tool in enumerate(tools) for rule in _rules_of(i, tool)]
        one = f"call: {either([f'call{i}' for i in range(len(tools))])}"
        block = f'block: {mark(self.begin)} "\\n" call "\\n" {mark(self.end)}'
        return "\n".join([f"calls: {repeated('block', chr(10), is_parallel=is_parallel)}", block, one, *rules])


def _rules_of(i: int, tool: Tool) -> list[str]:
    """Return the rules of one function.

    Its parameters come in the order of the schema; optional ones may be left out.
    """
    properties = tool.parameters.get("properties") or {}
    required = tool.parameters.get("required") or ()
    shared = {key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters}
    rules, terms = [], []
    for k, (name, schema) in enumerate(properties.items()):
        schema = schema if isinstance(schema, dict) else {}
        end, texts = json.dumps("\n</parameter>"), schema.get("enum")
        if _is_text(schema):
            rules.append(f"text{i}_{k}[lazy]: /(.|\\n)*\\n<\\/parameter>/")
            body = f"text{i}_{k}"
        elif isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
            body = f"({either([json.dumps(text) for text in texts])}) {end}"
        else:
            body = f"{json_rule(schema | shared)} {end}"
        rules.append(f"param{i}_{k}: {json.dumps(f'<parameter={name}>' + chr(10))} {body} {json.dumps(chr(10))}")
        terms.append(f"param{i}_{k}" + ("" if name in required else "?"))
    opening = json.dumps(f"<function={tool.name}>\n")
    return [f'call{i}: {opening} {" ".join(terms)} "</function>"', *rules]


def _is_text(schema: dict[str, Any]) -> bool:
    """Return whether a value is text, which is written without quotation marks. Other values are written as JSON."""
    return schema.get("type") == "string" and not schema.keys() & {"enum", "const", "pattern", "format", "maxLength"}


class XmlBlock:
    """Reads one call once it is complete. Only then is it clear whether a value is JSON or text."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._schemas = {tool.name: tool.parameters.get("properties") or {} for tool in tools}
        self._pieces: list[str] = []

    def feed(self, text: str) -> list[CallPart]:
        self._pieces.append(text)
        return []

    def close(self) -> list[CallPart] | None:
        calls = _FUNCTION.findall("".join(self._pieces))
        parts = []
        for i, (name, body) in enumerate(calls):
            schemas = self._schemas.get(name.strip(), {})
            arguments = {key.strip(): _value(text, schemas.get(key.strip())) for key, text in _PARAMETER.findall(body)}
            parts.append(CallPart(i, name.strip(), json.dumps(arguments, ensure_ascii=False)))
        return parts or None


def _value(text: str, schema: object) -> Any:
    """Return a value by its schema. A string stays as it is. Anything else is read as JSON, if possible."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "string" and isinstance(schema, dict) and _is_text(schema):
        return text
    try:
        value = parse_json(text)
    except ValueError:
        return text
    return text if kind == "string" and not isinstance(value, str) else value
