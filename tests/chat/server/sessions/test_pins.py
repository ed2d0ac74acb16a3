"""A pin stays while other pins reach their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hybridmem.chat.server.sessions.pins import FOREVER, Pin, Pins
from hybridmem.chat.stored.nodes import Node

NODE = Node("resp_a", "sess_a", None, "assistant", [])


class SlowRepository:
    """Is a repository whose store takes a turn of the loop to answer."""

    def __init__(self) -> None:
        self.until: dict[str, float] = {}
        self.store = SimpleNamespace(now=lambda: 0.0, pin=self.until.__setitem__, pinned=self._pinned)

    def _pinned(self) -> list[tuple[bytes, Node]]:
        return [(b"", NODE)] if NODE.id in self.until else []

    async def ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(0)
        return call(*arguments)

    async def read(self, request: object, model: object) -> Any:
        return SimpleNamespace(seconds_to_live=None), b""

    async def session(self, owner: bytes, session_id: str) -> None: ...

    async def node(self, owner: bytes, node_id: str, session: object) -> Node:
        return NODE

    async def tokens_at(self, node: Node) -> Any:
        return np.arange(3)


def test_a_pin_that_the_store_does_not_know_yet_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    repository = SlowRepository()
    pins, held = Pins(cast("Any", repository)), dict[str, Pin]()

    async def compute(request: object, pin: Pin) -> None: ...

    def keep(node_id: str, pin: Pin) -> int:
        held[node_id] = pin
        return 0

    async def forget(node_ids: list[str]) -> None:
        assert not node_ids

    async def race() -> None:
        pinning = asyncio.create_task(pins.pin(cast("Any", None), NODE.session, NODE.id))
        while not pinning.done():
            await pins.expire()

    for name, stub in (("_pins", held), ("_compute", compute), ("_keep", keep), ("forget", forget)):
        monkeypatch.setattr(pins, name, stub)
    asyncio.run(race())
    assert held[NODE.id].until == repository.until[NODE.id] == FOREVER
