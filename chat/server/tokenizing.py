"""Answers POST /tokenize and /detokenize, as the servers of vLLM and llama.cpp do."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server.chat_prompts import encode_messages
from hybridmem.chat.server.checked import Checked, Neutral, read_request
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.lengths import check_lists
from hybridmem.chat.server.schema import Message
from hybridmem.chat.server.service import Service
from hybridmem.chat.server.template_fields import TemplateFields
from hybridmem.memory import FormatError

Ids = Annotated[list[int], Field(max_length=1 << 20)]


class TokenizeRequest(TemplateFields):
    """Holds the text to tokenise: vLLM's `prompt` or `messages`, or llama.cpp's `content` with its options."""

    neutral: ClassVar[Neutral] = {"continue_final_message": (False,), "chat_template": ()}
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    content: str | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False

    @model_validator(mode="after")
    def check_one(self) -> TokenizeRequest:
        if sum(given is not None for given in (self.prompt, self.messages, self.content)) != 1:
            message = "Give one of 'prompt', 'messages' and 'content'."
            raise ApiError(400, message, param="prompt", code="invalid_value")
        return self


class DetokenizeRequest(Checked):
    """Holds the tokens to turn into text."""

    model: str | None = None
    tokens: Ids


class Tokenizing:
    """Answers both requests in the threads of the tokenizer. The model is not used."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tokenize(self, request: Request) -> Response:
        body = await request.body()
        return await self._service.texts.run(len(body), lambda texts: self._tokenize(texts, body), param="prompt")

    async def detokenize(self, request: Request) -> Response:
        body = await request.body()
        return await self._service.texts.run(len(body), lambda texts: self._detokenize(texts, body))

    def _tokenize(self, texts: Tokenizer, body: bytes) -> Response:
        asked = read_request(TokenizeRequest, body)
        self._check(asked.model)
        ids = self._encode(texts, asked)
        if asked.content is not None:
            pieces = [{"id": i, "piece": self._text(texts, [i])} for i in ids] if asked.with_pieces else ids
            return JSONResponse({"tokens": pieces})
        names = texts.convert_ids_to_tokens(ids) if asked.return_token_strs else None
        found = {"count": len(ids), "max_model_len": self._service.context_tokens, "tokens": ids, "token_strs": names}
        return JSONResponse(found)

    def _encode(self, texts: Tokenizer, asked: TokenizeRequest) -> list[int]:
        if asked.messages is not None:
            if not asked.add_generation_prompt:
                message = "'add_generation_prompt': false is not supported here; leave it out."
                raise ApiError(400, message, param="add_generation_prompt", code="unsupported_parameter")
            try:
                texts = asked.with_template(texts, self._service.shaping.habits.template)
                return encode_messages(texts, [message.as_template_knows() for message in asked.messages])
            except FormatError as error:
                raise ApiError(400, f"{error}.", param="messages", code="invalid_value") from None
        if asked.content is not None:
            options: dict[str, Any] = {} if asked.parse_special else {"split_special_tokens": True}
            return list(texts.encode(asked.content, add_special_tokens=asked.add_special, **options))
        return list(texts.encode(asked.prompt, add_special_tokens=asked.add_special_tokens))

    def _detokenize(self, texts: Tokenizer, body: bytes) -> Response:
        check_lists(body, self._service.context_tokens, param="tokens")
        asked = read_request(DetokenizeRequest, body)
        self._check(asked.model)
        if asked.tokens and not (0 <= min(asked.tokens) and max(asked.tokens) < self._service.n_vocab):
            message = f"Invalid 'tokens': token ids must be 0 ... {self._service.n_vocab - 1}."
            raise ApiError(400, message, param="tokens", code="invalid_value")
        text = self._text(texts, asked.tokens)
        return JSONResponse({"prompt": text, "content": text})  # The first name is vLLM's, and the second llama.cpp's.

    def _text(self, texts: Tokenizer, ids: list[int]) -> str:
        return str(texts.decode(ids, skip_special_tokens=False))

    def _check(self, model: str | None) -> None:
        if model is not None:
            self._service.check_model(model)
