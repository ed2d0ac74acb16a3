"""Reads requests of Anthropic's Messages API, and returns each as the request for a chat that means the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from hybridmem.chat.server.checked import ANY, Checked, Neutral, read_request
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.messages.blocks import ChatMessage, read_messages, read_system, with_system_first
from hybridmem.chat.server.schema import ChatRequest
from hybridmem.chat.tools.calls import NO_ARGUMENTS

Tools = Annotated[list[dict[str, Any]], Field(max_length=1024)]

_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "cache_salt")
"""Fields that have the same name and meaning in chats."""


class ToolChoice(Checked):
    """Holds which tools a reply may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Checked):
    """Holds whether the model is to think. A budget of tokens is not enforced."""

    neutral: ClassVar[Neutral] = {"budget_tokens": ANY, "display": ANY}
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]


class OutputConfig(Checked):
    """Holds the form of a reply, and how much effort the model should spend on it."""

    neutral: ClassVar[Neutral] = {"task_budget": ANY}
    effort: str | None = None
    format: dict[str, Any] | None = None


class MessagesRequest(Checked):
    """Holds a request to POST /v1/messages, or to count the tokens of its prompt.

    `min_p`, `seed` and `cache_salt` are this server's additions. They mean the same as in chats.
    """

    neutral: ClassVar[Neutral] = {
        "cache_control": ANY,
        "container": (),
        "diagnostics": ANY,
        "inference_geo": ANY,
        "mcp_servers": ([],),
        "service_tier": ANY,
        "speed": ANY,
        "user_profile_id": ANY,
        "workspace_id": ANY,
    }
    noted: ClassVar[Mapping[str, str]] = {"context_management": "no context is shortened here"}
    left_out: tuple[str, ...] = ()
    model: str
    messages: Annotated[list[ChatMessage], BeforeValidator(read_messages)]
    system: Annotated[str, BeforeValidator(read_system)] = ""
    max_tokens: int | None = Field(None, ge=0)
    stream: bool = False
    stop_sequences: list[str] = Field(default_factory=list)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    cache_salt: str | None = None
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)

    def chat_fields(self) -> dict[str, Any]:
        """Return the request as the fields of a chat request."""
        fields: dict[str, Any] = {"messages": with_system_first(self.system, self.messages)}
        fields |= {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        if self.stop_sequences:
            fields["stop"] = self.stop_sequences
        if self.messages[-1]["role"] == "assistant":
            fields["continue_final_message"] = True
        if isinstance(user := self.metadata.get("user_id"), str):
            fields["user"] = user
        return fields | self._tool_fields() | self._thought_fields()

    def _tool_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"tools": list(map(_as_function, self.tools))} if self.tools else {}
        choice = self.tool_choice
        if choice is None:
            return fields
        return fields | {
            "tool_choice": _as_choice(choice),
            "parallel_tool_calls": not choice.disable_parallel_tool_use,
        }

    def _thought_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.thinking is not None and self.thinking.type in ("enabled", "disabled"):
            fields["enable_thinking"] = self.thinking.type == "enabled"
        config = self.output_config or OutputConfig()
        if config.effort is not None:
            fields["reasoning_effort"] = config.effort
        form = self.output_format or config.format
        return fields | ({"response_format": form} if form else {})


def read_chat(body: bytes) -> ChatRequest:
    """Read the body of a request as a chat that means the same. Raises ApiError 400."""
    asked = read_request(MessagesRequest, body)
    chat = ChatRequest.read(asked.chat_fields())
    return chat.model_copy(update={"left_out": (*asked.left_out, *chat.left_out)})


def _as_function(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chats. Tools that Anthropic runs or defines keep their types, as hosted tools."""
    kind = tool.get("type") or "custom"
    if kind != "custom":
        return tool
    schema = tool.get("input_schema", NO_ARGUMENTS)
    about = {name: tool[name] for name in ("name", "description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": about | {"parameters": schema}}


def _as_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        if choice.name is None:
            raise ApiError(400, "Missing required parameter: 'tool_choice.name'.", param="tool_choice.name")
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type
