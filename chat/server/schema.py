"""Reads requests in OpenAI's form, and refuses those that cannot be fulfilled.

No parameter is ignored silently. An unsupported parameter is refused by name, unless its value has no effect or is
harmless. If it is harmless, the reply says that it was left out. `user` and `safety_identifier` name the end user, and
`prompt_cache_key` says which requests are alike: they are read, but change nothing and are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast, Field, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from hybridmem.chat.sampling.logprobs import MOST_LOGPROBS
from hybridmem.chat.server.checked import ANY, MOST_VALUES, Checked, Neutral, read_request
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.options import MOST_CHOICES
from hybridmem.chat.server.pictures import NOTHING, Seen, mark_part, sees
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

UNSEEN_IMAGE = "[an image, which this model cannot see]"
"""Stands in a result of a tool for an image. If such a result were refused, its session could never go on."""
_PARTS = ("text", "input_text", "output_text", "refusal")
_OF_PARTS = ("annotations", "cache_control", "logprobs")
"""Fields of a part that change nothing."""


def _read_content(value: object) -> str:
    """Read a message's text, given whole or in parts. Parts are joined as they are."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("it must be a string, or a list of {'type': 'text', 'text': ...}")
    return "".join(map(_read_part, value))


def _read_part(part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(part, dict) and _is_image(part):
        return mark_part(part)
    if not isinstance(part, dict) or kind not in _PARTS:
        raise ValueError("only parts of the type 'text' are supported, such as {'type': 'text', 'text': ...}")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str) or part.keys() - {"type", "text", "refusal", *_OF_PARTS}:
        raise ValueError("a part of the type 'text' has a string as its 'text', and nothing else")
    return text


def _is_image(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in ("image", "image_url", "input_image")


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


def read_max_tokens(value: object) -> object:
    """Read the most tokens of a reply. -1 stands for as many as fit, as in llama.cpp's server."""
    return None if type(value) is int and value == -1 else value


class StreamOptions(Checked):
    # Obfuscation would hide the lengths of pieces from observers of an encrypted connection. This server sends no
    # obfuscation.
    neutral: ClassVar[Neutral] = {"include_obfuscation": (False, True)}
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Message(Checked):
    neutral: ClassVar[Neutral] = {
        "annotations": ANY,
        "audio": (),
        "cache_control": ANY,
        "function_call": (),
        "id": ANY,
        "provider_specific_fields": ANY,  # The client litellm sends this field back as it received it.
        "reasoning_details": ANY,  # This is OpenRouter's form of thoughts, which comes in addition to their text.
        "refusal": ANY,
        "status": ANY,
        "thinking_blocks": ANY,  # This is litellm's form of thoughts, which comes in addition to their text.
    }
    aliases: ClassVar[dict[str, str]] = {"reasoning": "reasoning_content"}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_read_content)] = ""
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], BeforeValidator(read_calls)] = Field(default_factory=list)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def read_contents(cls, value: object) -> object:
        """Let a message without text have `null` as its content.

        In results of tools, replace images by a text if the model reads text alone.
        """
        content = value.get("content", "") if isinstance(value, dict) else ""
        if not isinstance(value, dict) or not (content is None or isinstance(content, list)):
            return value
        if content is None:
            return {**value, "content": ""}
        if value.get("role") != "tool" or sees():
            return value
        told = {"type": "text", "text": UNSEEN_IMAGE}
        return {**value, "content": [told if _is_image(part) else part for part in content]}

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
    """Holds the fields that all requests for replies have in common.

    Attributes:
        left_out: what is accepted but not carried out, and why. A reply lists it in "hybrid_memory".
        cache_salt: requests share cached prefixes only with those that have the same salt, as in vLLM.
    """

    neutral: ClassVar[Neutral] = {
        "cache_control": ANY,
        "client_metadata": ANY,
        "prompt_cache_retention": ANY,
        "request_id": ANY,
        "service_tier": ANY,
    }
    model: str
    left_out: tuple[str, ...] = ()
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    return_progress: bool = False
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: Annotated[str | None, Field(min_length=1)] = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def n_prompt_logprobs(self) -> int | None:
        """Return how many alternatives are reported for tokens of the prompt. None: the prompt is not scored."""
        return self.prompt_logprobs

    @model_validator(mode="after")
    def check_prompt_logprobs(self) -> CommonRequest:
        if self.prompt_logprobs is not None and self.stream:
            message = "'prompt_logprobs' come with a whole reply alone; leave it out with 'stream': true."
            raise ApiError(400, message, param="prompt_logprobs", code="unsupported_value")
        return self

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


class Prediction(Checked):
    """Holds a text that most of the reply is expected to repeat. The reply comes sooner if the text is right."""

    type: Literal["content"]
    content: Annotated[str, BeforeValidator(_read_content)]


def _check_n_messages(value: object) -> object:
    if isinstance(value, list) and len(value) > MOST_MESSAGES:
        raise ValueError(f"it has {len(value):,} messages; {MOST_MESSAGES:,} are possible")
    return value


class ChatRequest(CommonRequest, TemplateFields):
    """Holds a request to POST /v1/chat/completions.

    Attributes:
        continue_final_message: whether the reply continues the last message, which is the beginning of a reply.
    """

    neutral: ClassVar[Neutral] = {
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "metadata": ANY,
        "modalities": (["text"],),
        "store": (False,),
        "documents": ([],),
        "echo": (False,),
        "reasoning_format": ("auto", "deepseek"),
        "verbosity": ("medium",),
        "web_search_options": (),
    }
    noted: ClassVar[Mapping[str, str]] = {
        "store": "chats are not stored; /v1/responses stores",
        "verbosity": "this model has no such setting",
        "web_search_options": "this server searches nothing",
    }
    messages: Annotated[list[Message], FailFast(), Field(min_length=1), BeforeValidator(_check_n_messages)]
    max_tokens: Annotated[int | None, Field(ge=0), BeforeValidator(read_max_tokens)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=0), BeforeValidator(read_max_tokens)] = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    safety_identifier: str | None = None
    prediction: Prediction | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LOGPROBS)
    include_reasoning: bool = True
    _seen: Seen = PrivateAttr(default_factory=lambda: NOTHING)  # A default would be copied for each request.

    @property
    def seen(self) -> Seen:
        """Return the pictures of the messages. Their rows are kept as long as the request."""
        return self._seen

    def hold(self, seen: Seen) -> None:
        self._seen = seen

    @model_validator(mode="after")
    def check_logprobs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "'top_logprobs' needs 'logprobs': true.", param="top_logprobs", code="invalid_value")
        return self

    @model_validator(mode="after")
    def check_opening(self) -> ChatRequest:
        last = self.messages[-1]
        if self.continue_final_message and (last.role != "assistant" or last.tool_calls):
            message = "'continue_final_message' needs a last message of the role 'assistant' that calls no tools."
            raise ApiError(400, message, param="continue_final_message", code="invalid_value")
        if not self.add_generation_prompt and not self.continue_final_message:
            message = "'add_generation_prompt': false is possible with 'continue_final_message': true alone."
            raise ApiError(400, message, param="add_generation_prompt", code="unsupported_value")
        return self

    @property
    def n_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        """Return the most tokens of the reply, which is the smaller of the two parameters for that number."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given, default=None)


class CompletionRequest(CommonRequest):
    """Holds a request to POST /v1/completions."""

    neutral: ClassVar[Neutral] = {
        "best_of": (1,),
        "metadata": ANY,
        "store": ANY,
        "suffix": ("",),
    }
    prompt: Annotated[list[Prompt], BeforeValidator(read_prompts)]
    max_tokens: Annotated[int | None, Field(ge=0), BeforeValidator(read_max_tokens)] = 16
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    @property
    def n_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def n_prompt_logprobs(self) -> int | None:
        """Return how many alternatives are reported for tokens of the prompt. None: the prompt is not scored."""
        echoed = self.logprobs if self.echo else None
        wanted = [n for n in (echoed, self.prompt_logprobs) if n is not None]
        return max(wanted, default=None)

    @model_validator(mode="after")
    def check_n_choices(self) -> CompletionRequest:
        if len(self.prompt) * self.n > MOST_CHOICES:
            message = (
                f"{len(self.prompt)} prompts with n={self.n} ask for more than {MOST_CHOICES} replies; send several "
                "requests."
            )
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return self
