"""Reads requests of Ollama's clients, and returns each as the request of OpenAI's clients that means the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from hybridmem.chat.server.checked import ANY, Checked, Neutral, read_request
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.pictures import sees
from hybridmem.chat.server.schema import ChatRequest, CompletionRequest

_SAME = (
    "temperature", "top_k", "top_p", "min_p", "seed", "stop", "repeat_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
"""Options that have the same name and meaning in chats."""


def _read_length(value: object) -> object:
    # The two numbers stand for as many tokens as fit.
    return None if type(value) is int and value in (-1, -2) else value


class Options(Checked):
    """Holds the options of a request. Options for loading a model have no effect here."""

    neutral: ClassVar[Neutral] = {
        **dict.fromkeys(
            (
                "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "mirostat_eta", "mirostat_tau",
                "num_batch", "num_ctx", "num_gpu", "num_keep", "num_thread", "numa", "penalize_newline",
                "repeat_last_n", "use_mlock", "use_mmap", "vocab_only",
            ),
            ANY,
        ),
        "mirostat": (0,),
        "tfs_z": (1, 1.0),
        "typical_p": (1, 1.0),
    }  # fmt: skip
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Any = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_predict: Annotated[int | None, BeforeValidator(_read_length)] = None

    def fields(self) -> dict[str, Any]:
        """Return the options as fields of a request of OpenAI's clients."""
        fields = {name: value for name in _SAME if (value := getattr(self, name)) is not None}
        return fields | ({} if self.num_predict is None else {"max_tokens": self.num_predict})


class OllamaRequest(Checked):
    """Holds the fields that both kinds of requests have."""

    neutral: ClassVar[Neutral] = {"keep_alive": ANY, "truncate": ANY, "shift": ANY}
    model: str
    stream: bool = True
    options: Options = Field(default_factory=Options)
    format: dict[str, Any] | str = ""
    think: bool | str | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    def fields(self) -> dict[str, Any]:
        fields = {"model": self.model.removesuffix(":latest"), "stream": self.stream} | self.options.fields()
        if isinstance(self.format, dict):
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": self.format}}
        elif self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            message = f"Invalid 'format': it must be 'json' or a schema; got {self.format[:40]!r}."
            raise ApiError(400, message, param="format", code="invalid_value")
        return fields

    def chat_fields(self) -> dict[str, Any]:
        fields = self.fields()
        if isinstance(self.think, bool):
            fields["enable_thinking"] = self.think
        elif self.think is not None:
            fields["reasoning_effort"] = self.think
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return fields


class OllamaChat(OllamaRequest):
    """Holds a request to POST /api/chat."""

    messages: list[dict[str, Any]] = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)

    def as_chat(self) -> ChatRequest:
        fields = self.chat_fields() | {"messages": _with_ids(self.messages)}
        return ChatRequest.read(fields | ({"tools": self.tools} if self.tools else {}))


class OllamaGenerate(OllamaRequest):
    """Holds a request to POST /api/generate: a user's message, or with `raw` the whole prompt."""

    neutral: ClassVar[Neutral] = {
        "context": ([],),
        "height": ANY,
        "images": ([],),
        "steps": ANY,
        "suffix": ("",),
        "template": ("",),
        "width": ANY,
    }
    prompt: str = ""
    system: str = ""
    raw: bool = False

    def as_chat(self) -> ChatRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return ChatRequest.read(self.chat_fields() | {"messages": [*system, {"role": "user", "content": self.prompt}]})

    def as_completion(self) -> CompletionRequest:
        logprobs = {"logprobs": self.top_logprobs} if self.logprobs else {}
        fields = {"max_tokens": -1} | self.fields() | logprobs | {"prompt": self.prompt}
        return CompletionRequest.read(fields)


class OllamaShow(Checked):
    """Holds a request to POST /api/show. The field `name` is the old one."""

    neutral: ClassVar[Neutral] = {"verbose": ANY}
    aliases: ClassVar[Mapping[str, str]] = {"name": "model"}
    model: str


def read_chat(body: bytes) -> OllamaChat:
    return read_request(OllamaChat, body)


def read_generate(body: bytes) -> OllamaGenerate:
    return read_request(OllamaGenerate, body)


def _content_of(message: dict[str, Any]) -> Any:
    """Return a message's content. Ollama's clients send pictures separately from the text, as base64.

    They are put before the text.
    """
    images, text = message.get("images"), message.get("content")
    if not isinstance(images, list) or not images:
        return text
    parts = [{"type": "image_url", "image_url": f"data:image/png;base64,{image}"} for image in images]
    return [*parts, {"type": "text", "text": text or ""}]


def _with_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's form. Ollama's calls have no ids: results follow in the order of the calls."""
    told, waiting = list[dict[str, Any]](), list[str]()
    for number, message in enumerate(messages):
        names = {"role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id", "name"}
        if unknown := sorted(message.keys() - names):
            raise ApiError(400, f"Unknown parameter: 'messages[{number}].{unknown[0][:40]}'.", param="messages")
        if message.get("images") and not sees():
            raise ApiError(400, "Unsupported parameter: 'images': this model reads text.", param="messages")
        one = {"role": message.get("role"), "content": _content_of(message), "name": message.get("name")}
        if message.get("thinking"):
            one["reasoning_content"] = message["thinking"]
        calls = message.get("tool_calls")
        if calls and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
            raise ApiError(400, f"Invalid 'messages[{number}].tool_calls': it must be a list.", param="messages")
        if calls:
            waiting = [f"call_{number}_{i}" for i in range(len(calls))]
            one["tool_calls"] = [{**call, "id": name} for call, name in zip(calls, waiting, strict=True)]
        if one["role"] == "tool":
            one["tool_call_id"] = message.get("tool_call_id") or (waiting.pop(0) if waiting else "call")
        told.append(one)
    return told
