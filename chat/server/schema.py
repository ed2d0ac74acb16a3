"""Reads requests in OpenAI's form, and refuses those that cannot be fulfilled.

No parameter is ignored in silence. One that is not supported is refused by name, unless its value has no effect. `user`
and `safety_identifier` name the end user: they are read, change nothing and are not stored. `prompt_cache_key`
separates cached prefixes.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, model_validator
from pydantic_core import PydanticCustomError

from hybridmem.chat.sampling.logprobs import MOST_LOGPROBS
from hybridmem.chat.server.checked import ANY, MOST_VALUES, Checked, Neutral, read_request
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.options import MOST_CHOICES
from hybridmem.chat.server.sampled import SamplingFields
from hybridmem.chat.server.structured import StructuredFields
from hybridmem.chat.server.template_fields import TemplateFields
from hybridmem.chat.server.tool_fields import read_calls

__all__ = [
    "MOST_MESSAGES",
    "MOST_VALUES",
    "ChatRequest",
    "Checked",
    "CommonRequest",
    "CompletionRequest",
    "Neutral",
    "Prompt",
    "read_request",
]

MOST_MESSAGES = 4096

Prompt = str | list[int]


def _read_content(value: object) -> str:
    """Read a message's text, given whole or in parts. Parts are joined as they are."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a string, or a list of {'type': 'text', 'text': ...}")
    return "".join(map(_read_part, value))


def _read_part(part: object) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise ValueError("only parts of the type 'text' are supported, such as {'type': 'text', 'text': ...}")
    if not isinstance(part.get("text"), str) or len(part) != 2:
        raise ValueError("a part of the type 'text' has a string as its 'text', and nothing else")
    return str(part["text"])


def read_prompts(value: object, *, most: int = MOST_CHOICES) -> list[Prompt]:
    """Read one prompt or several. Each is a text or token ids. Raises ValueError for more than `most` prompts."""
    if isinstance(value, str) or _are_ids(value):
        return [value]  # type: ignore[list-item]
    if isinstance(value, list) and len(value) > most and not isinstance(value[0], int):
        raise ValueError(f"it has {len(value):,} texts; {most:,} are possible: send several requests")
    if isinstance(value, list) and value and all(isinstance(v, str) or _are_ids(v) for v in value):
        return value
    raise ValueError("it must be a string, a list of token ids, or a list of either")


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


class StreamOptions(Checked):
    # Obfuscation would hide the lengths of pieces from observers of an encrypted connection. This server has none.
    neutral: ClassVar[Neutral] = {"include_obfuscation": (False, True)}
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Message(Checked):
    neutral: ClassVar[Neutral] = {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "provider_specific_fields": ANY,  # The client litellm sends this field back as it got it.
        "refusal": (),
    }
    aliases: ClassVar[dict[str, str]] = {"reasoning": "reasoning_content"}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_read_content)] = ""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], BeforeValidator(read_calls)] = Field(default_factory=list)
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def check_role(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError("only messages of the role 'assistant' have 'tool_calls'")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("a message of the role 'tool' names its call by 'tool_call_id'")
        if "content" not in self.model_fields_set and not self.tool_calls:
            raise PydanticCustomError("absent", "is missing", {"name": "content"})
        return self

    def as_template_knows(self) -> dict[str, Any]:
        """Return the message in the form that templates know. "developer" is the new name of "system"."""
        told: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.content}
        optional = ("name", "reasoning_content", "tool_calls", "tool_call_id")
        return told | {name: value for name in optional if (value := getattr(self, name))}


class CommonRequest(SamplingFields, StructuredFields):
    """Holds the fields that all requests for replies have in common."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    return_progress: bool = False
    user: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def check_stream_options(self) -> CommonRequest:
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "'stream_options' needs 'stream': true.", param="stream_options", code="invalid_value")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def includes_continuous_usage(self) -> bool:
        return self.includes_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats

    def owner(self, authorization: str | None) -> bytes:
        """Return the owner of this request's prefixes.

        Requests with the same key and `prompt_cache_key` share an owner.
        """
        return hashlib.sha256(repr((authorization, self.prompt_cache_key)).encode()).digest()


class Prediction(Checked):
    """Holds the expected text of most of a reply. The reply comes sooner if the text is right."""

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(_read_content)]


def _check_n_messages(value: object) -> object:
    if isinstance(value, list) and len(value) > MOST_MESSAGES:
        raise ValueError(f"it has {len(value):,} messages; {MOST_MESSAGES:,} are possible")
    return value


class ChatRequest(CommonRequest, TemplateFields):
    """Holds a request to POST /v1/chat/completions."""

    neutral: ClassVar[Neutral] = {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "reasoning_format": ("auto", "deepseek"),
        "verbosity": (),
        "web_search_options": (),
    }
    messages: Annotated[list[Message], FailFast(), Field(min_length=1), BeforeValidator(_check_n_messages)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    safety_identifier: str | None = None
    prediction: Prediction | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    include_reasoning: bool = True

    @model_validator(mode="after")
    def check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "'top_logprobs' needs 'logprobs': true.", param="top_logprobs", code="invalid_value")
        return self

    @property
    def n_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        """Return the most tokens of the reply, which is the smaller of the two parameters for it."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given, default=None)


class CompletionRequest(CommonRequest):
    """Holds a request to POST /v1/completions."""

    neutral: ClassVar[Neutral] = {"best_of": (1,), "prompt_logprobs": (), "suffix": ("",)}
    prompt: Annotated[list[Prompt], BeforeValidator(read_prompts)]
    max_tokens: int | None = Field(16, ge=0)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs

    @model_validator(mode="after")
    def check_n_choices(self) -> CompletionRequest:
        if self.max_tokens == 0 and self.logprobs is not None:
            message = "'logprobs' are those of the reply, not of the prompt; leave it out with 'max_tokens': 0."
            raise ApiError(400, message, param="logprobs", code="unsupported_value")
        if len(self.prompt) * self.n > MOST_CHOICES:
            message = (
                f"{len(self.prompt)} prompts with n={self.n} ask for more than {MOST_CHOICES} replies; send several "
                "requests."
            )
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return self
