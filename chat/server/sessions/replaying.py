"""Answers with a stored response as if it were made now, because a client sends its request again."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from starlette.responses import JSONResponse
from starlette.responses import Response as HttpResponse

from hybridmem.chat.server.formats import EventStream
from hybridmem.chat.server.sessions.objects import Events, stored_response
from hybridmem.chat.server.sessions.writing import Writing
from hybridmem.chat.stored.nodes import Ids, Item, Node
from hybridmem.chat.tools.calls import CallPart
from hybridmem.chat.tools.reading import Part


def response_again(node: Node, seed: str, *, stream: bool) -> HttpResponse:
    """Return the response of a stored reply, whole or as a stream of events.

    Args:
        seed: the seed from which the response's ids were drawn.
    """
    return EventStream(_events(node, seed)) if stream else JSONResponse(stored_response(node))


async def _events(node: Node, seed: str) -> AsyncGenerator[str, None]:
    events, response = Events(), stored_response(node)
    writing = Writing(events, Ids(seed))
    begun = response | {"status": "in_progress", "output": [], "usage": None, "completed_at": None}
    begun["incomplete_details"] = None
    yield events.of_response("created", begun)
    yield events.of_response("in_progress", begun)
    n_calls = 0
    for item in node.items:
        n_calls += item["type"] == "function_call"
        for event in writing.add(_part_of(item, n_calls - 1)):
            yield event
    for event in writing.close(is_whole=node.status == "completed"):
        yield event
    yield events.of_response(response["status"], response)


def _part_of(item: Item, n_call: int) -> Part:
    """Return all of an item as one part of a reply."""
    if item["type"] == "function_call":
        return Part(call=CallPart(n_call, item["name"], item["arguments"]))
    (content,) = item["content"]
    return Part(reasoning=content["text"]) if item["type"] == "reasoning" else Part(content=content["text"])
