"""Defines the adapter, which a memory needs to be tested: some eight calls, and the model whose layers it serves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Handle = Hashable
"""Whatever a memory names a sequence by."""
Logits = NDArray[np.float32]
"""Outputs of a model, (n_tokens, vocab)."""


class RefusedError(Exception):
    """A memory refuses a call and says so. Nothing may have changed then."""


class AbsentError(RefusedError):
    """A memory has no such call."""


class InjectedError(Exception):
    """The error that a layer raises because the kit asked for it."""


@dataclass(frozen=True)
class Agreement:
    """Says how closely outputs must agree with recomputed ones.

    Attributes:
        rounding: the largest difference that is allowed, as a part of the spread of the logits.
        cuts_matter: True if outputs depend on how tokens were cut into steps, as with eviction policies. Then outputs
            are recomputed in the same steps, else all at once.
        same_bits: True if equal steps must give equal bits, whatever else is in the batch or was taken back. If a part
            of a step was taken back, rounding is allowed, unless the adapter can `accept` that part, because then the
            recomputed step has the same shape.
    """

    rounding: float = 1e-5
    cuts_matter: bool = False
    same_bits: bool = False

    @property
    def is_in_steps(self) -> bool:
        """True if tokens are recomputed in the steps in which they were fed."""
        return self.cuts_matter or self.same_bits


class Adapter(ABC):
    """Passes the kit's calls on to one memory, which is empty at first, and to its model.

    A call that a memory cannot do, or cannot do now, raises `RefusedError` and changes nothing. A call that an adapter
    does not override raises `AbsentError`. Any other error counts as a fault of the memory, or of a model or policy in
    it.
    """

    vocab_size: int
    agreement = Agreement()

    @abstractmethod
    def open(self) -> Handle:
        """Open an empty sequence."""

    @abstractmethod
    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        """Feed new tokens of several sequences, in one pass of the model where the memory can.

        Args:
            fail_after: raise `InjectedError` out of the model when this many of its layers have run. If it has no more
                layers, nothing is raised. Raise `AbsentError` if this adapter cannot let a layer fail.
        Returns the logits of each request's tokens, (n, vocab), in the order of the requests.
        """

    @abstractmethod
    def close(self, sequence: Any) -> None:
        """Forget a sequence, or a checkpoint."""

    def accept(self, sequence: Any, tokens: list[int], n_kept: int) -> Logits:
        """Feed tokens in one step, and let only the first `n_kept` of them count, which is at least 1.

        Where cuts matter, the kit recomputes with it steps that were taken back in part. A step of the same length
        rounds as the first one did. With another rounding, a storage of few bits could differ by a whole code. Returns
        the logits of all the tokens, (n, vocab).
        """
        raise AbsentError("it cannot keep a part of a step")

    def length(self, sequence: Any) -> int:
        """Return how many tokens the memory says that a sequence has."""
        raise AbsentError("it does not say how long a sequence is")

    def rollback(self, sequence: Any, to: int) -> None:
        """Keep the first `to` tokens of a sequence, and forget the others."""
        raise AbsentError("it has no rollback")

    def checkpoint(self, sequence: Any) -> Handle:
        """Remember where a sequence is until the checkpoint is closed. What is fed later does not change it."""
        raise AbsentError("it has no checkpoints")

    def return_to(self, sequence: Any, checkpoint: Any) -> None:
        """Let a sequence continue from a checkpoint of it, of the one that it was forked from, or of a fork."""
        raise AbsentError("it has no checkpoints")

    def fork(self, sequence: Any) -> Handle:
        """Open a new sequence that goes on where this one is."""
        raise AbsentError("it has no forks")

    def reorder(self, moves: Mapping[Any, Any]) -> None:
        """Let each key go on as its value was, all at once."""
        raise AbsentError("it has no reorder")

    def save(self, sequence: Any, path: Path) -> None:
        """Write a sequence to a file."""
        raise AbsentError("it saves nothing")

    def load(self, path: Path) -> Handle:
        """Open a sequence that goes on where the saved one was."""
        raise AbsentError("it loads nothing")

    def usage(self) -> int:
        """Return the bytes that the open sequences take."""
        raise AbsentError("it does not say what it uses")

    def can(self, call: str, *arguments: Any) -> bool | None:
        """Return whether a call with these arguments would succeed now, or None if the memory does not say."""
        return None

    def events(self) -> Mapping[str, int]:
        """Return how often each event has happened inside of the memory that histories ought to reach, such as folds
        and evictions. What stays 0 is reported as never exercised.
        """
        return {}

    def check(self) -> None:  # noqa: B027 - a memory need not have one
        """Raise any error if the memory's own books do not balance."""


Factory = Callable[[], Adapter]
"""Makes an adapter over a new, empty memory, each time with the same model."""
