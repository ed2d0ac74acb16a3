"""Notes which kernels a thread launches while a step is recorded (`memory.kernels.cpu.recording`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from numba.core.registry import CPUDispatcher


class Sink(Protocol):
    """Takes a function and the arguments with which it is called, and whether that only sets up later calls."""

    def __call__(
        self, function: Callable[..., object], arguments: tuple[Any, ...], *, sets_up: bool = False
    ) -> None: ...


_sink: ContextVar[Sink | None] = ContextVar("sink", default=None)


def note(function: Callable[..., object], *arguments: Any) -> None:
    """Tell the recording of this thread, if there is one, that a function is called which sets up later kernels."""
    if (sink := _sink.get()) is not None:
        sink(function, arguments, sets_up=True)


@contextmanager
def noting(sink: Sink) -> Iterator[None]:
    """Pass what this thread launches in the block to `sink`."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)


class NotedDispatcher(CPUDispatcher):
    """Calls a compiled kernel, after noting that.

    Attributes:
        unnoted: calls it without that, and without Python.
    """

    @property
    def unnoted(self) -> Callable[..., Any]:
        return super().__call__

    def __call__(self, *arguments: Any) -> Any:
        if (sink := _sink.get()) is not None:
            sink(self, arguments)
        return super().__call__(*arguments)
