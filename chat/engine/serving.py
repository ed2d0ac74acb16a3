"""Runs an engine beside an event loop: replies are asynchronous streams, and steps run in a thread of their own."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from hybridmem.chat.engine.requests import Generation
from hybridmem.memory import StepError

_NICENESS = 5
"""The niceness of the thread that steps the model. When processors are short, it gets a third of the time that an
answering thread gets.
"""


class Stepped(Protocol):
    """Declares the methods of an engine that an event loop needs."""

    @property
    def is_idle(self) -> bool: ...
    @property
    def submit(self) -> Callable[..., Generation]: ...
    def cancel(self, generation: Generation) -> None: ...
    def step(self) -> list[Generation]: ...
    def end_all(self, error: Exception) -> None: ...


class Serving:
    """Steps an engine in a thread of its own, and streams its replies to programs that use asyncio.

    `Engine` has methods of the same names, which call these.
    """

    def __init__(self, engine: Stepped) -> None:
        self._engine = engine
        self._server: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    async def stream(self, token_ids: Any, **options: Any) -> AsyncIterator[str]:
        """Return the text of a reply, piece by piece; arguments and errors as `submit`.

        Steps must be made elsewhere, usually by `serve`. Closing the stream (`aclose`, a cancelled task) cancels the
        generation.

        Raises whatever ended the generation with "error". After a cancellation or a deadline the text just ends.
        """
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[tuple[str, bool]]()
        also = options.pop("on_token", None)

        def put(generation: Generation, piece: str) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, (piece, generation.is_finished))
            if also is not None:
                also(generation, piece)

        generation = self._engine.submit(token_ids, on_token=put, **options)
        try:
            is_last = False
            while not is_last:
                piece, is_last = await pieces.get()
                if piece:
                    yield piece
        finally:
            self._engine.cancel(generation)
        if generation.error is not None:
            raise generation.error

    async def serve(self) -> None:
        """Step in a thread while there is something to do, and sleep otherwise, until this call is cancelled.

        A running step is finished before the call ends. Generations stay where they are. Call `serve` again to go on
        with them.

        Raises:
            StepError: the engine is being served already. Whatever the model raises; every generation has ended with
            that error then.
        """
        if self._server is not None:
            raise StepError("this engine is being served already; one loop is enough for any number of streams")
        event = asyncio.Event()
        event.set()
        self._server = asyncio.get_running_loop(), event
        try:
            with ThreadPoolExecutor(1, thread_name_prefix="engine", initializer=_give_way) as worker:
                while True:
                    await event.wait()
                    event.clear()
                    while not self._engine.is_idle:
                        await self._step_in(worker)
        except Exception as error:
            self._engine.end_all(error)
            raise
        finally:
            self._server = None

    async def _step_in(self, worker: ThreadPoolExecutor) -> None:
        step = asyncio.get_running_loop().run_in_executor(worker, self._engine.step)
        try:
            await asyncio.shield(step)
        except asyncio.CancelledError:
            await asyncio.wait([step])  # Nobody may use the memory before the step is done.
            raise

    def wake(self) -> None:
        """Wake `serve`, which then steps if there is something to do. Any thread may call this."""
        server = self._server
        if server is not None:
            with suppress(RuntimeError):  # The loop may have been closed under `serve`. Then there is nothing to wake.
                server[0].call_soon_threadsafe(server[1].set)


def _give_way() -> None:
    """Lower this thread's priority, so that the threads that answer clients run first when processors are short."""
    if sys.platform == "linux":  # On other systems, niceness belongs to the whole process.
        with suppress(OSError):  # A sandbox may forbid it.
            os.nice(_NICENESS)
