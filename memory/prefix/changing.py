"""Notices changes of a prefix cache's books that an exception has left half done, so that they are computed anew.

Ctrl-C, timeouts and other threads raise exceptions between any two bytecodes (see `memory.blocks.journal`). A cache
needs no notes of how to put things back: whatever its tree and its rankings say follows from its records.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any
from weakref import ref

from memory.blocks.journal import ExitOnStack
from memory.errors import HybridMemoryError


class Books:
    """Are changed in blocks, `with books.changing(): ...`, and computed anew by `rebuild` if one was left half-way.

    An error of ours and an OSError leave a block as they find it: what raises them has changed nothing then. Blocks may
    be within others.
    """

    def __init__(self, rebuild: Callable[[], None]) -> None:
        self._rebuild = rebuild
        self._blocks: list[ref[Any] | None] = []

    def changing(self) -> Changing:
        """Return a block, and before that mend what an exception has left. Cost: about a microsecond."""
        self.mend()
        return Changing(self._blocks)

    def mend(self) -> None:
        """Compute the books anew if a block was left half-way; else do nothing."""
        if self._blocks and any(block is None or block() is None for block in self._blocks):
            self._rebuild()
            self._blocks[:] = [block for block in self._blocks if block is not None and block() is not None]


class Changing:
    """Is a block in which books change; see `Books.changing`."""

    __slots__ = ("_block", "_blocks")

    def __init__(self, blocks: list[ref[Any] | None]) -> None:
        self._blocks = blocks
        self._block: ref[Any] | None = None

    def __enter__(self) -> None:
        self._blocks.append(self._block)

    __exit__ = ExitOnStack()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, HybridMemoryError | OSError):
            self._blocks.remove(self._block)
