"""Finds the positions that a rollback of a sequence reaches, and explains why other positions are refused."""

from __future__ import annotations

from hybridmem.memory.blocks.arguments import is_integer
from hybridmem.memory.errors import RollbackError
from hybridmem.memory.interface import Sequence
from hybridmem.memory.sequences.ledger import Ledger


def position_before(sequence: Sequence, length: int, n_tokens: object, to: object, horizon: int) -> int:
    """Return the position `n_tokens` before the sequence's end. Raises RollbackError."""
    if to is not None:
        why = f"to={to!r} and n_tokens={n_tokens!r} say where to return to; give one of them"
    elif not is_integer(n_tokens, 0) or n_tokens > length:
        why = f"n_tokens={n_tokens!r} cannot be taken back of {sequence!r}; give 0 <= n_tokens <= {length}"
    else:
        return length - int(n_tokens)
    raise RollbackError(why, to=to, horizon=horizon, resume_at=length)


def nearest_position(ledger: Ledger, sequence: Sequence, to: object, horizon: int) -> tuple[int, Sequence | None]:
    """Find the nearest reachable position <= `to`, and the sequence that holds its blocks (None at position 0).

    Raises RollbackError if `to` is no position.
    """
    length = int(ledger.lengths[sequence.slot])
    if not is_integer(to, 0):
        raise RollbackError(
            f"to={to!r} is no position; give 0 <= to <= {length} or a checkpoint", to=to, horizon=horizon, resume_at=0
        )
    if to >= horizon:
        return min(int(to), length), sequence
    return ledger.nearest_checkpoint(sequence, int(to))


def out_of_reach(sequence: Sequence, to: int, reached: int, length: int, horizon: int) -> RollbackError:
    """Return the error that refuses position `to`. `reached` is the nearest position that can be reached."""
    if to > reached and reached == length:
        why = f"it holds only {reached} tokens"
    else:
        why = (
            f"its tail reaches back to {horizon}, and no checkpoint holds {to}. The nearest reachable position is "
            f"{reached}: roll back to it and feed tokens {reached} ... {to - 1} again"
        )
    message = f"{sequence!r} cannot return to position {to}: {why}"
    return RollbackError(message, to=to, horizon=horizon, resume_at=reached)
