"""An event loop whose time is simulated: when everybody waits for some time, that time has passed at once.

Work that would run in threads runs in place, so one seed gives one history. If everybody waits and no time would end
it, the loop raises AssertionError, because somebody would wait for ever.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _Skipping(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise AssertionError(f"everybody waits for ever, at {self.now:.2f} s")
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class SimulatedLoop(asyncio.SelectorEventLoop):
    """Tells simulated seconds. Call `pass_time` to let some go by, as work does."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now

    def pass_time(self, seconds: float) -> None:
        """Let time go by while something runs."""
        self._skipping.now += seconds

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def simulate(main: Callable[[SimulatedLoop], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine in simulated time."""
    loop = SimulatedLoop()
    try:
        loop.run_until_complete(main(loop))
    finally:
        loop.close()
