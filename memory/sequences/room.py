"""Finds room in the budget: computes the bytes that requests need, and frees what is optional, or refuses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from memory.blocks.arena import Arena
from memory.blocks.arrays import Int64s, ceil_div
from memory.blocks.layout import aligned_bytes
from memory.errors import HOST_UNIT, CapacityError
from memory.interface import Sequence, Stretch
from memory.sequences.batch import count_tokens
from memory.sequences.chunks import cut_anywhere, cut_on_grid
from memory.sequences.compactor import Compactor
from memory.sequences.ledger import Ledger

_T = TypeVar("_T")

_MANY_TOKENS = 4096
"""Tokens of a step from which on it is faster to compute whether they can fit than to read and plan them in vain."""
_MOST_STEPS = 1024
"""Last steps of a prompt that are computed: sequences grow, but for blocks that come and go within few steps."""


class Holders(Protocol):
    """Declares what is read of the layer memories of a model: a part of `memory.layer_memories.LayerMemories`."""

    def bytes_for(self, stretch: Stretch) -> Int64s: ...
    def held_bytes(self, *slots: int) -> int: ...
    @property
    def block_bytes(self) -> list[int]: ...


@dataclass(frozen=True)
class Need:
    """Says how many bytes of the budget requests take while they are fed: exact for new sequences, else a lower bound.

    Attributes:
        n_tokens, n_requests: of all of them.
        new_bytes: on top of what is held now, at the worst moment.
        total_bytes: with what their own sequences hold.
        spare_bytes: for gaps between blocks of several sizes: so much more is always enough, less may be.
    """

    n_tokens: int
    n_requests: int
    new_bytes: int
    total_bytes: int
    spare_bytes: int

    def at_least(self, new_bytes: int) -> Need:
        """Return the same need with at least so many new bytes: shared blocks are copied before they are written."""
        more = max(0, new_bytes - self.new_bytes)
        return replace(self, new_bytes=self.new_bytes + more, total_bytes=self.total_bytes + more)

    def refusal(self, budget_bytes: int, free_bytes: int) -> CapacityError:
        """Explain why there is no room: never in this budget, not now, or only in pieces that are too small."""
        what = f"{_count(self.n_tokens, 'token')} for {_count(self.n_requests, 'sequence')}"
        if self.total_bytes > budget_bytes:
            least = self.total_bytes + self.spare_bytes
            return CapacityError(
                f"{what} need {least:,} bytes, what is held of the same included: a budget of {budget_bytes:,} can "
                f"never hold them. Feed fewer tokens, or give the memory a larger budget, of {least:,} bytes",
                needed=least, free=free_bytes,
            )  # fmt: skip
        why = "" if self.new_bytes > free_bytes else ", but not in pieces large enough"
        least = budget_bytes + max(0, self.new_bytes - free_bytes) + self.spare_bytes
        return CapacityError(
            f"{what} do not fit now: they need {self.new_bytes:,} bytes more, and {free_bytes:,} of {budget_bytes:,} "
            f"are free{why}. Close sequences or checkpoints, feed fewer tokens, or give the memory a larger budget, of "
            f"{least:,} bytes",
            needed=self.new_bytes, free=free_bytes,
        )  # fmt: skip


def need_of(
    holders: Holders, slots: Int64s, lengths: Int64s, peaks: Int64s, counts: Int64s, max_tokens: int, *, on_grid: bool
) -> Need:
    """Compute the bytes of requests that are fed in the steps of `memory.sequences.chunks`.

    Args:
        slots: (S,) of their sequences; -1 for one that is not open yet.
        lengths, peaks: (S,) as the ledger has them.
        counts: (S,) tokens of each request.
        on_grid: True if they are cut on the grid.
    Cost: O(requests + steps), of which at most the last 1024 count, or all on the grid.
    """
    order = counts.argsort(kind="stable")
    slots, lengths, peaks, counts = slots[order], lengths[order], peaks[order], counts[order]
    ends, held, first = counts.cumsum(), np.unique(slots[slots >= 0]), 0
    n_tokens = int(ends[-1])
    if on_grid:
        chunks = cut_on_grid(lengths, counts, max_tokens)
    else:
        first = max(0, ceil_div(n_tokens, max_tokens) - _MOST_STEPS) * max_tokens
        chunks = cut_anywhere(counts, max_tokens, first)
    request, step = chunks.requests, chunks.steps
    starts, stops = lengths[request] + chunks.starts, lengths[request] + chunks.ends
    before, inside, after, _ = holders.bytes_for(
        Stretch(slots[request], starts, stops, np.maximum(peaks[request], starts))
    )
    # A request that is done holds all its tokens; one that goes on holds what its last step has left.
    is_done = ends <= first
    done = lengths[is_done] + counts[is_done]
    done_bytes = holders.bytes_for(Stretch(slots[is_done], done, done, np.maximum(peaks[is_done], done)))[0].sum()
    goes_on = request[1:] == request[:-1]
    before[1:][goes_on] = after[:-1][goes_on]
    is_first = np.append(True, ~goes_on)
    n_steps = int(step.max()) + 1
    grown = np.bincount(step, after - before, n_steps).cumsum()
    steps = before[is_first].sum() + np.append(0, grown[:-1]) + np.bincount(step, inside - before, n_steps)
    most = int(done_bytes + max(steps.max(), before[is_first].sum() + grown[-1]))
    new_bytes = max(0, most - sum(map(holders.held_bytes, held.tolist())))
    total_bytes = new_bytes + holders.held_bytes(*held.tolist())
    return Need(n_tokens, len(counts), new_bytes, total_bytes, _spare_bytes(holders, len(counts), total_bytes))


def _spare_bytes(holders: Holders, n_requests: int, total_bytes: int) -> int:
    """Estimate the bytes lost in gaps between blocks of several sizes: at most a quarter, or a few blocks."""
    sizes = holders.block_bytes
    gaps_bytes = max(sum(sizes) + max(sizes, default=0), min(n_requests * sum(sizes), total_bytes // 4))
    return aligned_bytes(gaps_bytes) if len(set(sizes)) > 1 else 0


def _count(n: int, what: str) -> str:
    """Return "1 token" or "2 tokens"."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


class Room:
    """Finds room in the budget for calls that allocate blocks, or refuses them.

    Attributes:
        reclaimers: called with the bytes that are missing; each frees what is optional, and returns True if it has
            freed anything.
        compactors: `CapacityError.unit` -> what moves blocks there.
    Args:
        abort_abandoned: aborts steps that an interrupt left open, and returns True if there was any.
        on_grid: True if runs cut requests on the grid of `memory.sequences.chunks`.
    """

    def __init__(
        self, arena: Arena, holders: Holders, ledger: Ledger, compactors: Mapping[str, Compactor],
        abort_abandoned: Callable[[], bool], *, on_grid: bool,
    ) -> None:  # fmt: skip
        self.arena = arena
        self.on_grid = on_grid
        self.reclaimers: list[Callable[[int], bool]] = []
        self._holders = holders
        self._ledger = ledger
        self.compactors = compactors
        self._abort_abandoned = abort_abandoned

    def need(self, slots: Int64s, counts: Int64s, max_tokens: int) -> Need:
        """Compute the bytes that requests for slots (S,) of counts (S,) tokens need; see `need_of`."""
        lengths, peaks = self._ledger.lengths[slots], self._ledger.peaks[slots]
        return need_of(self._holders, slots, lengths, peaks, counts, max_tokens, on_grid=self.on_grid)

    def refusal(self, need: Need) -> CapacityError:
        """Return the error for requests that do not fit, into this budget or now."""
        return need.refusal(self.arena.capacity_bytes, self.arena.free_bytes)

    def lack(self, slots: Int64s, counts: Int64s, max_tokens: int, *, least_bytes: int = 0) -> CapacityError:
        """Return the error for requests that do not fit; their new bytes are `least_bytes` or more."""
        return self.refusal(self.need(slots, counts, max_tokens).at_least(least_bytes))

    def refuse_hopeless(self, sequences: list[Sequence], values: list[Any]) -> None:
        """Raise CapacityError if these are thousands of tokens that never fit; only their number is read."""
        if set(map(type, values)) != {int} and (counts := count_tokens(values)).sum() > _MANY_TOKENS:
            need = self.need(self._ledger.check_all_usable(sequences), counts, int(counts.sum()))
            if need.total_bytes > self.arena.capacity_bytes:
                raise self.refusal(need)

    def require(self, sequences: list[Sequence], counts: Int64s, max_tokens: int) -> None:
        """Refuse requests that cannot fit, before they change anything; free what is optional if they then can.

        Args:
            counts: (S,) tokens of each.
        Raises:
            CapacityError: with the bytes that all of them need together. SequenceError.
        """
        slots = self._ledger.check_all_usable(sequences)

        def attempt() -> None:
            need = self.need(slots, counts, max_tokens)
            if need.total_bytes > self.arena.capacity_bytes or need.new_bytes > self.arena.free_bytes:
                raise self.refusal(need)

        self.make(attempt)

    def make(self, attempt: Callable[[], _T]) -> _T:
        """Return what `attempt` returns. Where it lacks room, make some and call it again.

        Where bytes lie apart, blocks are moved together if that is cheap; else what is optional is freed; and if there
        is nothing more to free, blocks are moved at any cost. Nothing is freed for what the whole budget cannot hold.
        """
        least_bytes = 0
        while True:
            try:
                return attempt()
            except CapacityError as error:
                if self._abort_abandoned():
                    continue
                # A layer memory that refuses does not count those that have not planned yet: so ask for more each time.
                least_bytes = max(error.needed, 2 * least_bytes) if error.needed <= error.free else 0
                if self._compact(error, least_bytes) or self._reclaim(error):
                    continue
                if not self._compact(error, least_bytes, at_any_cost=True):
                    raise

    def _compact(self, error: CapacityError, least_bytes: int, *, at_any_cost: bool = False) -> bool:
        """Move blocks if that can help: enough bytes are free. True if any block has moved."""
        n_bytes = min(least_bytes, error.free)
        return n_bytes > 0 and self.compactors[error.unit].make_room(n_bytes, at_any_cost=at_any_cost)

    def _reclaim(self, error: CapacityError) -> bool:
        """Free what is optional. True if anything was freed."""
        if error.unit == HOST_UNIT:  # only closing checkpoints that are in host memory makes room there
            can_help = any(s.is_checkpoint and s.is_on_host for s in self._ledger.handles.values())
        else:
            can_help = error.needed <= self.arena.capacity_bytes
        missing_bytes = max(1, error.needed - error.free)
        return can_help and any(reclaim(missing_bytes) for reclaim in [*self.reclaimers])
