"""Makes a model's attention modules call the function of `attach` while calls with a memory run."""

from __future__ import annotations

from threading import Lock
from types import TracebackType
from typing import Any
from weakref import ref

from transformers import PreTrainedConfig

from hybridmem.memory.blocks import ExitOnStack, has_ended

ATTENTION = "hybrid_memory"
"""Name under which transformers' `AttentionInterface` finds the function."""


class AttentionOf:
    """Makes modules with this config call `_attend`, without masks, while blocks run: `with attention.taken(): ...`.

    Several threads may be inside of such blocks at the same time.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config, self._lock = config, Lock()
        self._blocks: list[ref[Any] | None] = []
        self._before = config._attn_implementation

    def taken(self) -> _Taken:
        return _Taken(self)

    def mend(self, left: ref[Any] | None = None) -> None:
        """Restore the config if no block runs except the one that is being left.

        An exception may have kept the end of the last block from doing so.
        """
        with self._lock:
            self._blocks = [b for b in self._blocks if b is not left and not has_ended(b)]
            if not self._blocks and self._config._attn_implementation == ATTENTION:
                self._config._attn_implementation = self._before

    def enter(self, block: ref[Any] | None) -> None:
        with self._lock:
            if self._config._attn_implementation != ATTENTION:
                self._before = self._config._attn_implementation
            self._blocks.append(block)
            self._config._attn_implementation = ATTENTION


class _Taken:
    """Is the context manager that `AttentionOf.taken` returns."""

    def __init__(self, attention: AttentionOf) -> None:
        self._attention = attention
        self._block: ref[Any] | None = None

    def __enter__(self) -> None:
        self._attention.enter(self._block)

    __exit__ = ExitOnStack()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._attention.mend(left=self._block)
