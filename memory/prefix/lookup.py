"""Describes what a lookup in a prefix cache found, and counts what lookups have found so far."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hybridmem.memory.blocks.arrays import Int64s
from hybridmem.memory.errors import BatchError, SpecError

Tier = Literal["", "budget", "host", "disk"]
Source = Literal["nothing", "window", "checkpoint", "host", "disk"]


@dataclass(frozen=True)
class Lookup:
    """Says how many tokens of a prompt the cache can reuse, and why it cannot reuse more.

    Attributes:
        n_tokens: the length of the prompt.
        by_attention: how many leading tokens were seen before. A model with attention only could reuse them all.
        by_recurrent: how many leading tokens have a state after them: that of a checkpoint, or of one that is rolled
            back.
        reused: the lesser of the two. It is less than `n_tokens`, because the last token must be fed for its output.
        why: the reason in words.
        tier: where the reused state is: "budget", "host" (memory) or "disk". It is "" if nothing is reused.
        n_taken_back: by how many tokens the reused checkpoint is rolled back, because it is longer than what can be
            reused.
    """

    n_tokens: int
    by_attention: int
    by_recurrent: int
    reused: int
    why: str
    tier: Tier = ""
    n_taken_back: int = 0

    @property
    def recomputed(self) -> int:
        return self.n_tokens - self.reused

    @property
    def replayed(self) -> int:
        """Return how many tokens are computed again although they were seen before.

        The prompt's last token, which must be fed in any case, does not count.
        """
        return max(0, min(self.by_attention, self.n_tokens - 1) - self.reused)

    @property
    def source(self) -> Source:
        """Return where the reuse comes from.

        "window" is a checkpoint that is rolled back, "checkpoint" one that is not, "host" or "disk" a checkpoint
        outside of the budget, and "nothing" means no reuse.
        """
        if not self.reused:
            return "nothing"
        if self.tier == "host" or self.tier == "disk":
            return self.tier
        return "window" if self.n_taken_back else "checkpoint"


@dataclass(frozen=True)
class PrefixStats:
    """Counts the hits of a cache, and the checkpoints that it holds.

    Attributes:
        n_lookups, n_hits: how many prompts were opened, and for how many of them tokens were reused.
        n_tokens, n_reused: how many tokens these prompts had, and how many of these tokens were reused.
        n_checkpoints, n_evicted: how many checkpoints the cache holds, and how many were closed for lack of room.
        private_bytes: for each checkpoint in the budget, the bytes that closing only this one would free, summed.
            Closing all of them frees at least that.
        n_outside: how many of the held checkpoints are outside of the budget, in host memory or in files.
        n_moved, n_returned: how many checkpoints were moved out of the budget so far, and how many came back.
        n_lost: how many checkpoints were closed because their file could not be read.
        n_expired: how many checkpoints were closed because their time to live had ended.
        book_bytes: bytes of host memory for the tokens of all cached prefixes. They are at most a quarter of the bytes
            that checkpoints may take.
    """

    n_lookups: int
    n_hits: int
    n_tokens: int
    n_reused: int
    n_checkpoints: int
    n_evicted: int
    private_bytes: int
    n_outside: int = 0
    n_moved: int = 0
    n_returned: int = 0
    n_lost: int = 0
    n_expired: int = 0
    book_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Return the share of all prompts' tokens that were reused."""
        return self.n_reused / self.n_tokens if self.n_tokens else 0.0


def read_prompt(token_ids: Seq[int] | Int64s) -> Int64s:
    """Return a prompt's token ids as an array. Raises BatchError."""
    try:
        tokens = np.asarray(token_ids)
    except ValueError as error:
        raise BatchError(f"{token_ids!r} are no token ids; give a flat list or array of integers") from error
    if tokens.ndim > 1:
        raise BatchError(f"token ids have shape {tokens.shape}; give one axis, one prompt at a time")
    if not tokens.ndim or (len(tokens) and tokens.dtype.kind not in "iu"):
        raise BatchError(
            f"token_ids={token_ids!r}; give a list or array of integer token ids: encode text with the model's "
            "tokenizer first"
        )
    return tokens.astype(np.int64, copy=False)


def explain(n_tokens: int, n_matched: int, reused: int) -> str:
    """Return in words why `reused` tokens of a prompt are reused, and not more."""
    if not n_matched:
        return "nothing like it was seen before"
    if reused == n_tokens - 1:
        return "all but the last token, which must be fed for its output"
    if reused == n_matched:
        return f"all {n_matched} tokens that were seen before"
    seen = f"{n_matched} tokens were seen before, and attention could reuse them; "
    if not reused:
        return seen + "there is no checkpoint on that path"
    return seen + f"recurrent states were kept at {reused}, and tokens {reused} ... {n_matched - 1} are computed again"


def read_seconds(value: float | None) -> float | None:
    """Return a time to live. Raises SpecError."""
    if value is None or (isinstance(value, int | float) and value > 0):
        return value
    raise SpecError(f"seconds_to_live={value!r}; give seconds above 0, or None for ever")
