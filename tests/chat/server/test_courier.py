"""What a step brings reaches the event loop in one call and in order, and nothing stays behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from hybridmem.chat.server.courier import Courier


class Loop:
    """Is an event loop that runs its calls when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_soon(self, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self.calls.append(call)


def test_what_is_sent_together_is_one_call() -> None:
    loop: Any = Loop()
    courier, queues = Courier[int](loop), [asyncio.Queue[int](), asyncio.Queue[int]()]
    for n in range(6):
        courier.send(queues[n % 2], n)
    assert len(loop.calls) == 1 and queues[0].empty()
    loop.calls.pop()()
    assert [queues[0].get_nowait() for _ in range(3)] == [0, 2, 4] and queues[1].qsize() == 3
    courier.send(queues[0], 6)
    loop.calls.pop()()
    assert queues[0].get_nowait() == 6


def test_much_is_delivered_in_lots() -> None:
    loop: Any = Loop()
    courier, queue = Courier[int](loop), asyncio.Queue[int]()
    for n in range(100):
        courier.send(queue, n)
    n_calls = 0
    while loop.calls:
        assert len(loop.calls) == 1
        loop.calls.pop()()
        n_calls += 1
    assert n_calls > 4 and [queue.get_nowait() for _ in range(100)] == list(range(100))


def test_nothing_that_another_thread_sends_is_lost() -> None:
    async def main() -> list[int]:
        queue = asyncio.Queue[int]()
        courier = Courier[int](asyncio.get_running_loop())
        thread = threading.Thread(target=lambda: [courier.send(queue, n) for n in range(5000)])
        thread.start()
        found = [await asyncio.wait_for(queue.get(), 30) for _ in range(5000)]
        thread.join()
        return found

    assert asyncio.run(main()) == list(range(5000))
