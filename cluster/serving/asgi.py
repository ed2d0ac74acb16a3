"""Runs an ASGI app inside of the process, and yields the messages that it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope


async def messages_of(app: ASGIApp, scope: Scope, body: bytes) -> AsyncIterator[list[Message]]:
    """Yield the messages of a response, in lists of all that are ready. Closing the iterator ends the request.

    Raises whatever the app raises.
    """
    sent: list[Message] = []
    news = asyncio.Event()
    is_given = False

    async def receive() -> Message:
        nonlocal is_given
        if is_given:
            await asyncio.Event().wait()  # This wait never ends. If the client goes away, the iterator is closed.
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal sent
        sent.append(message)
        news.set()

    task = asyncio.ensure_future(_as_coroutine(app(scope, receive, send)))
    task.add_done_callback(lambda _: news.set())
    try:
        while not task.done() or sent:
            await news.wait()
            news.clear()
            if sent:
                messages, sent = sent, []
                yield messages
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def lifespan_of(app: ASGIApp) -> AsyncIterator[None]:
    """Run an app's start before the block and its end after it, as a server does. Raises the app's errors."""
    events: asyncio.Queue[Message] = asyncio.Queue()
    answers: asyncio.Queue[Message] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}}
    task = asyncio.ensure_future(_as_coroutine(app(scope, events.get, answers.put)))

    async def tell(kind: str) -> None:
        events.put_nowait({"type": f"lifespan.{kind}"})
        answer = asyncio.ensure_future(answers.get())
        await asyncio.wait({answer, task}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done() or not answer.result()["type"].endswith("complete"):
            answer.cancel()
            await task
            raise RuntimeError(f"the app did not complete its {kind}")

    async with AsyncExitStack() as stack:
        stack.callback(task.cancel)
        await tell("startup")
        yield
        await tell("shutdown")


async def _as_coroutine(awaitable: Awaitable[None]) -> None:
    await awaitable


def with_headers(message: Message, headers: dict[str, str]) -> Message:
    """Add headers to the first message of a response. Return any other message as it is."""
    if message["type"] != "http.response.start":
        return message
    more = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
    return {**message, "headers": [*message.get("headers", []), *more]}


def response_messages(response: Response) -> list[Message]:
    """Return the messages of a complete response."""
    head: Message = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
    return [head, {"type": "http.response.body", "body": bytes(response.body), "more_body": False}]
