"""Writes errors in the form that Ollama's clients read: {"error": message}."""

from __future__ import annotations

from typing import Any

from hybridmem.chat.server.errors import ApiError


def ollama_error(error: ApiError) -> dict[str, Any]:
    """Return the body of an error."""
    return {"error": str(error)}
