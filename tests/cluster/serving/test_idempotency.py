"""A key promises one reply, however often, how early and from where its client sends the request again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import Event

import pytest
from starlette.types import Message

from hybridmem.chat.server.errors import ApiError
from hybridmem.cluster.serving.idempotency import Idempotency
from hybridmem.cluster.serving.request import ForwardedRequest
from tests.chat.servers import PATIENCE_SECONDS
from tests.cluster.serving.test_reading import request_of

REQUEST: ForwardedRequest = request_of("/v1/completions", {"prompt": "My dog"})
of_request: ContextVar[str] = ContextVar("of_request", default="none")


class Shelf:
    """Keeps what is stored, and reads slowly."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.may_read = Event()

    def read(self, name: str) -> bytes | None:
        self.may_read.wait(PATIENCE_SECONDS)
        return self.contents.get(name)

    def create(self, name: str, content: bytes) -> bool:
        return self.contents.setdefault(name, content) is content


@dataclass
class Model:
    """Answers in two messages, with another number each time. The second message comes when a test lets it."""

    status: int = 200
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    contexts: list[str] = field(default_factory=list)

    async def answer(self) -> AsyncIterator[list[Message]]:
        self.contexts.append(of_request.get())
        yield [{"type": "http.response.start", "status": self.status, "headers": []}]
        await self.may_end.wait()
        body = str(len(self.contexts)).encode()
        yield [{"type": "http.response.body", "body": body, "more_body": False}]


async def heard(once: Idempotency, model: Model, request: ForwardedRequest = REQUEST) -> bytes:
    return b"".join([m.get("body", b"") async for some in once.play(request, "a", model.answer) for m in some])


async def others() -> None:
    """Wait for what still runs, such as the writing of a reply."""
    await asyncio.gather(*(task for task in asyncio.all_tasks() if task is not asyncio.current_task()))


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def in_time() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await test()

    asyncio.run(in_time())


def test_two_that_come_while_the_store_is_read_get_one_reply() -> None:
    async def test() -> None:
        model, shelf = Model(), Shelf()
        once = Idempotency(shelf)
        both = [asyncio.create_task(heard(once, model)) for _ in range(2)]
        await asyncio.sleep(0)
        shelf.may_read.set()
        model.may_end.set()
        assert await asyncio.gather(*both) == [b"1", b"1"]
        await others()
        assert len(shelf.contents) == 1

    run(test)


def test_a_reply_is_finished_for_a_client_that_has_gone_and_comes_back() -> None:
    """Its work runs in no context of the request.

    So the end of that context does not end the work.
    """

    async def test() -> None:
        of_request.set("the first")
        model, once = Model(), Idempotency(None)
        first = asyncio.create_task(heard(once, model))
        while not model.contexts:
            await asyncio.sleep(0)
        first.cancel()
        again = asyncio.create_task(heard(once, model))
        await asyncio.sleep(0)
        model.may_end.set()
        assert await again == b"1" and model.contexts == ["none"]

    run(test)


def test_nobody_waits_for_a_reply_that_was_cancelled() -> None:
    async def test() -> None:
        model, once = Model(), Idempotency(None)
        waiting = asyncio.create_task(heard(once, model))
        while not model.contexts:
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {waiting, asyncio.current_task()}:
            if "_record" in repr(task):
                task.cancel()
        with pytest.raises(ApiError, match="cancelled"):
            await waiting
        model.may_end.set()
        assert await heard(once, model) == b"2"

    run(test)


@pytest.mark.parametrize(("status", "second"), [(200, b"1"), (400, b"1"), (429, b"2"), (503, b"2")])
def test_what_is_refused_for_the_moment_may_be_tried_again(status: int, second: bytes) -> None:
    async def test() -> None:
        model, shelf = Model(status), Shelf()
        shelf.may_read.set()
        model.may_end.set()
        assert await heard(Idempotency(shelf), model) == b"1"
        await others()
        assert await heard(Idempotency(shelf), model) == second, "another gateway, by the store"

    run(test)
