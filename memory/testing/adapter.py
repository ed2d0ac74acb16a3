"""Defines the adapter that a memory needs to be tested: some eight calls, and the model whose layers it serves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Handle = Hashable
"""The object by which a memory identifies a sequence."""
Logits = NDArray[np.float32]
"""The outputs of a model, (n_tokens, vocab)."""


class RefusedError(Exception):
    """A memory refuses a call with an error of its own. Nothing may have changed then."""


class AbsentError(RefusedError):
    """A memory does not have this call."""


class InjectedError(Exception):
    """The error that a layer raises because the kit asked for it."""


@dataclass(frozen=True)
class Agreement:
    """Says how closely outputs must agree with recomputed outputs.

    Attributes:
        rounding: the largest difference that is allowed, divided by the spread of the logits.
        cuts_matter: True if outputs depend on how tokens were cut into steps, as with eviction policies. Then outputs
            are recomputed in the same steps, otherwise in one step.
        same_bits: True if equal steps must give equal bits, whatever other requests are in the batch, and whatever was
            taken back. If a part of a step was taken back, rounding is allowed, unless the adapter can `accept` that
            part, because then the recomputed step has the same shape.
        reproducible: True if bits are a function of the text: outputs of a token are the same, bit for bit, in whatever
            steps it and the tokens before it were fed. Then outputs are recomputed token by token.
    """

    rounding: float = 1e-5
    cuts_matter: bool = False
    same_bits: bool = False
    reproducible: bool = False

    @property
    def is_in_steps(self) -> bool:
        """True if tokens are recomputed in the steps in which they were fed."""
        return not self.reproducible and (self.cuts_matter or self.same_bits)


class Adapter(ABC):
    """Passes the kit's calls on to one memory, which is empty at first, and to its model.

    A call that a memory does not support, or cannot do now, raises `RefusedError` and changes nothing. A call that an
    adapter does not override raises `AbsentError`. Any other error counts as a fault of the memory, or of a model or
    policy that it runs.
    """

    vocab_size: int
    agreement = Agreement()

    @abstractmethod
    def open(self) -> Handle:
        """Open an empty sequence."""

    @abstractmethod
    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        """Feed new tokens of several sequences, in one pass of the model if the memory can.

        Args:
            fail_after: raise `InjectedError` from the model when this many of its layers have run. If the model has no
                more layers, raise nothing. Raise `AbsentError` if this adapter cannot let a layer fail.
        Returns the logits of each request's tokens, (n, vocab), in the order of the requests.
        """

    @abstractmethod
    def close(self, sequence: Any) -> None:
        """Forget a sequence, or a checkpoint."""

    def accept(self, sequence: Any, tokens: list[int], n_kept: int) -> Logits:
        """Feed tokens in one step, and keep only the first `n_kept` of them, at least 1.

        If cuts matter, the kit uses it to recompute steps that were taken back in part. A step of the same length has
        the same rounding as the first one. With another rounding, numbers in few bits could differ by a whole code.
        Returns the logits of all the tokens, (n, vocab).
        """
        raise AbsentError("it cannot keep a part of a step")

    def branch(self, sequence: Any, tokens: list[int], parents: list[int], path: list[int]) -> Logits:
        """Feed a tree of tokens in one step, and keep only those on one path.

        Args:
            parents: for each token, the index of the token before it, which is smaller, or -1 for the sequence's end.
            path: the indices of the tokens to keep, each the parent of the next one. It may be empty.
        Returns the logits of all the tokens, (n, vocab). Each must be those of a text that ends with the token's path.
        """
        raise AbsentError("it takes no trees of tokens")

    def length(self, sequence: Any) -> int:
        """Return how many tokens a sequence has, according to the memory."""
        raise AbsentError("it does not say how long a sequence is")

    def rollback(self, sequence: Any, to: int) -> None:
        """Keep the first `to` tokens of a sequence, and forget the others."""
        raise AbsentError("it has no rollback")

    def checkpoint(self, sequence: Any) -> Handle:
        """Make a checkpoint of a sequence, which stays until it is closed. Later tokens do not change it."""
        raise AbsentError("it has no checkpoints")

    def return_to(self, sequence: Any, checkpoint: Any) -> None:
        """Let a sequence continue from a checkpoint of itself, of the one that it was forked from, or of a fork."""
        raise AbsentError("it has no checkpoints")

    def fork(self, sequence: Any) -> Handle:
        """Open a new sequence that continues from this one."""
        raise AbsentError("it has no forks")

    def reorder(self, moves: Mapping[Any, Any]) -> None:
        """Let each key continue from the memory of its value, all at once."""
        raise AbsentError("it has no reorder")

    def save(self, sequence: Any, path: Path) -> None:
        """Write a sequence to a file."""
        raise AbsentError("it saves nothing")

    def load(self, path: Path) -> Handle:
        """Open a sequence that continues from the saved one."""
        raise AbsentError("it loads nothing")

    def usage(self) -> int:
        """Return the bytes that the open sequences take."""
        raise AbsentError("it does not say what it uses")

    def can(self, call: str, *arguments: Any) -> bool | None:
        """Return whether a call with these arguments would succeed now, or None if the memory does not say."""
        return None

    def events(self) -> Mapping[str, int]:
        """Return how often each inner event has happened that histories should reach, such as folds and evictions.

        Events that stay at 0 are reported as never exercised.
        """
        return {}

    def check(self) -> None:  # noqa: B027 - a memory need not have one
        """Raise any error if the memory's own bookkeeping contradicts itself."""


Factory = Callable[[], Adapter]
"""A function that makes an adapter over a new, empty memory, each time with the same model."""
