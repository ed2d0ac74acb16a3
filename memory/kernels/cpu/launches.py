"""Tells the recording of a step which kernels the step launches (`memory.kernels.cpu.recording`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from numba.core.registry import CPUDispatcher

from hybridmem.memory.blocks.staging import current_watch


def note(function: Callable[..., object], *arguments: Any) -> None:
    """If this thread is recorded, tell the recording about a call of a function that sets up later kernels."""
    if (watch := current_watch()) is not None:
        watch.note(function, arguments, sets_up=True)


class Address(int):
    """Holds a number that a kernel takes as the address of a tensor's data."""


class NotedDispatcher(CPUDispatcher):
    """Calls a compiled kernel, after telling the recording about the call.

    A kernel declares by their names which of its arguments are addresses: those whose names end in "_at".

    Attributes:
        unnoted: a function that calls the kernel without telling the recording, and without Python.
    """

    @property
    def unnoted(self) -> Callable[..., Any]:
        return super().__call__

    @cached_property
    def _takes_address(self) -> tuple[bool, ...]:
        code = self.py_func.__code__
        return tuple(name.endswith("_at") for name in code.co_varnames[: code.co_argcount])

    def __call__(self, *arguments: Any) -> Any:
        if (watch := current_watch()) is not None:
            kinds = zip(self._takes_address, arguments, strict=True)
            watch.note(self, tuple(Address(x) if is_address else x for is_address, x in kinds))
        return super().__call__(*arguments)
