"""Defines every error that this library raises on purpose.

    HybridMemoryError
    ├── CapacityError    the budget cannot hold it          .needed .free .unit
    ├── RollbackError    that position is out of reach      .to .horizon .resume_at
    ├── DropError        tokens that cannot be dropped      .start .end (also a ValueError)
    ├── SequenceError    a closed, foreign or busy handle, or a checkpoint where a live sequence is needed
    ├── BatchError       bad tokens or requests             (also a ValueError)
    ├── StepError        a model and its step disagree
    ├── SpecError        a spec or a budget that cannot work (also a ValueError)
    ├── FormatError      a bad file; nothing was loaded     (also a ValueError)
    └── IntegrityError   the bookkeeping contradicts itself: a bug of this library

If a call raises one of these errors, it has changed nothing.
"""

from __future__ import annotations

BUDGET_UNIT, HOST_UNIT = "bytes", "bytes of host memory"
"""What a `CapacityError` counts: bytes of the budget, or bytes of `HybridMemory(host_pages=...)`."""

_LARGER = {BUDGET_UNIT: "give the memory a larger budget, of", HOST_UNIT: "give the memory more host_pages,"}
_REMEDIES = {
    BUDGET_UNIT: "close sequences or checkpoints, feed fewer tokens",
    HOST_UNIT: "close sequences or checkpoints that are there, bring one back with memory.to_device",
}


_MOST_CHARACTERS = 2000
"""The longest message, in characters.

Messages need a limit, because they may name a value of any size from a caller.
"""


class HybridMemoryError(Exception):
    """Is the base class of all errors of this library. A message that shows a large value leaves out its middle."""

    def __init__(self, message: str = "") -> None:
        half = _MOST_CHARACTERS // 2
        n_left_out = len(message) - 2 * half
        super().__init__(
            f"{message[:half]} ... {n_left_out:,} characters ... {message[-half:]}" if n_left_out > 0 else message
        )


class CapacityError(HybridMemoryError):
    """The budget cannot hold what was asked for.

    Attributes:
        capacity: the size of the budget in bytes, or of the memory that `unit` names.
    """

    def __init__(self, message: str, *, needed: int, free: int, unit: str = "bytes", capacity: int = 0) -> None:
        super().__init__(message)
        self.capacity = capacity
        self.needed = needed
        self.free = free
        self.unit = unit

    @staticmethod
    def of(what: str, needed: int, free: int, capacity: int, unit: str = BUDGET_UNIT) -> CapacityError:
        """Make the error for `what` ("3 x pages need"), which needs more than is free, or more than any free piece.

        Args:
            capacity: the size in bytes of the budget or of `host_pages`. The message names a size that is enough.
        """
        why = CapacityError.why_apart(needed, free)
        enough = capacity + needed - (0 if why else free)
        return CapacityError(
            f"{what} {needed:,} {unit}; {free:,} are free{why}: {CapacityError.remedy(unit, enough)}",
            needed=needed, free=free, unit=unit, capacity=capacity,
        )  # fmt: skip

    @staticmethod
    def why_apart(needed: int, free: int) -> str:
        """Return why `free` bytes do not help although they are enough: they lie apart.

        Return "" if they are not enough.
        """
        return "" if needed > free else ", but not in pieces large enough while steps are open"

    @staticmethod
    def remedy(unit: str, enough: int, others: str = "") -> str:
        """Return advice to the user, such as to give a capacity of `enough` bytes.

        If `others` is given, it replaces the usual advice.
        """
        return f"{others or _REMEDIES[unit]}, or {_LARGER[unit]} {enough:,} bytes"


class RollbackError(HybridMemoryError):
    """A sequence cannot return to that position.

    Attributes:
        to: the position asked for, in tokens. If the argument was no position, `to` is the argument itself.
        horizon: the earliest position that the sequence's own tail still reaches.
        resume_at: the nearest reachable position <= `to`, or the sequence's length if `to` lies beyond it.
    """

    def __init__(self, message: str, *, to: object, horizon: int, resume_at: int) -> None:
        super().__init__(message)
        self.to = to
        self.horizon = horizon
        self.resume_at = resume_at


class DropError(HybridMemoryError, ValueError):
    """A sequence cannot drop these tokens: the range does not exist, or a layer's memory would be wrong without them.

    Attributes:
        start, end: the range asked for, exactly as the caller gave it.
    """

    def __init__(self, message: str, *, start: object, end: object) -> None:
        super().__init__(message)
        self.start = start
        self.end = end


class SequenceError(HybridMemoryError):
    """A handle cannot be used for this: it is closed, of another memory, in an open step, or a checkpoint."""


class BatchError(HybridMemoryError, ValueError):
    """Requests make no batch: a sequence occurs twice, or tokens are missing, no integers or out of vocabulary."""


class StepError(HybridMemoryError):
    """A model used a step in a way that its memory's spec does not allow, or left a layer out."""


class SpecError(HybridMemoryError, ValueError):
    """A spec, a budget or an option cannot work."""


class FormatError(HybridMemoryError, ValueError):
    """A file is damaged, incomplete or of another kind. Nothing was loaded."""


class MismatchError(FormatError):
    """A file is whole, but was saved from a memory or a model that is not like this one. Nothing was loaded."""


class IntegrityError(HybridMemoryError):
    """The memory's bookkeeping contradicts itself. This is a bug of this library: please report it."""
