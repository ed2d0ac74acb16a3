"""Notices the end of a `with` block or of a function by the death of an object, which no exception can prevent.

Python may raise an exception between any two bytecodes (see `memory.blocks.journal`), also before the line that would
note an end. An object that only one stack frame refers to dies with its block or function, whatever is raised. So a
weak reference to such an object says whether the block runs, and its callbacks act at the end:

- `ExitOnStack` puts such an object on the stack of a `with` statement.
- `has_ended` says whether the object is gone.
- `AtEnd` calls a C function when the object dies.
"""

from __future__ import annotations

from _thread import interrupt_main
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Protocol, overload
from weakref import ref

import torch

# The module `signal` wraps this function of `_signal`. The wrapper converts numbers to enums, which takes several times
# as long as the system call.
try:
    from _signal import signal as _set_handler
except ImportError:
    from signal import signal as _set_handler


class Left(Protocol):
    """Declares a context manager whose `__exit__` is an `ExitOnStack`."""

    _block: ref[Any] | None

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class ExitOnStack:
    """Makes `__exit__` a new function at each access, so that only the `with` statement's stack refers to it.

    When that function is gone, the block has ended, even if an exception came before the first line of `_leave`.
    """

    @overload
    def __get__(self, block: None, owner: type[Left]) -> Callable[..., None]: ...
    @overload
    def __get__(self, block: Left, owner: type[Left] | None = None) -> partial[None]: ...
    def __get__(self, block: Left | None, owner: type[Left] | None = None) -> Callable[..., None]:
        if block is None:
            assert owner is not None, "it is looked up on the class"
            return owner._leave
        leave = partial(block._leave)
        block._block = ref(leave)
        return leave


def has_ended(block: ref[Any] | None) -> bool:
    """Return True unless the `with` block runs whose `ExitOnStack` made this reference."""
    return block is None or block() is None


class AtEnd(ref[Any]):
    """Is a weak reference whose callback is a C function, so that no Python bytecode runs when the object dies.

    The callback is `methodcaller(name, *arguments)` with the name of one of these functions. Callbacks of one object
    run one after the other, the newest first.
    """

    __slots__ = ()
    set_handler = _set_handler
    interrupt = interrupt_main
    set_gradients = torch._C._set_grad_enabled
