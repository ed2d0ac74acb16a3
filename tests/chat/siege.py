"""Hostile clients, as a program of its own: `python siege.py PORT N_HEADS N_TRICKLING N_LARGE`.

Each repeats its attack. Half-sent heads and trickling bodies begin anew when they are cut off, and large bodies are
sent again after a pause. For each large body, a line with the status of its answer goes to stdout.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

PAUSE_SECONDS = 2.0
"""Between the answer to a large body and the next one of the same client."""
LARGE = [
    {"model": "embedded", "messages": [{"role": "user", "content": "cat " * 249_000}]},
    {"model": "embedded", "messages": [{"role": "user", "content": "cat"}] * 17_000},
    {f"k{i}": 1 for i in range(75_000)},
    {"model": "embedded", "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 29_000}]},
]


def post(body: bytes, n_declared: int | None = None) -> bytes:
    n_bytes = len(body) if n_declared is None else n_declared
    fields = ["Host: localhost", "Content-Type: application/json", f"Content-Length: {n_bytes}", "Connection: close"]
    return "\r\n".join(["POST /v1/chat/completions HTTP/1.1", *fields, "", ""]).encode() + body


async def exchange(port: int, sent: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        return int(head.split()[1]), body
    finally:
        writer.close()


async def keep(work: Callable[[], Awaitable[None]]) -> None:
    """Do it again and again, whatever happens to the connection."""
    while True:
        with suppress(OSError, IndexError):
            await work()
        await asyncio.sleep(0.1)


async def hold(port: int, sent: bytes, piece: bytes) -> None:
    """Send the beginning of a request, and then so little that it will never end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        while not reader.at_eof():
            writer.write(piece)
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(1 << 16), 0.5)
    finally:
        writer.close()


async def besiege(port: int, n_heads: int, n_trickling: int, n_large: int) -> None:
    """Attack until somebody ends the process. For each large body, a line with its status goes to stdout."""
    bodies = [post(json.dumps(body).encode()) for body in LARGE]

    async def send_large(i: int) -> None:
        status, _ = await exchange(port, bodies[i % len(bodies)])
        print(status, flush=True)  # noqa: T201
        await asyncio.sleep(PAUSE_SECONDS)

    works: list[Callable[[], Awaitable[None]]] = []
    works += [lambda: hold(port, b"POST /v1/chat/completions HTTP/1.1\r\nX: ", b"x")] * n_heads
    works += [lambda: hold(port, post(b"{", 1000), b" ")] * n_trickling
    works += [lambda i=i: send_large(i) for i in range(n_large)]  # type: ignore[misc]
    await asyncio.gather(*map(keep, works))


if __name__ == "__main__":
    # Where the waits of other clients are measured, these clients would have a machine of their own.
    if "SIEGE_SECONDS" in os.environ:
        os.nice(19)
    asyncio.run(besiege(*map(int, sys.argv[1:])))
