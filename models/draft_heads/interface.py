"""Defines what a draft head is, whichever paper it comes from.

A model has computed tokens 0 ... n - 1, and has chosen token n. A draft head is then fed pairs: the hidden state of
position i, and token i + 1. From the pair of the last position it drafts token n + 1.

    positions of the model   0    1    2   ...  n - 1 | n (chosen, not fed yet)
    the head is fed         h0   h1   h2   ...  h n-1
                            t1   t2   t3   ...  t n     -> drafts t n+1

There are two kinds of heads. A `DraftHead` drafts one token at a time, and continues from its own rows. A `BlankHead`
drafts several tokens at once: after the pairs, it is fed blanks, which stand for the tokens that it drafts.

What a head remembers of earlier pairs is in a memory of its own, made from its `memory_spec`: position i there is the
pair of position i, so a sequence of that memory is as long as the model's, is rolled back to the same lengths, and is
forked, swapped and closed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from hybridmem.memory import MemorySpec, Step


class DraftHead(Protocol):
    """Drafts tokens of one model from its hidden states. It shares the model's embedding, and mostly its output matrix.

    Attributes:
        memory_spec: what the head remembers. Make a `HybridMemory` from it.
        after: the indices of the model's layers after which the head reads the residual stream, ascending. Whatever is
            here, it also reads the hidden states after the model's last norm (`Decoder.hidden_rows`).
    """

    memory_spec: MemorySpec
    after: tuple[int, ...]

    def read(self, rows_TR: Tensor) -> Tensor:
        """Return the part of the model's rows that the head reads.

        Args:
            rows_TR: (T, (len(after) + 1) * M) rows of `Decoder.hidden_rows`.
        Returns (T, M), as `__call__` takes and returns them.
        """
        ...

    def __call__(self, step: Step, rows_TM: Tensor) -> tuple[Tensor, Tensor]:
        """Feed pairs to the head.

        Args:
            step: an open step of a memory of `memory_spec`. Its tokens are the second elements of pairs.
            rows_TM: the first elements, (T, M), in the order in which the step was given its tokens: from `read`, or
                for tokens that the head itself has drafted, what an earlier call returned.
        Returns the logits (n, vocab) and the rows (n, M) of the step's outputs, in the caller's order. To draft one
            more token, feed the row with the token that was chosen from its logits.
        """
        ...


@runtime_checkable
class BlankHead(Protocol):
    """Drafts several tokens at once from the hidden states of one model, by filling blanks.

    Attributes:
        memory_spec, after: see `DraftHead`.
        n_drafted: how many tokens it drafts for a request.
        n_fed: how many tokens are fed for the blanks of a request, after its pairs.
    """

    memory_spec: MemorySpec
    after: tuple[int, ...]
    n_drafted: int

    @property
    def n_fed(self) -> int: ...

    def read(self, rows_TR: Tensor) -> Tensor:
        """Return the part of the model's rows that the head reads, as `DraftHead.read`."""
        ...

    def blanks_after(self, token_id: int) -> list[int]:
        """Return the tokens to feed after a sequence's pairs, so that the head drafts what follows this token.

        They are blanks, and no part of the text. Before the step ends, `step.accept` must keep the pairs alone.

        Args:
            token_id: the newest token of the text, which is also the second element of the last pair.
        """
        ...

    def __call__(self, step: Step, rows_PM: Tensor, n_pairs: Sequence[int]) -> Tensor:
        """Feed pairs to the head, and draft for the requests that go on with blanks.

        Args:
            step: an open step of a memory of `memory_spec`. A request is the second elements of pairs, and perhaps the
                tokens of `blanks_after`.
            rows_PM: the first elements of all pairs, (P, M) from `read`, request after request in the caller's order.
            n_pairs: how many pairs each request has, in the caller's order.
        Returns the logits (requests with blanks, n_drafted, vocab), in the caller's order.
        """
        ...
