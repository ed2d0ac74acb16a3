"""Gives the first reply again to a client that repeats a request with the same `Idempotency-Key`.

The reply is recorded while it is made. A client that sends the key again gets the recording: at once on this gateway,
or later on any gateway, from the store. This also works for a stream whose first connection broke in the middle. A
request with a key is answered to its end even if its client has gone away, because the client may come back.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextvars import Context
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import Message

from hybridmem.chat.server.errors import ApiError, log
from hybridmem.chat.server.owners import credential_of
from hybridmem.cluster.serving.request import ForwardedRequest
from hybridmem.cluster.store.leases import DAMAGE
from hybridmem.cluster.store.timeouts import Timeouts

KEY_HEADER = "idempotency-key"
MOST_KEPT = 1024
"""A gateway itself remembers this many replies."""
_OF_THE_MOMENT = (408, 409, 425, 429)
"""The statuses of refusals that another try may not get. All statuses from 500 on belong to them as well."""


class Shelf(Protocol):
    """Declares the methods of the store that are needed."""

    def read(self, name: str) -> bytes | None: ...
    def create(self, name: str, content: bytes) -> bool: ...


@dataclass
class Recording:
    """Holds the messages of a response as they come.

    Attributes:
        body_digest: the digest of the request's body.
        error: the error that ended the response early.
    """

    body_digest: str
    messages: list[Message] = field(default_factory=list)
    is_done: bool = False
    error: Exception | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def play(self) -> AsyncIterator[list[Message]]:
        """Yield all messages from the first one on, including those to come.

        Raises the error that ended the response early.
        """
        at = 0
        while True:
            changed = self.changed
            if at < len(self.messages):
                news = self.messages[at:]
                at += len(news)
                yield news
            elif self.is_done:
                return
            elif self.error is not None:
                raise self.error
            else:
                await changed.wait()

    def tell(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


class Idempotency:
    """Holds recordings by key.

    Args:
        shelf: the store. None: only this gateway remembers replies.
    """

    def __init__(self, shelf: Shelf | None) -> None:
        self._shelf = shelf
        self._recordings: OrderedDict[str, Recording] = OrderedDict()
        self._running: set[asyncio.Task[None]] = set()
        self._patience = Timeouts(8)

    async def play(
        self, request: ForwardedRequest, key: str, answer: Callable[[], AsyncIterator[list[Message]]]
    ) -> AsyncIterator[list[Message]]:
        """Yield the recorded response of a key. If there is none, yield and record that of `answer`.

        Raises ApiError 422 if the body differs.
        """
        name = name_of(request, key)
        digest = hashlib.sha256(request.body).hexdigest()
        if name not in self._recordings and (stored := await self._stored(name)) is not None:
            self._recordings.setdefault(name, stored)
        # Another request with the same key may have come while this one waited for the store. From here on, no `await`
        # comes before the recording is entered.
        recording = self._recordings.get(name)
        if recording is None or recording.error is not None:
            recording = self._recordings[name] = Recording(digest)
            # The task runs in a context of its own. When a client has gone away, Ray ends all calls in the context of
            # its request.
            task = asyncio.create_task(self._record(name, recording, answer), context=Context())
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        if recording.body_digest != digest:
            message = f"{KEY_HEADER} {key!r:.80} was sent before with another body; give each request a key of its own."
            raise ApiError(422, message, code="idempotency_key_reused")
        async for messages in recording.play():
            yield messages

    async def _record(
        self, name: str, recording: Recording, answer: Callable[[], AsyncIterator[list[Message]]]
    ) -> None:
        try:
            async for messages in answer():
                recording.messages += messages
                recording.tell()
            recording.is_done = True
        except Exception as error:
            recording.error = error
        except BaseException:  # The task was cancelled. Players that wait for more must not wait forever.
            recording.error = ApiError(503, "The reply of this key was cancelled; send it again.", code="cancelled")
            raise
        finally:
            recording.tell()
            self._recordings.pop(name, None)
        if not recording.is_done or _may_be_tried_again(_status_of(recording)):
            return
        # This puts the recording last. If there are too many recordings, the first one, which is the oldest, is
        # dropped.
        self._recordings[name] = recording
        while len(self._recordings) > MOST_KEPT:
            self._recordings.popitem(last=False)
        await self._store(name, recording)

    async def _stored(self, name: str) -> Recording | None:
        if self._shelf is None:
            return None
        try:
            content = await self._patience.run(self._shelf.read, _path(name))
            return None if content is None else _read(content)
        except (OSError, *DAMAGE) as error:
            # The store is down, or the entry is damaged. The request is answered again.
            log.warning("a stored reply could not be read: %s", error)
            return None

    async def _store(self, name: str, recording: Recording) -> None:
        if self._shelf is None:
            return
        try:
            await self._patience.run(self._shelf.create, _path(name), _write(recording))
        except OSError as error:
            log.warning("a reply could not be stored: %s", error)


def name_of(request: ForwardedRequest, key: str) -> str:
    """Return the name under which a client's key is stored, 64 hexadecimal digits.

    Requests of other clients or paths never have the same name.
    """
    return hashlib.sha256(repr((credential_of(request.header), request.path, key)).encode()).hexdigest()


def _path(name: str) -> str:
    return f"replies/{name[:2]}/{name}.json"


def _status_of(recording: Recording) -> int:
    return int(recording.messages[0]["status"]) if recording.messages else 500


def _may_be_tried_again(status: int) -> bool:
    return status >= 500 or status in _OF_THE_MOMENT


def _write(recording: Recording) -> bytes:
    head, body = recording.messages[0], b"".join(message.get("body", b"") for message in recording.messages[1:])
    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in head.get("headers", [])]
    return json.dumps({
        "request": recording.body_digest, "status": head["status"], "headers": headers,
        "body": base64.b64encode(body).decode(),
    }).encode()  # fmt: skip


def _read(content: bytes) -> Recording:
    value = json.loads(content)
    headers = [(name.encode("latin-1"), text.encode("latin-1")) for name, text in value["headers"]]
    messages: list[Message] = [
        {"type": "http.response.start", "status": int(value["status"]), "headers": headers},
        {"type": "http.response.body", "body": base64.b64decode(value["body"]), "more_body": False},
    ]
    return Recording(str(value["request"]), messages, is_done=True)
