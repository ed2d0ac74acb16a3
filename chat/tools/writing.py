"""Writes earlier calls into the contents of messages, for chat templates that leave calls out.

LFM2's first templates do so, because their model has learned calls as a part of a message's content.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hybridmem.chat.tools.calls import CallFormat
from hybridmem.chat.tools.json_calls import JsonCalls
from hybridmem.chat.tools.python_calls import PythonCalls

Message = dict[str, Any]


def writer_of(calls: CallFormat | None) -> Callable[[Message], Message] | None:
    """Return a function that writes the calls of a message into its content.

    None: no template that leaves out calls has this format.
    """
    if not isinstance(calls, JsonCalls | PythonCalls) or calls.is_bare:
        return None

    def write(message: Message) -> Message:
        if not message.get("tool_calls"):
            return message
        frame = calls.frame
        written = [frame.opening + _written(calls, call["function"]) + frame.closing for call in message["tool_calls"]]
        content = f"{message.get('content') or ''}{frame.begin}{frame.join.join(written)}{frame.end}"
        return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": content}

    return write


def _written(calls: JsonCalls | PythonCalls, function: dict[str, Any]) -> str:
    name, arguments = function["name"], function["arguments"]
    if isinstance(calls, JsonCalls):
        return json.dumps({calls.name_key: name, calls.arguments_key: arguments}, ensure_ascii=False)
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
