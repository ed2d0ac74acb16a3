"""Records whether the store answers, so that requests do not wait for a store that is down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class StoreDownError(OSError):
    """Says that the store failed a moment ago, and was therefore not asked again."""


@dataclass
class StoreHealth:
    """Counts events and moved bytes, and holds the last failure.

    Attributes:
        clock: returns seconds.
        pause_seconds: after a failure, the store is not asked for this long.
        error: the last failure, if nothing has succeeded since.
        counts: the counts of events and bytes, by name.
    """

    clock: Callable[[], float]
    pause_seconds: float = 1.0
    error: str | None = None
    counts: dict[str, int] = field(default_factory=dict)
    _asks_again_at: float = 0.0

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Let the block call the store.

        Raises StoreDownError if the store failed a moment ago, or OSError if it fails now.
        """
        if self.error is not None and self.clock() < self._asks_again_at:
            raise StoreDownError(self.error)
        try:
            yield
        except OSError as error:
            self.note(error)
            raise
        self.error = None

    def note(self, error: OSError) -> None:
        """Record that a call has failed."""
        self.error = f"{type(error).__name__}: {error}"[:500]
        self._asks_again_at = self.clock() + self.pause_seconds
        self.count("failures")

    def count(self, name: str, n: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + n
