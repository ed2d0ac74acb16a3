"""Runs calls of a store in threads, and stops waiting for those that hang, as on a network file system that is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from hybridmem.cluster.store.health import StoreDownError

ASK_SECONDS = 5.0
"""For which a request waits for a small file of the store."""
T = TypeVar("T")


class Timeouts:
    """Runs blocking calls, which others do not wait for once one of them has taken too long.

    Args:
        n_threads: calls that run at once; further ones wait.
        on_hang: is told when a call takes too long, and why that is an error.
    """

    def __init__(self, n_threads: int, on_hang: Callable[[OSError], None] = lambda error: None) -> None:
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="store")
        self._on_hang = on_hang
        self._hanging: set[asyncio.Future[Any]] = set()

    async def run(self, work: Callable[..., T], *arguments: Any, seconds: float | None = ASK_SECONDS) -> T:
        """Return what a call returns. Raises StoreDownError if it takes longer, or if one before it has and still runs.

        A call that is not waited for goes on, since no thread can be stopped; the next one is made when it has ended.

        Args:
            seconds: None: it may take as long as it takes, and runs whether others hang or not.
        """
        if seconds is not None and self._hanging:
            raise StoreDownError("an earlier call of the store has not returned yet")
        call = asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments))
        if seconds is None:
            return await call
        if not (await asyncio.wait({call}, timeout=seconds))[0]:
            self._hanging.add(call)
            call.add_done_callback(self._forget)
            error = StoreDownError(f"the store has not answered for {seconds:g} seconds")
            self._on_hang(error)
            raise error
        return call.result()

    def close(self) -> None:
        """Begin no further call."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget(self, call: asyncio.Future[Any]) -> None:
        self._hanging.discard(call)
        if not call.cancelled():
            call.exception()  # it has been told of already
