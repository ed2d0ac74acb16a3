"""Refuses requests for stored responses and sessions, if the replicas do not share a folder of them."""

from __future__ import annotations

import json

from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.owners import SESSION_HEADER
from hybridmem.cluster.serving.request import ForwardedRequest

_STORED = ("/v1/responses", "/v1/conversations", "/v1/sessions")


def check_stored(request: ForwardedRequest) -> None:
    """Raise ApiError 501 for a request that stores or reads a session, since another replica would not find it.

    A request that names its session in the header goes to the replica that has the session, as long as that replica
    lives.
    """
    is_of_sessions = f"{request.path}/".startswith(tuple(f"{path}/" for path in _STORED))
    if not is_of_sessions or request.header(SESSION_HEADER) is not None or _stores_nothing(request):
        return
    message = (
        f"{request.path} keeps sessions, which replicas must share: deploy them with 'sessions', a folder that all "
        'machines see. Without it, send whole conversations: to /v1/chat/completions, or with "store": false.'
    )
    raise ApiError(501, message, code="sessions_not_shared")


def _stores_nothing(request: ForwardedRequest) -> bool:
    """Return whether a response is not to be stored, and does not continue a stored one."""
    if request.path != "/v1/responses" or request.method != "POST":
        return False
    try:
        value = json.loads(request.body)
    except (ValueError, RecursionError):
        return True  # The body cannot be read, so the replica answers with the error.
    if not isinstance(value, dict):
        return True
    return value.get("store") is False and not (value.get("previous_response_id") or value.get("conversation"))
