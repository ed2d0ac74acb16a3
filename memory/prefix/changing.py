"""Notices when an exception has left a change of a prefix cache's books half done, so that they are computed anew.

Ctrl-C, timeouts and other threads raise exceptions between any two bytecodes (see `memory.blocks.journal`). A cache
needs no undo journal, because its tree and its rankings can be computed from its records.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any
from weakref import ref

from hybridmem.memory.blocks.ends import ExitOnStack, has_ended
from hybridmem.memory.errors import HybridMemoryError


class Changes:
    """Knows which `with changes.open():` blocks are running, and whether a block was left half-way.

    An error of this library or an OSError does not count as leaving a block half-way, because code that raises it has
    changed nothing. Blocks may be nested.
    """

    def __init__(self) -> None:
        self._blocks: list[ref[Any] | None] = []

    def open(self) -> Changing:
        """Return a context manager. The books may change inside its `with` block. Cost: about a microsecond."""
        return Changing(self._blocks)

    @property
    def are_left(self) -> bool:
        """True if a block was left half-way."""
        return any(has_ended(block) for block in self._blocks)

    def forget_left(self) -> None:
        """Forget that a block was left half-way, because the books have been computed anew."""
        self._blocks[:] = [block for block in self._blocks if not has_ended(block)]


class Changing:
    """Is the context manager that `Changes.open` returns."""

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
