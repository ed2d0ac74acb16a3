"""Finds the longest prefix of a token list that need not be computed: in a live sequence, or in the prefix cache."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from hybridmem.chat.engine.engine import Engine
from hybridmem.memory import FormatError, Sequence


@dataclass(frozen=True)
class Start:
    """Says where to continue from.

    Attributes:
        sequence: holds the first `n_kept` tokens of the list; feed it the others, one at least.
        n_known: leading tokens that were seen before, by the sequence or by the prefix cache. Those that are not kept
            must be computed again: the nearest state that was kept lies before them.
    """

    sequence: Sequence
    n_kept: int
    n_known: int


def resume(engine: Engine, sequence: Sequence | None, token_ids: Seq[int], owner: Hashable = None) -> Start:
    """Continue from what keeps more of `token_ids`: the live sequence, rolled back, or a fork from the prefix cache.

    Args:
        sequence: live, and the caller's no longer: it is rolled back, or closed where the cache has more. None: only
            the cache is asked. One that was swapped out comes back; if its file was damaged, it is given up, and what
            the cache does not have is computed.
        token_ids: at least one.
        owner: of the prefixes that it may go on from.
    Raises:
        CapacityError: no room to bring it back; it is as it was. SequenceError: a bad handle.
    Cost: no layer runs and no tensor is copied, but to swap in.
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
                opened, lookup = engine.prefixes.open(wanted, owner)
                if sequence is not None:
                    memory.close(sequence)
                return Start(opened, lookup.reused, n_known)
        if sequence is None:
            return Start(memory.open(), 0, n_known)
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
