"""Finds the longest prefix of a token list that a live sequence or the prefix cache holds."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from hybridmem.chat.engine.engine import Engine
from hybridmem.memory import FormatError, Sequence


@dataclass(frozen=True)
class Start:
    """Says from which sequence a prompt continues.

    Attributes:
        sequence: holds the first `n_kept` tokens of the list. The others, at least one, are to be fed.
        n_known: how many leading tokens the sequence or the prefix cache has seen before. If `n_kept` is smaller, the
            tokens between must be computed again, because the nearest kept state lies before them.
    """

    sequence: Sequence
    n_kept: int
    n_known: int


def resume(engine: Engine, sequence: Sequence | None, token_ids: Seq[int], owner: Hashable = None) -> Start:
    """Continue from the live sequence or from the prefix cache, whichever keeps more of `token_ids`.

    The live sequence is rolled back. The prefix cache gives a fork.

    Args:
        sequence: a live sequence, which the caller gives away. It is rolled back, or closed if the cache has more. One
            that was swapped out is swapped in; if its file is damaged, it is closed, and tokens that the cache lacks
            are computed. None: only the cache is used.
        token_ids: the whole prompt, at least one token.
        owner: the owner of the prefixes that may be reused.
    Raises:
        CapacityError: there is no room to swap the sequence in; the sequence is unchanged. SequenceError: a bad handle.
    Cost: no layer runs. Tensors are copied only to swap in.
    """
    memory, wanted = engine.memory, np.asarray(token_ids, np.int64)
    with engine.lock:
        n_own = n_known = 0
        if sequence is not None:
            n_known = _n_common(sequence, wanted)
            sequence = _awake(engine, sequence)
        if sequence is not None:
            n_own = memory.resume_point(sequence, min(n_known, len(wanted) - 1))
        if engine.prefixes is not None:
            lookup = engine.prefixes.find(wanted, owner)
            n_known = max(n_known, lookup.by_attention)
            if sequence is None or lookup.reused > n_own:
                opened, lookup = engine.open_prefix(wanted, owner)
                if sequence is not None:
                    memory.close(sequence)
                return Start(opened, lookup.reused, n_known)
        if sequence is None:
            return Start(memory.open(), 0, n_known)
        n_own = engine.resumes_at(sequence, n_own, owner)
        if sequence.length > n_own:
            memory.rollback(sequence, to=n_own)
        return Start(sequence, n_own, n_known)


def _awake(engine: Engine, sequence: Sequence) -> Sequence | None:
    if sequence.is_swapped:
        try:
            engine.memory.swap_in(sequence)
        except FormatError:
            engine.memory.close(sequence)
            return None
    return sequence


def _n_common(sequence: Sequence, wanted: np.ndarray) -> int:
    held = sequence.tokens[: len(wanted)]
    differs = held != wanted[: len(held)]
    return int(differs.argmax()) if differs.any() else len(held)
