"""Reads requests of clients of llama.cpp's server, and returns each as a completion that means the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from hybridmem.chat.server.checked import ANY, Checked, Neutral
from hybridmem.chat.server.embedding import Pooling
from hybridmem.chat.server.sampled import SamplingFields
from hybridmem.chat.server.schema import CompletionRequest, Message, Prompt, read_prompts
from hybridmem.chat.server.template_fields import TemplateFields

_OURS = ("stream", "user", "prompt_cache_key", "cache_salt", "return_progress")
_FORMS = ("grammar", "json_schema")


def _read_length(value: object) -> object:
    return None if type(value) is int and value < 0 else value


class LlamaCompletion(SamplingFields):
    """Holds a request to POST /completion. Its sampling parameters have the same names as in chats.

    Attributes:
        slot: the name by which the prefix can be saved later. A number below 0 means any slot, which is 0 here.
        timings_per_token: whether each event of a stream has the times so far.
    """

    neutral: ClassVar[Neutral] = {
        "lora": ([],),
        "response_fields": ([],),
        "return_tokens": ANY,  # Tokens are always returned.
        "t_max_predict_ms": (0,),
    }
    noted: ClassVar[Mapping[str, str]] = {
        "samplers": "samplers have one order here",
        "t_max_predict_ms": "give 'deadline_seconds'",
    }
    aliases: ClassVar[dict[str, str]] = SamplingFields.aliases | {"max_tokens": "n_predict", "id_slot": "slot"}
    left_out: tuple[str, ...] = ()
    model: str | None = None
    prompt: Annotated[list[Prompt], BeforeValidator(read_prompts)] = Field(default_factory=list)
    n_predict: Annotated[int | None, Field(ge=0), BeforeValidator(_read_length)] = None
    n_probs: int = 0
    stream: bool = False
    grammar: str | None = None
    json_schema: dict[str, Any] | bool | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    return_progress: bool = False
    slot: int = 0
    timings_per_token: bool = False

    def as_completion(self, model: str) -> CompletionRequest:
        """Return the same request in the form of OpenAI's clients.

        Args:
            model: the name of the model, if the request names none.
        """
        fields = {name: getattr(self, name) for name in (*_OURS, *_FORMS)}
        fields |= {name: getattr(self, name) for name in SamplingFields.model_fields if name in self.model_fields_set}
        fields |= {"stop": list(self.stop), "stop_token_ids": list(self.stop_token_ids)}
        fields["logit_bias"] = {str(token): bias for token, bias in self.logit_bias.items()}
        fields |= {"model": self.model or model, "prompt": self.prompt, "max_tokens": self._most_tokens}
        fields |= {"logprobs": self.n_probs} if self.n_probs else {}
        return CompletionRequest.read(fields).model_copy(update={"left_out": self.left_out})

    @property
    def _most_tokens(self) -> int:
        return -1 if self.n_predict is None else self.n_predict


class Infill(LlamaCompletion):
    """Holds a request to POST /infill: the text before and after a gap."""

    neutral: ClassVar[Neutral] = {"input_extra": ([],)}
    prompt: str = ""  # type: ignore[assignment]
    input_prefix: str
    input_suffix: str


class LlamaEmbedding(Checked):
    """Holds a request to POST /embedding, and to /embeddings without /v1."""

    neutral: ClassVar[Neutral] = {"embd_normalize": (2,), "encoding_format": ("float",)}
    aliases: ClassVar[dict[str, str]] = {"input": "content"}
    model: str | None = None
    content: Annotated[list[Prompt], BeforeValidator(read_prompts)]
    pooling: Pooling | None = None


class ApplyTemplate(TemplateFields):
    """Holds a request to POST /apply-template."""

    neutral: ClassVar[Neutral] = {"model": ANY, "stream": ANY}
    messages: list[Message] = Field(min_length=1)
