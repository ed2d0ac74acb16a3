"""Sets values that hold while a block runs. At its end the old values are back, even after an exception.

An exception may come even before the line that would restore an old value. So a value holds exactly as long as its
block runs (see `memory.blocks.ends`), and no line has to restore the old one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from operator import methodcaller
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import ref

import torch

from hybridmem.memory.blocks.ends import AtEnd, ExitOnStack, has_ended

_T = TypeVar("_T")


class Scoped(Generic[_T]):
    """Holds a value for each thread or task, which a block can set: `with variable.set_to(value): ...`.

    Args:
        name: the name of the context variable.
        default: the value outside of all blocks.
    """

    def __init__(self, name: str, default: _T) -> None:
        self._default = default
        self._blocks: ContextVar[tuple[_Block[_T], ...]] = ContextVar(name, default=())

    def get(self) -> _T:
        """Return the value set by the innermost running block, or the default."""
        # Each step asks some twenty times, so this calls no function of Python, not even `has_ended`.
        for block in reversed(self._blocks.get()):
            if (running := block._block) is not None and running() is not None:
                return block.value
        return self._default

    def set_to(self, value: _T) -> AbstractContextManager[None]:
        """Return a context manager, in whose block `get` returns this value."""
        return _Block(self._blocks, value)


class _Block(Generic[_T]):
    def __init__(self, blocks: ContextVar[tuple[_Block[_T], ...]], value: _T) -> None:
        self.value = value
        self._blocks = blocks
        self._block: ref[Any] | None = None

    def __enter__(self) -> None:
        self._blocks.set((*(block for block in self._blocks.get() if not has_ended(block._block)), self))

    __exit__ = ExitOnStack()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._block = None
        self._blocks.set(tuple(block for block in self._blocks.get() if not has_ended(block._block)))


_switch_on = methodcaller("set_gradients", True)


class _WithoutGradients:
    """Is a context manager whose operations compute no gradients. It is used if gradients are on.

    `torch.no_grad` is Python code: an exception may stop it between setting the mode and restoring it. Then gradients
    would stay off for this thread.
    """

    __slots__ = ("_block", "_end")

    def __init__(self) -> None:
        self._block: ref[Any] | None = None

    def __enter__(self) -> None:
        assert self._block is not None, "`__exit__` was looked up first"
        self._end = AtEnd(self._block(), _switch_on)
        torch._C._set_grad_enabled(False)

    __exit__ = ExitOnStack()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        torch._C._set_grad_enabled(True)
        del self._end  # A mode of torch may be Python code, and an interrupt in a callback would be lost.


def without_gradients() -> AbstractContextManager[object]:
    """Return a context manager whose operations compute no gradients.

    If gradients are off already, it does nothing, and costs less.
    """
    return _WithoutGradients() if torch.is_grad_enabled() else nullcontext()
