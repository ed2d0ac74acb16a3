"""Pages through lists as OpenAI's clients ask for them: `limit`, `after` and `order`."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from hybridmem.chat.server.errors import ApiError, clip

_MOST = 100


def read_limit(request: Request) -> int:
    """Return how many entries a page has. Raises ApiError 400."""
    text = request.query_params.get("limit", "20")
    if not (text.isdecimal() and len(text) < 5 and 1 <= int(text) <= _MOST):
        message = f"Invalid 'limit': it must be 1 ... {_MOST}; got {clip(text)!r}."
        raise ApiError(400, message, param="limit", code="invalid_value")
    return int(text)


def page_of(request: Request, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the page of a list for which a request asks. Raises ApiError 400 for wrong parameters.

    Args:
        entries: all entries, in ascending order. If the request names no order, they are returned in descending order.
    """
    limit, wanted = read_limit(request), request.query_params.get("order", "desc")
    if wanted not in ("asc", "desc"):
        message = f"Invalid 'order': it must be 'asc' or 'desc'; got {clip(wanted)!r}."
        raise ApiError(400, message, param="order", code="invalid_value")
    ordered = entries if wanted == "asc" else entries[::-1]
    after = request.query_params.get("after")
    if after is not None:
        at = next((i for i, entry in enumerate(ordered) if entry["id"] == after), None)
        if at is None:
            message = f"Invalid 'after': there is no {clip(after)!r} in this list."
            raise ApiError(400, message, param="after", code="invalid_value")
        ordered = ordered[at + 1 :]
    return as_page(ordered[:limit], has_more=len(ordered) > limit)


def as_page(entries: list[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    first, last = (entries[0]["id"], entries[-1]["id"]) if entries else (None, None)
    return {"object": "list", "data": entries, "first_id": first, "last_id": last, "has_more": has_more}
