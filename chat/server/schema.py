"""Reads requests in OpenAI's words, and refuses what they cannot mean.

No parameter is ignored in silence: one that is not supported is refused by name, unless its value changes nothing.
`user` and `safety_identifier` name the end user: they are read, change nothing and are not stored. `prompt_cache_key`
separates cached prefixes.
"""

from __future__ import annotations

import hashlib
import reprlib
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from chat.decoding.sampling import Sampling
from chat.server.bodies import has_more_values
from chat.server.errors import ApiError, clip
from chat.server.options import MOST_CHOICES

MOST_STOPS = 4
MOST_STOP_CHARACTERS = 256
MOST_VALUES = 32_768
"""Objects, arrays and keys of one body: Python makes something of each while everybody waits."""
MOST_MESSAGES = 4096
_COLDEST = 1e-4
"""Temperatures below are 0: divided by them, logits would leave the range of float32."""

Prompt = str | list[int]
Neutral = dict[str, tuple[object, ...]]
ModelT = TypeVar("ModelT", bound="Checked")


def read_request(model: type[ModelT], body: bytes) -> ModelT:
    """Read a request's body. Raises ApiError 400, naming the parameter."""
    if has_more_values(body, MOST_VALUES):
        message = (
            f"The body has more than {MOST_VALUES:,} objects, arrays and keys; send fewer messages, or join their "
            "parts."
        )
        raise ApiError(400, message, code="invalid_json")
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(400, f"The body is no valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"The body must be a JSON object, not {_kind(value)}.", code="invalid_json")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0]) from None


def _explain(detail: ErrorDetails) -> ApiError:
    kind, given = detail["type"], reprlib.repr(detail["input"])
    where = [*detail["loc"], *([detail["ctx"]["name"]] if kind in ("unknown", "unsupported") else [])]
    param = clip("".join(f"[{part}]" if isinstance(part, int) else f".{clip(part)}" for part in where).lstrip("."))
    if kind == "unknown":
        return ApiError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if kind == "missing":
        return ApiError(400, f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    if kind == "unsupported":
        return ApiError(
            400, f"Unsupported parameter: '{param}' {detail['msg']}.", param=param, code="unsupported_parameter"
        )
    why = str(detail["ctx"]["error"]) if kind == "value_error" else detail["msg"]
    return ApiError(400, f"Invalid '{param}': {why}; got {given}.", param=param, code="invalid_value")


class Checked(BaseModel):
    """Reads a JSON object whose every field is known and has the right type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    neutral: ClassVar[Neutral] = {}
    """Parameters that are not supported -> values of theirs that change nothing, beside null."""

    @model_validator(mode="before")
    @classmethod
    def drop_neutral(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        unknown = next((name for name in value if name not in cls.model_fields and name not in cls.neutral), None)
        if unknown is not None:  # the first of perhaps very many, each of which would cost an error of its own
            raise PydanticCustomError("unknown", "is unknown", {"name": unknown})
        for name, harmless in cls.neutral.items():
            given = value.get(name)
            if given is not None and not any(type(given) is type(v) and given == v for v in harmless):
                rest = f"; leave it out, or give {' or '.join(map(repr, harmless))}" if harmless else "; leave it out"
                raise PydanticCustomError("unsupported", "is not supported here{rest}", {"name": name, "rest": rest})
        return {name: v for name, v in value.items() if v is not None and name not in cls.neutral}


def _read_stop(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(_is_stop(stop) for stop in stops):
        raise ValueError(
            f"it must be a string or up to {MOST_STOPS} of them, each of 1 to {MOST_STOP_CHARACTERS} characters"
        )
    return tuple(stops)


def _is_stop(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_STOP_CHARACTERS


def _read_content(value: object) -> str:
    """Read a message's text, given whole or in parts, which are joined as they are."""
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


def _read_prompts(value: object) -> list[Prompt]:
    """Read one prompt or several, each a text or token ids."""
    if isinstance(value, str) or _are_ids(value):
        return [value]  # type: ignore[list-item]
    if isinstance(value, list) and len(value) > MOST_CHOICES and not isinstance(value[0], int):
        raise ValueError(
            f"more than {MOST_CHOICES} prompts ask for more than {MOST_CHOICES} replies; send several requests"
        )
    if isinstance(value, list) and value and all(isinstance(v, str) or _are_ids(v) for v in value):
        return value
    raise ValueError("it must be a string, a list of token ids, or a list of either")


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}


class StreamOptions(Checked):
    # Obfuscation hides the lengths of pieces from observers of an encrypted connection; this server does not encrypt.
    neutral: ClassVar[Neutral] = {"include_obfuscation": (False, True)}
    include_usage: bool = False


class Message(Checked):
    neutral: ClassVar[Neutral] = {
        "name": (),
        "refusal": (),
        "tool_calls": ([],),
        "function_call": (),
        "audio": (),
        "annotations": ([],),
    }
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_read_content)]

    def as_template_knows(self) -> dict[str, str]:
        """Return the message as templates know it: "developer" is what "system" used to be called."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class CommonRequest(Checked):
    """Holds what requests for replies have in common. `top_k` and `repetition_penalty` are not OpenAI's."""

    model: str
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=1, le=2**31)
    repetition_penalty: float = Field(1.0, ge=0.1, le=10)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Annotated[tuple[str, ...], BeforeValidator(_read_stop)] = ()
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

    def owner(self, authorization: str | None) -> bytes:
        """Return the owner of this request's prefixes: those with the same key and `prompt_cache_key`."""
        return hashlib.sha256(repr((authorization, self.prompt_cache_key)).encode()).digest()

    def sampling(self, choice: int) -> Sampling:
        """Return the sampling of choice n: each has a seed of its own, and all are known if the request's seed is."""
        return Sampling(
            temperature=self.temperature if self.temperature >= _COLDEST else 0.0,
            top_k=self.top_k,
            top_p=self.top_p,
            repetition_penalty=self.repetition_penalty,
            seed=None if self.seed is None else self.seed + choice,
        )


_PENALTIES: Neutral = {"presence_penalty": (0, 0.0), "frequency_penalty": (0, 0.0), "logit_bias": ({},)}


def _check_n_messages(value: object) -> object:
    if isinstance(value, list) and len(value) > MOST_MESSAGES:
        raise ValueError(f"it has {len(value):,} messages; {MOST_MESSAGES:,} are possible")
    return value


class ChatRequest(CommonRequest):
    """Holds a request to POST /v1/chat/completions."""

    neutral: ClassVar[Neutral] = {
        **_PENALTIES,
        "audio": (),
        "function_call": ("none", "auto"),
        "functions": ([],),
        "logprobs": (False,),
        "metadata": ({},),
        "modalities": (["text"],),
        "parallel_tool_calls": (True, False),  # there are no tools
        "prediction": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "top_logprobs": (0,),
        "verbosity": (),
        "web_search_options": (),
    }
    messages: Annotated[list[Message], FailFast(), Field(min_length=1), BeforeValidator(_check_n_messages)]
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    safety_identifier: str | None = None

    @property
    def wanted_tokens(self) -> int | None:
        """Return the most tokens of the reply: the smaller of the two parameters for it."""
        given = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return min(given, default=None)


class CompletionRequest(CommonRequest):
    """Holds a request to POST /v1/completions."""

    neutral: ClassVar[Neutral] = {**_PENALTIES, "best_of": (1,), "logprobs": (), "suffix": ("",)}
    prompt: Annotated[list[Prompt], BeforeValidator(_read_prompts)]
    max_tokens: int | None = Field(16, ge=0)
    echo: bool = False

    @model_validator(mode="after")
    def check_n_choices(self) -> CompletionRequest:
        if len(self.prompt) * self.n > MOST_CHOICES:
            message = (
                f"{len(self.prompt)} prompts with n={self.n} ask for more than {MOST_CHOICES} replies; send several "
                "requests."
            )
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return self


def _kind(value: Any) -> str:
    return {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
