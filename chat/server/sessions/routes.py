"""Maps the paths of stored sessions to their endpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hybridmem.chat.server.sessions.archives import Archives
from hybridmem.chat.server.sessions.changes import Changes
from hybridmem.chat.server.sessions.conversations import Conversations
from hybridmem.chat.server.sessions.pins import Pins
from hybridmem.chat.server.sessions.responses import Responses
from hybridmem.chat.server.sessions.session_repository import SessionRepository
from hybridmem.chat.server.sessions.trees import Trees

Route = tuple[str, str, Callable[..., Any]]
"""A method, a path and its endpoint."""


def session_routes(repository: SessionRepository, pins: Pins) -> list[Route]:
    """Return all routes of stored sessions."""
    responses, conversations, trees = Responses(repository), Conversations(repository), Trees(repository)
    changes, archives = Changes(repository, pins), Archives(repository)
    return [
        ("POST", "/v1/responses", responses.create),
        ("GET", "/v1/responses/{response_id}", responses.show),
        ("DELETE", "/v1/responses/{response_id}", responses.delete),
        ("POST", "/v1/responses/{response_id}/cancel", responses.cancel),
        ("GET", "/v1/responses/{response_id}/input_items", responses.list_input),
        ("POST", "/v1/conversations", conversations.create),
        ("GET", "/v1/conversations/{conversation_id}", conversations.show),
        ("POST", "/v1/conversations/{conversation_id}", conversations.change),
        ("DELETE", "/v1/conversations/{conversation_id}", conversations.delete),
        ("GET", "/v1/conversations/{conversation_id}/items", conversations.list_items),
        ("POST", "/v1/conversations/{conversation_id}/items", conversations.add_items),
        ("GET", "/v1/conversations/{conversation_id}/items/{item_id}", conversations.show_item),
        ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}", conversations.delete_item),
        ("POST", "/v1/sessions/import", archives.load),
        ("GET", "/v1/sessions", trees.list),
        ("POST", "/v1/sessions", trees.create),
        ("GET", "/v1/sessions/{session_id}", trees.show),
        ("POST", "/v1/sessions/{session_id}", trees.change),
        ("DELETE", "/v1/sessions/{session_id}", trees.delete),
        ("GET", "/v1/sessions/{session_id}/tree", trees.tree),
        ("GET", "/v1/sessions/{session_id}/export", archives.save),
        ("POST", "/v1/sessions/{session_id}/edit", changes.edit),
        ("POST", "/v1/sessions/{session_id}/regenerate", changes.regenerate),
        ("POST", "/v1/sessions/{session_id}/fork", changes.fork),
        ("POST", "/v1/sessions/{session_id}/head", changes.set_head),
        ("DELETE", "/v1/sessions/{session_id}/nodes/{node_id}", changes.delete),
        ("POST", "/v1/sessions/{session_id}/nodes/{node_id}/pin", pins.pin),
        ("DELETE", "/v1/sessions/{session_id}/nodes/{node_id}/pin", pins.unpin),
    ]
