"""Notes whether the store answers, so that requests do not wait for one that is down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class StoreDownError(OSError):
    """Says that the store has just failed, and was not asked again."""


@dataclass
class StoreHealth:
    """Counts what was moved, and holds the last failure.

    Attributes:
        clock: seconds.
        pause_seconds: for which the store is left alone after a failure.
        error: the last failure, if nothing has succeeded since.
        counts: of events and bytes, by name.
    """

    clock: Callable[[], float]
    pause_seconds: float = 1.0
    error: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    _asks_again_at: float = 0.0

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Run calls of the store. Raises StoreDownError if it failed a moment ago, or OSError if it fails now."""
        if self.error is not None and self.clock() < self._asks_again_at:
            raise StoreDownError(self.error)
        try:
            yield
        except OSError as error:
            self.note(error)
            raise
        self.error = None

    def note(self, error: OSError) -> None:
        """Note that a call has failed."""
        self.error = f"{type(error).__name__}: {error}"[:500]
        self._asks_again_at = self.clock() + self.pause_seconds
        self.count("failures")

    def count(self, name: str, n: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + n
