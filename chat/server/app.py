"""Builds the ASGI app, and maps paths to the service."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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


def make_app(engine: Engine, tokenizer: Tokenizer, model_id: str, options: ServerOptions | None = None) -> Starlette:
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
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with keeping(repository, pins), service.lifespan(app):
            task = asyncio.create_task(warming.run())
            try:
                yield
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    app = Starlette(
        lifespan=lifespan, exception_handlers={ApiError: answer_api_error, HTTPException: answer_http_error}
    )
    app.router.redirect_slashes = False
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
        app.routes.append(route_to(endpoint, path, method))
    app.routes.append(route_to(llama.change_slot, "/slots/{slot:int}", "POST"))
    for method, path, endpoint in session_routes(repository, pins):
        app.routes.append(route_to(endpoint, path, method))
    check_bodies(app)
    app.add_middleware(Guard, service=service)
    return app


def route_to(endpoint: Callable[..., Any], path: str, method: str) -> Route:
    """Return the route from a path to an endpoint, which is a coroutine function that returns a response.

    The endpoint's parameters are `request`, or parameters of the path, by their names. Endpoints read bodies and
    queries themselves, so that errors have the form of their dialect.
    """
    names = inspect.signature(endpoint).parameters

    async def answer(request: Request) -> Response:
        given = {"request": request, **request.path_params}
        response: Response = await endpoint(**{name: given[name] for name in names})
        return response

    route = Route(path, answer, methods=[method])
    # Starlette lets each path of GET answer HEAD as well.
    route.methods = {method, "HEAD"} if path in _ASKED_BY_MONITORS else {method}
    return route


def check_bodies(app: Starlette) -> None:
    """Raise ValueError if a POST endpoint would get an empty body, because the guard does not know its path."""
    for route in app.routes:
        path = getattr(route, "path", "")
        if "POST" in (getattr(route, "methods", None) or ()) and not takes_body(path):
            raise ValueError(
                f"the guard skips the bodies of POST {path}; add it to PATHS_WITH_BODIES in server/guard.py"
            )
