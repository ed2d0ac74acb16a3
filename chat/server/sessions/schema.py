"""Reads requests about stored sessions, of OpenAI's Responses and Conversations and of this server's own API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, cast

from pydantic import BeforeValidator, Field, model_validator

from hybridmem.chat.server.checked import ANY
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.schema import Checked, CommonRequest, Neutral, read_max_tokens
from hybridmem.chat.server.sessions.input import read_input, read_items, split_items
from hybridmem.chat.server.structured import read_format
from hybridmem.chat.server.template_fields import TemplateFields
from hybridmem.chat.stored.nodes import Item
from hybridmem.chat.tools.grammars import Shape

MOST_TITLE = 200
_MOST_METADATA = 16


def _read_metadata(value: object) -> object:
    """Check metadata by OpenAI's limits."""
    if not isinstance(value, dict) or len(value) > _MOST_METADATA:
        raise ValueError(f"it must be an object with at most {_MOST_METADATA} keys")
    for name, text in value.items():
        if len(name) > 64 or not isinstance(text, str) or len(text) > 512:
            raise ValueError("keys have at most 64 characters, and values are strings of at most 512")
    return value


def _read_conversation(value: object) -> object:
    """Read a conversation's id, given as a string or in an object."""
    given = value.get("id") if isinstance(value, dict) and len(value) == 1 else value
    if not isinstance(given, str):
        raise ValueError("it must be an id, or {'id': ...}")
    return given


Metadata = Annotated[dict[str, str], BeforeValidator(_read_metadata)]
Items = Annotated[list[Item], BeforeValidator(read_items)]
Title = Annotated[str, Field(max_length=MOST_TITLE)]


@dataclass(frozen=True)
class TextForm:
    """Holds the field `text`: the form of a reply, as this server reads it and as the client wrote it."""

    shape: Shape | None = None
    raw: dict[str, Any] = field(default_factory=lambda: {"type": "text"})


def _read_text(value: object) -> object:
    """Read the `text` of a response, which names its format. Verbosity has no effect on these models."""
    if isinstance(value, TextForm):
        return value
    if not isinstance(value, dict) or value.keys() - {"format", "verbosity"}:
        raise ValueError("it must be {'format': ...}")
    given = value.get("format") or {"type": "text"}
    return TextForm(cast("Shape | None", read_format(given)), given)


class Reasoning(Checked):
    """Holds the `reasoning` of a response. Thoughts are not summarized, but sent in full."""

    neutral: ClassVar[Neutral] = {"context": ANY, "generate_summary": ANY, "mode": ANY, "summary": ANY}
    effort: str | None = None


class SampledRequest(CommonRequest, TemplateFields):
    """Holds the fields that all requests for a stored reply have in common, with the names of Responses."""

    neutral: ClassVar[Neutral] = {
        "background": (False,),
        "include": ([], ["reasoning.encrypted_content"]),
        "n": (1,),
        "prompt": (),
        "prompt_logprobs": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    }
    noted: ClassVar[Mapping[str, str]] = {
        "context_management": "no context is shortened here",
        "include": "replies include what they always do",
        "max_tool_calls": "this server calls no tools itself",
        "truncation": "nothing is left out of a prompt: one that is too long is refused",
    }
    effort_param: ClassVar[str] = "reasoning.effort"
    instructions: str | None = None
    text: Annotated[TextForm, BeforeValidator(_read_text)] = Field(default_factory=TextForm)
    max_output_tokens: Annotated[int | None, Field(ge=1), BeforeValidator(read_max_tokens)] = None
    metadata: Metadata = Field(default_factory=dict)
    safety_identifier: str | None = None
    reasoning: Reasoning = Field(default_factory=Reasoning)

    @classmethod
    def simplify(cls, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        fields, left_out = super().simplify(fields)
        text = fields.get("text")
        if isinstance(text, dict) and text.get("verbosity") not in (None, "medium"):
            left_out.append("text.verbosity: this model has no such setting")
        return fields, left_out

    @model_validator(mode="after")
    def check_forms(self) -> SampledRequest:
        if self.text.shape is not None and self.shape is not None:
            message = f"'text' and '{self.shape.name}' both say what form the reply has; leave out one."
            raise ApiError(400, message, param=self.shape.name, code="invalid_value")
        return self

    @property
    def form(self) -> Shape | None:
        """Return the form that a reply must have, whichever field asked for it."""
        return self.text.shape or self.shape

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort if self.reasoning.effort is None else self.reasoning.effort


class ResponseRequest(SampledRequest):
    """Holds a request to POST /v1/responses."""

    input: Annotated[list[Item], BeforeValidator(read_input)] = Field(default_factory=list)
    previous_response_id: str | None = None
    conversation: Annotated[str, BeforeValidator(_read_conversation)] | None = None
    store: bool = True

    @classmethod
    def simplify(cls, fields: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        fields, left_out = super().simplify(fields)
        kept, others = split_items(fields.get("input"))
        return (fields | {"input": kept} if others else fields), left_out + others

    @model_validator(mode="after")
    def check_history(self) -> ResponseRequest:
        if self.conversation is not None and self.previous_response_id is not None:
            message = "'conversation' and 'previous_response_id' both name a history; leave out one of them."
            raise ApiError(400, message, param="conversation", code="invalid_value")
        if self.conversation is not None and not self.store:
            message = "A reply in a conversation is stored in it; leave out 'store', or 'conversation'."
            raise ApiError(400, message, param="store", code="invalid_value")
        if not self.input and self.conversation is None and self.previous_response_id is None:
            raise ApiError(
                400, "Missing required parameter: 'input'.", param="input", code="missing_required_parameter"
            )
        return self


class OwnedRequest(Checked):
    """Holds the fields that identify the sender of a request, in addition to the key."""

    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    cache_salt: Annotated[str | None, Field(min_length=1)] = None
    user: str | None = None


class ConversationRequest(OwnedRequest):
    """Holds a request to POST /v1/conversations, or to a conversation."""

    items: Items = Field(default_factory=list)
    metadata: Metadata | None = None


class ItemsRequest(OwnedRequest):
    neutral: ClassVar[Neutral] = {"include": ([],)}
    items: Annotated[Items, Field(min_length=1)]


class SessionRequest(OwnedRequest):
    title: Title | None = None
    instructions: str | None = None
    metadata: Metadata | None = None


class HeadRequest(OwnedRequest):
    node: str


class PinRequest(OwnedRequest):
    seconds_to_live: float | None = Field(None, gt=0, le=10 * 365 * 86400)


class EditRequest(SampledRequest):
    """Holds a request for an edited copy of a message, and perhaps for a reply to it."""

    model: str = ""
    node: str
    content: Any
    item: str | None = None
    answer: bool = False


class RegenerateRequest(SampledRequest):
    model: str = ""
    node: str


class ForkRequest(SampledRequest):
    """Holds a request for a new session that continues from a node, or for a reply that begins as another one does."""

    model: str = ""
    node: str
    token: int | None = Field(None, ge=0)
    title: Title | None = None
    answer: bool = False
