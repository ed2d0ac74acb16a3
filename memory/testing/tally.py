"""Counts what a memory has done, has refused and does not have, so that a report can name what was never tested."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

EXERCISED = {
    "Step": "steps",
    "Branch": "trees of tokens",
    "Rollback": "rollbacks",
    "ReturnTo": "returns to checkpoints",
    "Fork": "forks",
    "Reorder": "reorderings",
    "Reload": "sequences saved and loaded",
    "Fault": "steps that failed",
    "Misuse": "wrong calls refused",
    "Answer": "answers to whether it can go back",
    "Length": "lengths compared",
    "CloseAll": "bytes compared",
    "Fed": "tokens fed",
    "TakenBack": "tokens taken back",
}
"""Maps each counted operation or event to words for it."""
_REQUIRED = frozenset({"Open", "Step", "Close"})
"""The calls that every memory must have. If one of them is absent, that counts as a refusal."""


@dataclass
class Tally:
    """Counts the outcomes of the operations in a promise's histories.

    Attributes:
        done: the operations that had an effect, and the other events that `EXERCISED` names.
        refused: the operations that the memory must do, but refused.
        absent: the operations that the memory does not have.
        events: what happened inside of the memory, under the adapter's names.
        why: for each of "refused", "absent" and "out of reach" (which a memory may refuse), the first reason.
    """

    operations: int = 0
    compared: int = 0
    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    absent: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    why: dict[str, str] = field(default_factory=dict)

    def lack(self, kind: str, why: str) -> None:
        """Count a call that the memory says it does not have."""
        if kind in _REQUIRED:
            self.refuse(kind, why)
            return
        self.absent[kind] += 1
        self.why.setdefault("absent", why)

    def refuse(self, kind: str, why: str, *, is_allowed: bool = False) -> None:
        """Count a refusal. With `is_allowed`, the memory need not do what it refused."""
        if not is_allowed:
            self.refused[kind] += 1
        self.why.setdefault("out of reach" if is_allowed else "refused", why)

    @property
    def n_refused(self) -> int:
        """Return how many required operations were refused, or were absent sometimes although they worked elsewhere."""
        return self.refused.total() + sum(n for kind, n in self.absent.items() if self.done[kind])

    @property
    def first_reason(self) -> str:
        """Return the reason that best explains why a promise was not shown."""
        found = (self.why.get(kind) for kind in ("refused", "absent", "out of reach"))
        return next(filter(None, found), "it does not say, or has nothing that could fail")

    @property
    def exercised(self) -> dict[str, int]:
        """Return how often each operation or event happened, with 0 for those that never did."""
        return {words: self.done[kind] for kind, words in EXERCISED.items()} | self.events
