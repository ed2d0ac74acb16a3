"""Builds the ASGI app, and maps paths to the service."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server.agents.recording import Recorder
from hybridmem.chat.server.embedding import Embedding
from hybridmem.chat.server.error_forms import answer_api_error, answer_http_error
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.guard import RERANK_PATHS, Guard, takes_body
from hybridmem.chat.server.llama_server.endpoints import LlamaServer
from hybridmem.chat.server.messages.endpoints import Messages
from hybridmem.chat.server.ollama.endpoints import Ollama
from hybridmem.chat.server.options import ServerOptions
from hybridmem.chat.server.page_files import PREFIX, show_file, show_page
from hybridmem.chat.server.reranking import Reranking
from hybridmem.chat.server.scores import Scores
from hybridmem.chat.server.service import Service
from hybridmem.chat.server.sessions.keeping import keeping
from hybridmem.chat.server.sessions.pins import Pins
from hybridmem.chat.server.sessions.routes import session_routes
from hybridmem.chat.server.sessions.session_repository import SessionRepository
from hybridmem.chat.server.tokenizing import Tokenizing
from hybridmem.chat.server.warming import Warming
from hybridmem.chat.stored import SessionStore
from hybridmem.chat.stored.database import model_signature

_ASKED_BY_MONITORS = ("/health", "/metrics", "/v1/models", "/")
"""At these paths the server also answers HEAD. Load balancers use it to see whether a server is there."""


def make_app(engine: Engine, tokenizer: Tokenizer, model_id: str, options: ServerOptions | None = None) -> FastAPI:
    """Return an ASGI app that steps the engine from the app's start to its end.

    Args:
        tokenizer: the engine's tokenizer.
        model_id: the name by which clients call the model.
    Returns:
        The app. `app.state.service` is the `Service` that answers its requests, and `app.state.sessions` the repository
            of stored
        sessions.
    Raises:
        FormatError, MismatchError: as `chat.stored.database.open_database`, for the folder of sessions.
    """
    service = Service(engine, tokenizer, model_id, options or ServerOptions())
    store = SessionStore(service.options.sessions, partial(model_signature, engine.memory.spec, tokenizer))
    repository = SessionRepository(service, store)
    pins = Pins(repository)
    if service.options.trees:
        service.recorder = Recorder(repository)

    warming = Warming(service)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with keeping(repository, pins), service.lifespan(app):
            task = asyncio.create_task(warming.run())
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    app = FastAPI(
        title="hybrid-memory",
        lifespan=lifespan,
        # Endpoints parse bodies themselves, to report errors in OpenAI's form. So FastAPI's schema would be empty.
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers={ApiError: answer_api_error, HTTPException: answer_http_error},
    )
    app.state.service = service
    app.state.sessions = repository
    view, tokenizing = service.memory_view, Tokenizing(service)
    embedding = Embedding(service, service.options.pooling)
    messages, ollama, llama = Messages(service), Ollama(service), LlamaServer(service, embedding)
    routes: dict[str, tuple[str, Callable[..., Any]]] = {
        "/health": ("GET", service.health),
        "/metrics": ("GET", service.render_metrics),
        "/": ("GET", show_page),
        PREFIX + "{name}": ("GET", show_file),
        "/v1/memory": ("GET", view.show),
        "/v1/memory/events": ("GET", view.stream),
        "/models": ("GET", service.list_models),
        "/v1/models": ("GET", service.list_models),
        "/v1/models/{name:path}": ("GET", service.show_model),
        "/v1/chat/completions": ("POST", service.chat),
        "/v1/completions": ("POST", service.complete),
        "/v1/messages": ("POST", messages.create),
        "/v1/messages/count_tokens": ("POST", messages.count),
        "/v1/embeddings": ("POST", embedding.embed),
        "/v1/score": ("POST", Scores(service).score),
        **{path: ("POST", Reranking(service).rank) for path in RERANK_PATHS},
        "/apply-template": ("POST", llama.apply_template),
        "/completion": ("POST", llama.complete),
        "/infill": ("POST", llama.infill),
        "/embedding": ("POST", llama.embed),
        "/embeddings": ("POST", llama.embed),
        "/props": ("GET", llama.props),
        "/slots": ("GET", llama.slots),
        "/api/chat": ("POST", ollama.chat),
        "/api/generate": ("POST", ollama.generate),
        "/api/show": ("POST", ollama.show),
        "/api/tags": ("GET", ollama.tags),
        "/api/ps": ("GET", ollama.tags),
        "/api/version": ("GET", ollama.version),
        "/tokenize": ("POST", tokenizing.tokenize),
        "/detokenize": ("POST", tokenizing.detokenize),
    }
    for path, (method, endpoint) in routes.items():
        methods = [method, "HEAD"] if path in _ASKED_BY_MONITORS else [method]
        app.add_api_route(path, endpoint, methods=methods, response_model=None)
    app.add_api_route("/slots/{slot:int}", llama.change_slot, methods=["POST"], response_model=None)
    for method, path, endpoint in session_routes(repository, pins):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    check_bodies(app)
    app.add_middleware(Guard, service=service)
    return app


def check_bodies(app: FastAPI) -> None:
    """Raise ValueError if a POST endpoint would get an empty body, because the guard does not know its path."""
    for route in app.routes:
        path = getattr(route, "path", "")
        if "POST" in (getattr(route, "methods", None) or ()) and not takes_body(path):
            raise ValueError(
                f"the guard skips the bodies of POST {path}; add it to PATHS_WITH_BODIES in server/guard.py"
            )
