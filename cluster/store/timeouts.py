"""Runs calls of a store in threads, and stops waiting for calls that hang, as on a lost network file system."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from hybridmem.cluster.store.health import StoreDownError

ASK_SECONDS = 5.0
"""A request waits this many seconds for a small file of the store."""
T = TypeVar("T")


class Timeouts:
    """Runs blocking calls. While a call hangs, further calls fail at once instead of waiting for it.

    Args:
        n_threads: how many calls run at once. Further calls wait.
        on_hang: is called with an error when a call takes too long.
    """

    def __init__(self, n_threads: int, on_hang: Callable[[OSError], None] = lambda error: None) -> None:
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="store")
        self._on_hang = on_hang
        self._hanging: set[asyncio.Future[Any]] = set()

    async def run(self, work: Callable[..., T], *arguments: Any, seconds: float | None = ASK_SECONDS) -> T:
        """Return the result of a call.

        Raises StoreDownError if the call takes longer than `seconds`, or if an earlier call that took too long is still
        running.

        A call that takes too long keeps running, because threads cannot be stopped. Further calls are made when it has
        ended.

        Args:
            seconds: the time limit. None: the call may take any time, and runs even if other calls hang.
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
        """Begin no further calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _forget(self, call: asyncio.Future[Any]) -> None:
        self._hanging.discard(call)
        if not call.cancelled():
            call.exception()  # The error has been reported already.
