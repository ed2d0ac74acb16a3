"""Answers POST /v1/score: how likely each of several continuations of one prompt is.

The prompt is computed once. Each choice continues from a fork of it, so that its score is exactly the one that
computing the whole text would give.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem.chat.engine.engine import Generation
from hybridmem.chat.engine.output import Output
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.sampling.logprobs import Chosen
from hybridmem.chat.server.chat_prompts import encode_messages
from hybridmem.chat.server.checked import Neutral, read_request
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.guard import exchange_of
from hybridmem.chat.server.lengths import check_length, check_lists
from hybridmem.chat.server.logprobs import token_text
from hybridmem.chat.server.replies import PromptRequest
from hybridmem.chat.server.schema import Message, Prompt, read_prompts
from hybridmem.chat.server.service import Service
from hybridmem.chat.server.template_fields import TemplateFields
from hybridmem.chat.special_tokens import special_tokens_of
from hybridmem.memory import FormatError

MOST_SCORED = 256
"""A request may score this many choices."""


def _read_choices(value: object) -> list[Prompt]:
    if not isinstance(value, list) or not value or isinstance(value[0], int):
        raise ValueError("it must be a list of texts, or of lists of token ids")
    return read_prompts(value, most=MOST_SCORED)


class ScoreRequest(TemplateFields):
    """Holds a prompt, as text, token ids or messages, and its continuations.

    Attributes:
        choices: texts or token ids. Each text is encoded by itself.
    """

    neutral: ClassVar[Neutral] = {"text_1": (), "text_2": (), "queries": (), "documents": ()}
    model: str
    prompt: Annotated[list[Prompt] | None, BeforeValidator(read_prompts)] = None
    messages: list[Message] | None = None
    choices: Annotated[list[Prompt], BeforeValidator(_read_choices)]
    prompt_cache_key: str | None = None
    user: str | None = None
    cache_salt: Annotated[str | None, Field(min_length=1)] = None
    left_out: tuple[str, ...] = ()

    @model_validator(mode="after")
    def check_prompt(self) -> ScoreRequest:
        if (self.prompt is None) == (self.messages is None) or (self.prompt is not None and len(self.prompt) != 1):
            raise ApiError(400, "Give one 'prompt', or 'messages'.", param="prompt", code="invalid_value")
        return self


class Scores:
    """Scores choices. The engine only scores prompts, and generates no reply."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def score(self, request: Request) -> Response:
        body = await request.body()
        service, exchange = self._service, exchange_of(request.scope)
        asked, prompt, choices = await service.texts.run(len(body), lambda texts: self._read(texts, body))
        exchange.note_left_out([*asked.left_out, *asked.left_out_of(service.shaping.habits.template)])
        owner, output = (
            service.owners.of_prefixes(request.headers.get, asked),
            Output(prompt_logprobs=1, scored_from=len(prompt)),
        )
        for choice in choices:
            check_length(len(prompt) + len(choice), 0, None, service.context_tokens, param="choices")
        # The last token of the prompt is fed for each choice, since its output scores the choice's first token.
        marks = (len(prompt) - 1,) if len(prompt) > 1 else ()
        prompts = [
            PromptRequest([*prompt, *choice], max_tokens=0, owner=owner, output=output, marks=marks)
            for choice in choices
        ]
        replies = await service.run(exchange, prompts)
        generations = [generation for _, generation in sorted(replies.generations.items())]
        data = [self._data(i, asked.choices[i], generation) for i, generation in enumerate(generations)]
        best = max(range(len(data)), key=lambda i: data[i]["score"])
        about = {"object": "list", "model": asked.model, "data": data, "best": best, "usage": replies.usage()}
        return JSONResponse(about)

    def _read(self, texts: Tokenizer, body: bytes) -> tuple[ScoreRequest, list[int], list[list[int]]]:
        """Read a request, and the token ids of its prompt and of its choices. Raises ApiError."""
        check_lists(body, self._service.context_tokens, param="prompt")
        asked = read_request(ScoreRequest, body)
        self._service.check_model(asked.model)
        if asked.messages is None:
            assert asked.prompt is not None, "it was checked"
            prompt = self._service.encode(texts, asked.prompt[0], "prompt")
        else:
            template, parse_special = self._service.shaping.habits.template, self._service.options.parse_special
            try:
                messages = [message.as_template_knows() for message in asked.messages]
                prompt = encode_messages(asked.with_template(texts, template), messages, parse_special=parse_special)
            except FormatError as error:
                raise ApiError(400, f"{error}.", param="messages", code="invalid_value") from None
        return asked, prompt, [self._encode(texts, choice, is_reply=asked.prompt is None) for choice in asked.choices]

    def _encode(self, texts: Tokenizer, choice: Prompt, *, is_reply: bool) -> list[int]:
        """Return the token ids of a choice.

        If the choice is a reply to messages, names of special tokens in it are plain text.
        """
        if isinstance(choice, str) and is_reply:
            choice = special_tokens_of(texts, "assistant").encode_text(choice)
        elif isinstance(choice, str):
            choice = list(texts.for_another_prompt().encode(choice, add_special_tokens=False))
        return self._service.encode(texts, choice, "choices")

    def _data(self, index: int, choice: Prompt, generation: Generation) -> dict[str, Any]:
        scored: list[Chosen] = generation.prompt_logprobs
        logprobs = [each.logprob or 0.0 for each in scored]
        return {
            "object": "score",
            "index": index,
            "choice": choice,
            "score": sum(logprobs),
            "mean": sum(logprobs) / len(logprobs),
            "tokens": [token_text(self._service.tokens, each.token_id) for each in scored],
            "token_logprobs": logprobs,
            "is_greedy": all(getattr(each, "rank", 0) == 1 for each in scored),
        }
