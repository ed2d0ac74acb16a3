"""Writes errors in the form that Anthropic's clients read: {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

from typing import Any

from hybridmem.chat.server.errors import ApiError, ContextError

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def message_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error. If a prompt does not fit, the message has the wording that clients look for."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    text = str(error)
    if isinstance(error, ContextError) and error.n_prompt >= error.limit:
        text = f"prompt is too long: {error.n_prompt} tokens > {error.limit} maximum"
    return {"type": "error", "error": {"type": kind, "message": text}}
