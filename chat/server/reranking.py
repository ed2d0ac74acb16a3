"""Answers POST /v1/rerank, which ranks documents by how well they answer a query.

A document is worth as much as the model expects the query after it: the likelihood of the query as a question that the
document answers (query likelihood; for language models, see Sachan et al. 2022, "Improving Passage Retrieval with
Zero-Shot Question Generation"). The document comes first in the prompt, so that a second query computes only itself.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem.chat.engine.output import Output
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server.chat_prompts import encode_messages
from hybridmem.chat.server.checked import Checked, Neutral, read_request
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.guard import exchange_of
from hybridmem.chat.server.lengths import check_length
from hybridmem.chat.server.replies import PromptRequest
from hybridmem.chat.server.scores import MOST_SCORED
from hybridmem.chat.server.service import Service
from hybridmem.chat.special_tokens import special_tokens_of
from hybridmem.memory import FormatError

INSTRUCTION = "Write a question or a search query that this text answers, and nothing else.\n\n"
"""Stands before the document in a chat. A model without a chat template reads `BASE` instead."""
BASE = "Text: {}\n\nA question that this text answers:"


def _read_documents(value: object) -> list[str]:
    """Read documents, which some clients send as objects with a text."""
    if not isinstance(value, list) or not value or len(value) > MOST_SCORED:
        raise ValueError(f"it must be a list of 1 to {MOST_SCORED} texts")
    texts = [each.get("text") if isinstance(each, dict) else each for each in value]
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("each document is a text, or an object with a 'text'")
    return [str(text) for text in texts]


class RerankRequest(Checked):
    """Holds a query and documents, as Jina's, Cohere's, vLLM's and llama.cpp's clients send them."""

    neutral: ClassVar[Neutral] = {"max_tokens_per_doc": (), "truncate_prompt_tokens": (), "priority": (0,)}
    aliases: ClassVar[dict[str, str]] = {"texts": "documents"}
    model: str | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str], BeforeValidator(_read_documents)]
    top_n: Annotated[int | None, Field(ge=1)] = None
    return_documents: bool = False
    prompt_cache_key: str | None = None
    user: str | None = None
    cache_salt: Annotated[str | None, Field(min_length=1)] = None


class Reranking:
    """Ranks documents. The engine only scores prompts, and generates no reply."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def rank(self, request: Request) -> Response:
        body, service = await request.body(), self._service
        asked, prompts, query = await service.texts.run(len(body), lambda texts: self._read(texts, body))
        owner = service.owners.of_prefixes(request.headers.get, asked)
        for prompt in prompts:
            check_length(len(prompt) + len(query), 0, None, service.context_tokens, param="documents")
        requests = [
            PromptRequest(
                [*prompt, *query], max_tokens=0, owner=owner,
                output=Output(prompt_logprobs=0, scored_from=len(prompt)),
                marks=(len(prompt) - 1,) if len(prompt) > 1 else (),
            )
            for prompt in prompts
        ]  # fmt: skip
        replies = await service.run(exchange_of(request.scope), requests)
        scores = [
            math.exp(sum(each.logprob or 0.0 for each in generation.prompt_logprobs) / len(query))
            for _, generation in sorted(replies.generations.items())
        ]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: asked.top_n]
        results = [self._result(i, scores[i], asked) for i in order]
        about = {"object": "list", "model": asked.model or service.model_id, "results": results}
        return JSONResponse(about | {"usage": replies.usage()})

    def _result(self, index: int, score: float, asked: RerankRequest) -> dict[str, Any]:
        document = {"document": {"text": asked.documents[index]}} if asked.return_documents else {}
        return {"index": index, "relevance_score": score, **document}

    def _read(self, texts: Tokenizer, body: bytes) -> tuple[RerankRequest, list[list[int]], list[int]]:
        """Read a request, and tokenise a prompt for each document, and the query. Raises ApiError."""
        asked = read_request(RerankRequest, body)
        if asked.model is not None:
            self._service.check_model(asked.model)
        prompts = [self._prompt(texts.for_another_prompt(), document) for document in asked.documents]
        if self._service.shaping.habits.template:
            query = special_tokens_of(texts, "assistant").encode_text(asked.query)
        else:
            query = list(texts.for_another_prompt().encode(f" {asked.query}", add_special_tokens=False))
        return asked, prompts, self._service.encode(texts, query, "query")

    def _prompt(self, texts: Tokenizer, document: str) -> list[int]:
        service = self._service
        if not service.shaping.habits.template:
            return service.encode(texts, BASE.format(document), "documents")
        message = {"role": "user", "content": INSTRUCTION + document}
        try:
            return encode_messages(texts, [message], parse_special=service.options.parse_special)
        except FormatError as error:
            raise ApiError(400, f"{error}.", param="documents", code="invalid_value") from None
