"""Answers /completion, /infill, /embedding, /apply-template, /props and /slots as llama.cpp's server does."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem import __version__
from hybridmem.chat.prompts import Tokenizer, render
from hybridmem.chat.server.checked import read_request
from hybridmem.chat.server.embedding import Embedding, EmbeddingsRequest
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.guard import exchange_of
from hybridmem.chat.server.llama_server.format import LlamaFormat
from hybridmem.chat.server.llama_server.schema import ApplyTemplate, Infill, LlamaCompletion, LlamaEmbedding
from hybridmem.chat.server.llama_server.slots import Slots
from hybridmem.chat.server.schema import CompletionRequest
from hybridmem.chat.server.service import Service
from hybridmem.memory import FormatError

_GAPS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""The tokens by which models were trained to fill gaps: before the prefix, before the suffix, before the middle."""


class LlamaServer:
    """Answers in the form of llama.cpp's server. `Service` checks the requests and generates the replies."""

    def __init__(self, service: Service, embedding: Embedding) -> None:
        self._service = service
        self._embedding = embedding
        self._slots = Slots(service)

    async def complete(self, request: Request) -> Response:
        body = await request.body()
        given = read_request(LlamaCompletion, body)
        if len(given.prompt) != 1:
            raise ApiError(400, "Give one 'prompt': a text, or token ids.", param="prompt", code="invalid_value")
        return await self._answer(request, given, given.as_completion(self._service.model_id))

    async def infill(self, request: Request) -> Response:
        """Fill the gap between two texts."""
        given = read_request(Infill, await request.body())
        texts = self._service.engine.tokenizer
        ids = [[texts.get_vocab().get(name) for name in names] for names in _GAPS] if texts is not None else []
        marks = next((found for found in ids if None not in found), None)
        if marks is None:
            message = "This model was not trained to fill gaps: its vocabulary has no tokens for that."
            raise ApiError(501, message, code="not_supported")

        def encode(texts: Tokenizer) -> list[int]:
            parts = [given.input_prefix, given.input_suffix, given.prompt]
            encoded = [list(texts.encode(part, add_special_tokens=False)) for part in parts]
            return [marks[0], *encoded[0], marks[1], *encoded[1], marks[2], *encoded[2]]

        prompt = await self._service.texts.run(len(await request.body()), encode)
        asked = given.model_copy(update={"prompt": [prompt]}).as_completion(self._service.model_id)
        return await self._answer(request, given, asked)

    async def _answer(self, request: Request, given: LlamaCompletion, asked: CompletionRequest) -> Response:
        service, slot = self._service, max(0, given.slot)
        _, (ask,) = await service.ask_completion(request, lambda _: asked)
        (prompt,) = asked.prompt
        text = prompt if isinstance(prompt, str) else ""
        form = LlamaFormat(
            asked.model, service.tokens, text, ask.output.end_ids, asked.logprobs is not None, slot,
            has_timings=given.timings_per_token,
            note=lambda token_ids: self._slots.note(ask.owner, slot, [*ask.token_ids, *token_ids]),
        )  # fmt: skip
        return await service.reply(exchange_of(request.scope), [ask], form, form if asked.stream else None)

    async def apply_template(self, request: Request) -> Response:
        """Return the text of a chat, without computing anything."""
        body = await request.body()

        def work(texts: Tokenizer) -> str:
            asked = read_request(ApplyTemplate, body)
            texts = asked.with_template(texts, self._service.shaping.habits.template)
            try:
                return render(texts, [message.as_template_knows() for message in asked.messages])
            except FormatError as error:
                raise ApiError(400, f"{error}.", param="messages", code="invalid_value") from None

        return JSONResponse({"prompt": await self._service.texts.run(len(body), work, param="messages")})

    async def props(self) -> Response:
        service = self._service
        texts, sampling = service.engine.tokenizer, service.asking.defaults
        params = {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
        params |= {"min_p": sampling.min_p, "repeat_penalty": sampling.repetition_penalty}
        settings: dict[str, Any] = {"n_ctx": service.context_tokens, "params": params}
        return JSONResponse({
            "default_generation_settings": settings, "total_slots": service.options.max_requests,
            "model_path": service.model_id, "model_alias": service.model_id,
            "chat_template": service.shaping.habits.template, "modalities": {"vision": False, "audio": False},
            "bos_token": getattr(texts, "bos_token", None) or "", "eos_token": getattr(texts, "eos_token", None) or "",
            "build_info": f"hybrid-memory {__version__}",
        })  # fmt: skip

    async def slots(self) -> Response:
        """List the requests that are being answered.

        There are no slots here, so each request's number serves as its slot.
        """
        n_running = self._service.engine.load.total
        about = {"n_ctx": self._service.context_tokens, "is_processing": True}
        return JSONResponse([{"id": i, **about} for i in range(n_running)])

    async def change_slot(self, request: Request, slot: int) -> Response:
        return await self._slots.change(request, slot)

    async def embed(self, request: Request) -> Response:
        """Return the pooled hidden states of texts, each as a list of one vector."""

        def read(body: bytes) -> EmbeddingsRequest:
            given = read_request(LlamaEmbedding, body)
            model = self._service.model_id if given.model is None else given.model
            fields = {"model": model, "input": given.content, "pooling": given.pooling}
            return EmbeddingsRequest.model_validate(fields)

        _, vectors, _ = await self._embedding.compute(request, read)
        return JSONResponse([{"index": i, "embedding": [vector.tolist()]} for i, vector in enumerate(vectors)])
