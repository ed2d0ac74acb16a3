"""Answers POST /v1/embeddings.

The embedding of an input is its last hidden state, or the mean over all of its tokens.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server.checked import Checked, read_request
from hybridmem.chat.server.errors import ApiError, ContextError, stopping
from hybridmem.chat.server.guard import exchange_of
from hybridmem.chat.server.lengths import check_lists
from hybridmem.chat.server.schema import Prompt, read_prompts
from hybridmem.chat.server.service import Service
from hybridmem.memory import CapacityError
from hybridmem.models.layers.decoder import HIDDEN_STATES

Pooling = Literal["last", "mean"]
MOST_INPUTS = 2048
"""A request may have this many inputs. This is OpenAI's limit."""


def _read_inputs(value: object) -> list[Prompt]:
    """Read one input or several. Inputs are computed one at a time, so a request may have many."""
    return read_prompts(value, most=MOST_INPUTS)


class EmbeddingsRequest(Checked):
    """Holds the texts to embed. The field `pooling` is not OpenAI's."""

    model: str
    input: Annotated[list[Prompt], BeforeValidator(_read_inputs)]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)
    pooling: Pooling | None = None
    user: str | None = None


def find_pooling(folder: Path | None) -> Pooling | None:
    """Return the pooling that a checkpoint names in the file of sentence-transformers. None: it names none."""
    try:
        told = json.loads((folder / "1_Pooling" / "config.json").read_text()) if folder is not None else {}
    except (OSError, ValueError):
        return None
    if told.get("pooling_mode_mean_tokens"):
        return "mean"
    return "last" if told.get("pooling_mode_lasttoken") else None


class Embedding:
    """Computes embeddings between the engine's steps, one chunk of an input at a time, so that replies go on.

    Args:
        pooling: the model's pooling. None: requests must name it.
    """

    def __init__(self, service: Service, pooling: Pooling | None) -> None:
        self._service = service
        self._pooling = pooling
        self._turn = asyncio.Lock()

    async def embed(self, request: Request) -> Response:
        asked, vectors, n_tokens = await self.compute(request, partial(read_request, EmbeddingsRequest))
        return JSONResponse(self._answer(asked, vectors, n_tokens))

    async def compute(
        self, request: Request, read: Callable[[bytes], EmbeddingsRequest]
    ) -> tuple[EmbeddingsRequest, list[np.ndarray[Any, Any]], int]:
        """Read a request, in whatever dialect, and return it, its embeddings, and how many tokens it has.

        Raises ApiError.
        """
        body = await request.body()
        service, exchange = self._service, exchange_of(request.scope)
        asked, inputs = await service.texts.run(len(body), lambda texts: self._read(texts, body, read), param="input")
        pooling = self._check(asked)
        exchange.take_place()
        vectors = []
        for token_ids in inputs:
            if not service.is_open:  # There may be many inputs, so the server may stop in between.
                raise stopping()
            # Inputs are computed one after the other. Each may use all of the memory's free room.
            async with self._turn:
                vectors.append(await asyncio.to_thread(self._compute, token_ids, pooling))
        n_tokens = sum(map(len, inputs))
        exchange.charge({"prompt_tokens": n_tokens, "total_tokens": n_tokens})
        return asked, vectors, n_tokens

    def _read(
        self, texts: Tokenizer, body: bytes, read: Callable[[bytes], EmbeddingsRequest]
    ) -> tuple[EmbeddingsRequest, list[list[int]]]:
        check_lists(body, self._service.context_tokens, param="input")
        asked = read(body)
        self._service.check_model(asked.model)
        inputs = [self._service.encode(texts.for_another_prompt(), prompt, "input") for prompt in asked.input]
        most = self._service.context_tokens
        if too_long := [len(ids) for ids in inputs if len(ids) > most]:
            raise ContextError(too_long[0], most, param="input")
        return asked, inputs

    def _check(self, asked: EmbeddingsRequest) -> Pooling:
        """Return how to pool.

        Raises ApiError if neither the request nor the model names a pooling, or if the model cannot do it.
        """
        model, name = self._service.engine.model, self._service.model_id
        if not getattr(model, "gives_hidden_states", False):
            message = f"{name!r} gives no hidden states, so it cannot embed; choose a decoder."
            raise ApiError(400, message, param="model", code="model_cannot_embed")
        pooling = asked.pooling or self._pooling
        if pooling is None:
            message = (
                f"{name!r} says nothing of how it embeds; give 'pooling': 'last' or 'mean' in the request, or start "
                "the server with --pooling."
            )
            raise ApiError(400, message, param="pooling", code="model_cannot_embed")
        size = getattr(model.config, "hidden_size", None)
        if asked.dimensions is not None and asked.dimensions != size:
            message = (
                f"Unsupported parameter: 'dimensions'; this model's embeddings have {size} numbers, so leave it out."
            )
            raise ApiError(400, message, param="dimensions", code="unsupported_parameter")
        return pooling

    def _compute(self, token_ids: list[int], pooling: Pooling) -> np.ndarray[Any, Any]:
        """Return the embedding, normalised to length 1 as OpenAI's are. Between two chunks, it waits for the engine."""
        engine = self._service.engine
        size, total = engine.step_tokens, torch.zeros(())
        with engine.lock:
            sequence = engine.memory.open()
        try:
            for start in range(0, len(token_ids), size):
                chunk = token_ids[start : start + size]
                outputs: Literal["last", "all"] = "all" if pooling == "mean" else "last"
                with engine.lock, engine.memory.step({sequence: chunk}, outputs=outputs) as step:
                    step.notes[HIDDEN_STATES] = True
                    rows_TM = engine.model(step).float()
                total = rows_TM.sum(0) + total if pooling == "mean" else rows_TM[-1]
        except CapacityError:
            raise ApiError(503, "The memory cannot hold this now; try again.", code="out_of_memory") from None
        finally:
            with engine.lock:
                engine.memory.close(sequence)
        return np.asarray(torch.nn.functional.normalize(total, dim=0).cpu(), np.float32)

    def _answer(self, asked: EmbeddingsRequest, vectors: list[np.ndarray[Any, Any]], n_tokens: int) -> dict[str, Any]:
        def written(vector: np.ndarray[Any, Any]) -> object:
            if asked.encoding_format == "base64":
                return base64.b64encode(vector.astype("<f4").tobytes()).decode()
            return vector.tolist()

        data = [{"object": "embedding", "index": i, "embedding": written(v)} for i, v in enumerate(vectors)]
        usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        return {"object": "list", "data": data, "model": self._service.model_id, "usage": usage}
