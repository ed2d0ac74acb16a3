"""Chooses the form of an error by the path of its request, because each dialect's clients read a form of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from hybridmem.chat.server.errors import ApiError, clip
from hybridmem.chat.server.messages.errors import message_error
from hybridmem.chat.server.ollama.errors import ollama_error

ErrorForm = Callable[[ApiError], dict[str, Any]]
_FORMS: dict[str, ErrorForm] = {"/v1/messages": message_error, "/api": ollama_error}
"""Paths that begin with these have a form of their own. All others have OpenAI's."""


def form_of(path: str) -> ErrorForm:
    """Return the form of errors at a path."""
    return next((form for prefix, form in _FORMS.items() if f"{path}/".startswith(f"{prefix}/")), _in_form_of_openai)


def respond_with(error: ApiError, path: str) -> JSONResponse:
    """Return the response that tells a client of an error."""
    return JSONResponse(form_of(path)(error), error.status, error.headers)


def error_event(error: ApiError, path: str) -> str:
    """Return the event that ends a stream whose status has been sent already."""
    body = form_of(path)(error)
    name = f"event: {body['type']}\n" if "type" in body else ""
    return f"{name}data: {json.dumps(body, separators=(',', ':'))}\n\n"


async def answer_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return respond_with(error, request.url.path)


async def answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """Respond to requests that the router refuses: unknown paths, and methods that a path does not have."""
    assert isinstance(error, HTTPException)
    status, headers = error.status_code, dict(error.headers or {})
    path = request.url.path
    what = f"{clip(request.method)} {clip(path)}"
    if status == 404:
        refusal = ApiError(404, f"There is nothing at {what}.", code="unknown_url", headers=headers)
    elif status == 405:
        message = f"{what} is not possible; {headers.get('Allow', 'another method')} is."
        refusal = ApiError(405, message, code="method_not_allowed", headers=headers)
    else:
        refusal = ApiError(status, str(error.detail), headers=headers)
    return respond_with(refusal, path)


def _in_form_of_openai(error: ApiError) -> dict[str, Any]:
    return error.body
