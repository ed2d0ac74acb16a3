"""Reads the tools of a request, the choice of tools to call, and the calls of earlier replies."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from hybridmem.chat.server.checked import Checked
from hybridmem.chat.server.errors import ApiError, clip
from hybridmem.chat.stored.items import joined_name
from hybridmem.chat.tools.calls import NO_ARGUMENTS, Tool, parse_json

MOST_TOOLS = 512
_OF_TOOLS = ("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "output_schema")
"""Fields of a tool that change nothing here: all tools are told, and all prefixes are cached."""
_HOSTED = (
    "advisor", "apply_patch", "bash", "browser", "code_execution", "code_interpreter", "computer", "custom",
    "file_search", "image_generation", "local_shell", "mcp", "memory", "programmatic_tool_calling", "shell",
    "text_editor", "tool_search", "web_fetch", "web_search",
)  # fmt: skip
"""The types of tools that other servers run or define begin with these. This server has none of them."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


def read_tools(value: object) -> tuple[Tool, ...]:
    """Read the tools of a request. Raises ValueError.

    In chats, the fields of a tool stand under "function". In Responses they stand beside its type.
    """
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise ValueError(f"it must be a list of up to {MOST_TOOLS} tools")
    tools = tuple(map(_read_tool, value))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise ValueError("two tools have the same name")
    return tools


def _read_tool(value: object) -> Tool:
    if not isinstance(value, dict) or value.get("type") != "function":
        raise ValueError("only tools of the type 'function' are supported")
    function = value.get("function", value)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("a function has a name of letters, digits, _ and -")
    if unknown := sorted(function.keys() - {"type", "name", "description", "parameters", "strict", *_OF_TOOLS}):
        raise ValueError(f"{unknown[0][:40]!r} is no field of a function")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict | None) or not isinstance(function.get("description"), str | None):
        raise ValueError("a function's 'parameters' are a JSON Schema, and its 'description' is a string")
    parameters = dict(parameters) if parameters else dict(NO_ARGUMENTS)
    parameters.setdefault("type", "object")
    told = {"name": name, "description": function.get("description") or "", "parameters": parameters}
    return Tool(name, parameters, {"type": "function", "function": told}, is_strict=function.get("strict") is not False)


def read_tool_choice(value: object) -> object:
    """Return "auto", "none" or "required", or the names of the tools of which one must be called."""
    if value in ("auto", "none", "required"):
        return value
    if isinstance(value, dict) and value.get("type") == "function":
        function = value.get("function", value)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return (function["name"],)
    if isinstance(value, dict) and value.get("type") == "allowed_tools" and value.get("mode") == "required":
        names = [tool.get("name") for tool in value.get("tools") or () if isinstance(tool, dict)]
        if names and all(isinstance(name, str) for name in names):
            return tuple(names)
    if isinstance(value, dict) and str(value.get("type")).startswith(_HOSTED):
        raise ValueError(f"this server has no tool of the type {clip(str(value['type']))!r}")
    raise ValueError("it must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}")


ToolChoice = Annotated[Literal["auto", "none", "required"] | tuple[str, ...], BeforeValidator(read_tool_choice)]
Tools = Annotated[tuple[Tool, ...], BeforeValidator(read_tools)]


def split_tools(value: object) -> tuple[object, dict[str, str], list[str]]:
    """Flatten the namespaces of a request's tools, and leave out tools that other servers run.

    Returns:
        The tools that are functions; the namespace of each that has one, by the name that the model knows; and what was
        left out, with the reason.
    """
    if not isinstance(value, list):
        return value, {}, []
    tools, namespaces, left_out = list[object](), dict[str, str](), list[str]()
    for tool in value:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind.startswith(_HOSTED):
            left_out.append(f"tools: this server has no tool of the type {clip(kind)!r}")
        elif kind == "namespace" and isinstance(tool.get("name"), str) and isinstance(tool.get("tools"), list):
            for inner in tool["tools"]:
                if isinstance(inner, dict) and isinstance(inner.get("name"), str):
                    name = joined_name(tool["name"], inner["name"])
                    namespaces[name], inner = tool["name"], {**inner, "name": name}
                tools.append(inner)
        else:
            tools.append(tool)
    return tools, namespaces, left_out


class ToolFields(Checked):
    """Holds the tools of a request.

    Attributes:
        namespaces: the namespace of each tool that has one, by the name that the model knows.
    """

    derived: ClassVar[tuple[str, ...]] = ("namespaces",)
    tools: Tools = ()
    namespaces: dict[str, str] = Field(default_factory=dict)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True

    @classmethod
    def simplify(cls, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        fields, left_out = super().simplify(fields)
        if "tools" not in fields:
            return fields, left_out
        tools, namespaces, others = split_tools(fields["tools"])
        return fields | {"tools": tools, "namespaces": namespaces}, left_out + others

    @property
    def offered_tools(self) -> tuple[Tool, ...]:
        """Return the tools that are shown to the model."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")

    def callable_tools(self) -> tuple[Tool, ...]:
        """Return the tools that the reply may call.

        Raises ApiError 400 if the request chooses a tool that it does not offer.
        """
        if self.must_call and not self.tools:
            raise ApiError(400, "'tool_choice' needs 'tools'.", param="tool_choice", code="invalid_value")
        if not isinstance(self.tool_choice, tuple):
            return self.offered_tools
        found = tuple(tool for tool in self.tools if tool.name in self.tool_choice)
        if not found:
            message = f"Invalid 'tool_choice': there is no tool {self.tool_choice[0][:100]!r}."
            raise ApiError(400, message, param="tool_choice", code="invalid_value")
        return found


def read_calls(value: object) -> list[dict[str, Any]]:
    """Read the calls of an earlier reply in the form that templates know: arguments are an object.

    Raises ValueError.
    """
    if not isinstance(value, list):
        raise ValueError("it must be a list of calls")
    return [_read_call(call) for call in value]


def _read_call(value: object) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a call is {'id': ..., 'type': 'function', 'function': {'name': ..., 'arguments': ...}}")
    arguments = function.get("arguments") or "{}"
    try:
        arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    except ValueError:  # The reply was cut, or the arguments are not valid JSON, so no template could write them.
        arguments = {"arguments": arguments}
    if not isinstance(arguments, dict):
        raise ValueError("a call's 'arguments' are an object, written as JSON")
    told = {"name": function["name"], "arguments": arguments}
    return {"id": str(value.get("id") or ""), "type": "function", "function": told}
