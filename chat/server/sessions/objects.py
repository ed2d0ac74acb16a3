"""Writes responses for OpenAI's clients, whole and as events of a stream."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.sessions.schema import SampledRequest
from hybridmem.chat.stored.nodes import Item, Node
from hybridmem.chat.tools.calls import Tool

Response = dict[str, Any]


def new_response(asked: SampledRequest, response_id: str, *, model: str, store: bool) -> Response:
    """Return a response that is in progress."""
    return {
        "id": response_id, "object": "response", "created_at": int(time.time()),
        "status": "in_progress", "background": False, "completed_at": None, "error": None, "incomplete_details": None,
        "instructions": asked.instructions, "max_output_tokens": asked.max_output_tokens, "model": model,
        "output": [], "parallel_tool_calls": asked.parallel_tool_calls, "previous_response_id": None,
        "conversation": None, "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": {"effort": asked.effort, "summary": None}, "safety_identifier": asked.safety_identifier,
        "service_tier": "default", "store": store, "temperature": asked.temperature, "text": {"format": asked.text.raw},
        "tool_choice": _choice_of(asked), "tools": [_as_tool(tool) for tool in asked.tools], "top_logprobs": 0,
        "top_p": asked.top_p, "truncation": "disabled", "usage": None, "user": asked.user, "metadata": asked.metadata,
    }  # fmt: skip


def _as_tool(tool: Tool) -> dict[str, Any]:
    function = tool.definition["function"]
    about = {"name": tool.name, "description": function["description"], "parameters": tool.parameters}
    return {"type": "function", **about, "strict": tool.is_strict}


def _choice_of(asked: SampledRequest) -> Any:
    choice = asked.tool_choice
    return {"type": "function", "name": choice[0]} if isinstance(choice, tuple) else choice or "auto"


def usage_of(usage: dict[str, Any]) -> dict[str, Any]:
    """Return the usage of a completion with the field names of Responses."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    more = {"hybrid_memory": usage["hybrid_memory"]} if "hybrid_memory" in usage else {}
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": usage["prompt_tokens"] - cached},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0, **usage.get("completion_tokens_details", {})},
        "total_tokens": usage["total_tokens"],
        **more,
    }


def finished(response: Response, output: list[Item], finish_reason: str | None, usage: dict[str, Any]) -> Response:
    """Return the response as complete, with its output."""
    is_whole = finish_reason == "stop"
    why = "max_output_tokens" if finish_reason in ("length", "deadline") else "cancelled"
    return response | {
        "status": "completed" if is_whole else "incomplete",
        "completed_at": int(time.time()) if is_whole else None,
        "incomplete_details": None if is_whole else {"reason": why},
        "output": output,
        "usage": usage,
    }


def failed(response: Response, error: ApiError) -> Response:
    """Return the response as failed, with the error."""
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    about = {"code": code if error.status >= 429 else "invalid_prompt", "message": str(error)}
    return response | {"status": "failed", "error": about, "output": []}


def about_of(response: Response) -> dict[str, Any]:
    """Return the fields of a response that are stored in addition to its output."""
    return {name: value for name, value in response.items() if name not in ("output", "object", "id", "status")}


def stored_response(node: Node) -> Response:
    """Return the response of a stored reply."""
    about = {name: value for name, value in node.about.items() if name not in ("told_tools", "told_options")}
    return {**about, "id": node.id, "object": "response", "status": node.status, "output": node.items}


def output_message(item_id: str, text: str, *, is_whole: bool = True) -> Item:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    status = "completed" if is_whole else "incomplete"
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": [part]}


@dataclass
class Events:
    """Writes the events of one response, numbered in their order."""

    _numbers: count[int] = field(default_factory=count)

    def of_response(self, kind: str, response: Response, **more: Any) -> str:
        return self.write(f"response.{kind}", response=response, **more)

    def write(self, kind: str, **values: Any) -> str:
        event = {"type": kind, "sequence_number": next(self._numbers), **values}
        return f"event: {kind}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n"
