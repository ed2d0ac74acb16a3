"""Keeps a limited number of recordings, one for each layout of steps, and counts how often other layouts occurred."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

RecordingT = TypeVar("RecordingT")

_MOST_SEEN = 1024
"""For how many layouts without a recording the occurrences are counted."""
_IDLE_STEPS = 1024
"""A recording that was not used for this many steps may be replaced by another.

More layouts may alternate than there may be recordings. Then some of these layouts run without a recording. Without
this rule, each would be recorded again and again, and none would be replayed.
"""


class Kept(Generic[RecordingT]):
    """Keeps for each layout a recording, or that there can be none, or how often the layout occurred.

    Several threads may use it, because each change is a single operation on a dict.
    """

    def __init__(self) -> None:
        self.recordings: OrderedDict[Hashable, tuple[RecordingT, int]] = OrderedDict()
        self._n_seen: OrderedDict[Hashable, int | None] = OrderedDict()
        self.n_steps = 0

    def find(self, key: Hashable) -> RecordingT | None:
        """Return the recording of a layout that occurs now, or None."""
        self.n_steps += 1
        if (found := self.recordings.get(key)) is None:
            return None
        self.recordings[key] = found[0], self.n_steps
        self.recordings.move_to_end(key)
        return found[0]

    def may_record(self, key: Hashable, *, after: int, most: int) -> bool:
        """Count an occurrence of a layout without a recording.

        True if the layout occurred `after` times before and one more recording may be kept.
        """
        n_before = self._n_seen.get(key, 0)
        if n_before is not None and n_before >= after and self._make_room(most):
            return True
        self._note(key, None if n_before is None else n_before + 1)
        return False

    def keep(self, key: Hashable, recording: RecordingT) -> None:
        """Keep the recording of a layout."""
        self._n_seen.pop(key, None)
        self.recordings[key] = recording, self.n_steps
        self.recordings.move_to_end(key)

    def forget(self, key: Hashable) -> None:
        """Drop the recording of a layout. The layout may be recorded again later."""
        self.recordings.pop(key, None)

    def refuse(self, key: Hashable) -> None:
        """Remember that a layout cannot be recorded, so that nobody tries again."""
        self.recordings.pop(key, None)
        self._note(key, None)

    def _note(self, key: Hashable, n_seen: int | None) -> None:
        self._n_seen[key] = n_seen
        self._n_seen.move_to_end(key)
        while len(self._n_seen) > _MOST_SEEN:
            self._n_seen.popitem(last=False)

    def _make_room(self, most: int) -> bool:
        """Drop recordings that were not used for a long time. True if one more recording may be kept."""
        for key, (_, used_at) in list(self.recordings.items()):
            if len(self.recordings) < most or self.n_steps - used_at <= _IDLE_STEPS:
                break
            self.recordings.pop(key, None)
        return len(self.recordings) < most
