"""Drops tokens from the middle of a sequence, in all layer memories or in none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import Any, NoReturn

from hybridmem.memory.errors import CapacityError, DropError
from hybridmem.memory.interface import Dropped, DropsTokens


class CannotDrop(ABC):
    """Refuses every drop, for layer memories whose old rows cannot move.

    So the methods that need a plan are never called.
    """

    @abstractmethod
    def why_not(self) -> str:
        """Return the reason for the error message: which layers cannot drop tokens."""

    def plan_drop(self, dropped: Dropped) -> NoReturn:
        raise DropError(
            f"tokens [{dropped.start}, {dropped.end}) cannot be dropped: {self.why_not()}; roll back to "
            f"{dropped.start} and feed the rest again",
            start=dropped.start, end=dropped.end,
        )  # fmt: skip

    def bytes_to_drop(self, dropped: Dropped) -> NoReturn:
        self.plan_drop(dropped)

    def drop(self, plan: NoReturn) -> None:
        raise AssertionError("there is no plan")

    def abandon_drop(self, plan: NoReturn) -> None:
        raise AssertionError("there is no plan")


def drop_from_all(memories: Seq[DropsTokens], dropped: Dropped) -> None:
    """Drop tokens from all layer memories, or from none. Raises DropError or CapacityError."""
    plans: list[tuple[DropsTokens, Any]] = []
    try:
        for memory in memories:
            plans.append((memory, memory.plan_drop(dropped)))
    except BaseException as error:
        for memory, plan in plans:
            memory.abandon_drop(plan)
        # The error counts the copies of one layer memory. Report the bytes that all of them copy.
        if isinstance(error, CapacityError):
            n_bytes = [memory.bytes_to_drop(dropped) for memory in memories]
            free_bytes = error.free + sum(n_bytes[: len(plans)])
            what = "the rows behind the dropped tokens are copied and need"
            raise CapacityError.of(what, sum(n_bytes), free_bytes, error.capacity, error.unit) from None
        raise
    for memory, plan in plans:
        memory.drop(plan)
