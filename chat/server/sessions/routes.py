"""Maps the paths of stored sessions to what answers them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from chat.server.sessions.desk import Desk
from chat.server.sessions.responses import Responses
from chat.server.sessions.trees import Trees

Route = tuple[str, str, Callable[..., Any]]
"""A method, a path and its endpoint."""


def session_routes(desk: Desk) -> list[Route]:
    """Return all routes of stored sessions."""
    responses, trees = Responses(desk), Trees(desk)
    return [
        ("POST", "/v1/responses", responses.create),
        ("GET", "/v1/responses/{response_id}", responses.show),
        ("DELETE", "/v1/responses/{response_id}", responses.delete),
        ("POST", "/v1/responses/{response_id}/cancel", responses.cancel),
        ("GET", "/v1/responses/{response_id}/input_items", responses.list_input),
        ("GET", "/v1/sessions", trees.list),
        ("POST", "/v1/sessions", trees.create),
        ("GET", "/v1/sessions/{session_id}", trees.show),
        ("POST", "/v1/sessions/{session_id}", trees.change),
        ("DELETE", "/v1/sessions/{session_id}", trees.delete),
        ("GET", "/v1/sessions/{session_id}/tree", trees.tree),
    ]
