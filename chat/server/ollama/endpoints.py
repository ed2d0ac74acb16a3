"""Answers Ollama's /api/chat, /api/generate, /api/tags, /api/show, /api/ps and /api/version."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hybridmem import __version__
from hybridmem.chat.server.checked import read_request
from hybridmem.chat.server.guard import exchange_of
from hybridmem.chat.server.ollama.format import OllamaFormat, now
from hybridmem.chat.server.ollama.schema import OllamaShow, read_chat, read_generate
from hybridmem.chat.server.service import Service

_LINES = "application/x-ndjson"


class Ollama:
    """Answers Ollama's clients in Ollama's form. `Service` checks their requests and generates the replies."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def chat(self, request: Request) -> Response:
        given = read_chat(await request.body())
        if not given.messages:
            return self._loaded(given.model, {"message": {"role": "assistant", "content": ""}})
        asked, prompt, new_reader = await self._service.ask_chat(request, lambda _: given.as_chat())
        form = OllamaFormat(given.model, True, self._service.tokens, new_reader)
        return await self._answer(request, [prompt], form, is_stream=asked.stream)

    async def generate(self, request: Request) -> Response:
        given = read_generate(await request.body())
        if not given.prompt:
            return self._loaded(given.model, {"response": ""})
        if given.raw:
            completion, prompts = await self._service.ask_completion(request, lambda _: given.as_completion())
            form = OllamaFormat(given.model, False, self._service.tokens, None)
            return await self._answer(request, prompts, form, is_stream=completion.stream)
        asked, prompt, new_reader = await self._service.ask_chat(request, lambda _: given.as_chat())
        form = OllamaFormat(given.model, False, self._service.tokens, new_reader)
        return await self._answer(request, [prompt], form, is_stream=asked.stream)

    async def tags(self) -> Response:
        """List the model in the form of pulled models, which is also that of running models."""
        return JSONResponse({"models": [self._model()]})

    async def show(self, request: Request) -> Response:
        asked = read_request(OllamaShow, await request.body())
        self._service.check_model(asked.model.removesuffix(":latest"))
        habits, spec = self._service.shaping.habits, self._service.engine.memory.spec
        name = str(getattr(self._service.engine.model.config, "model_type", spec.model))
        info = {
            "general.architecture": name,
            f"{name}.context_length": self._service.context_tokens,
            f"{name}.vocab_size": spec.vocab_size,
        }
        can = ["completion", *(["tools"] if habits.calls else []), *(["thinking"] if habits.thinks else [])]
        about = {"template": habits.template, "parameters": "", "modelfile": "", "license": ""}
        return JSONResponse(about | {"details": self._details(), "model_info": info, "capabilities": can})

    async def version(self) -> Response:
        return JSONResponse({"version": __version__})

    def _model(self) -> dict[str, Any]:
        counters, name = self._service.engine.memory.counters, self._service.model_id
        digest = str(self._service.engine.memory.spec.weights or "")
        about = {"name": name, "model": name, "modified_at": now(), "size": counters.budget_bytes, "digest": digest}
        return about | {"details": self._details(), "expires_at": "9999-12-31T23:59:59Z", "size_vram": 0}

    def _details(self) -> dict[str, Any]:
        spec = self._service.engine.memory.spec
        family = str(getattr(self._service.engine.model.config, "model_type", ""))
        quantised = str(spec.dtype).removeprefix("torch.")
        about = {"parent_model": "", "format": "", "family": family, "families": [family], "parameter_size": ""}
        return about | {"quantization_level": quantised}

    def _loaded(self, model: str, reply: dict[str, Any]) -> Response:
        """Answer a request without a prompt, which only loads a model."""
        self._service.check_model(model.removesuffix(":latest"))
        return JSONResponse({"model": model, "created_at": now(), **reply, "done": True, "done_reason": "load"})

    async def _answer(self, request: Request, prompts: list[Any], form: OllamaFormat, *, is_stream: bool) -> Response:
        exchange, writer = exchange_of(request.scope), form if is_stream else None
        return await self._service.reply(exchange, prompts, form, writer, media_type=_LINES)
