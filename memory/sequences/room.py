"""Finds room in the budget: computes the bytes that requests need, and frees optional bytes, or refuses requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from hybridmem.memory.blocks.arena import Arena
from hybridmem.memory.blocks.arrays import Int64s, ceil_div
from hybridmem.memory.errors import BUDGET_UNIT, HOST_UNIT, CapacityError
from hybridmem.memory.interface import Sequence, Stretch
from hybridmem.memory.sequences.batch import count_tokens
from hybridmem.memory.sequences.chunks import cut_anywhere, cut_on_grid
from hybridmem.memory.sequences.compactor import Compactor, Holders
from hybridmem.memory.sequences.ledger import Ledger

_T = TypeVar("_T")

_MANY_TOKENS = 4096
"""For a step of this many tokens or more, first computing whether they fit is faster than a plan that fails."""
_MOST_STEPS = 1024
"""How many of a prompt's last steps are computed.

Earlier steps need fewer bytes, because sequences grow and other blocks live only for a few steps.
"""


@dataclass(frozen=True)
class Need:
    """Says how many bytes of the budget requests need while they are fed. The numbers are exact for new sequences.

    Attributes:
        n_tokens, n_requests: how many tokens and requests there are.
        new_bytes: at least so many bytes are needed at the worst moment, in addition to what is held now.
        total_bytes: the same, plus the bytes that the sequences of the requests hold now.
        most_new_bytes: a function that returns the most new bytes that may be needed, whatever the sequences share with
            others.
    """

    n_tokens: int
    n_requests: int
    new_bytes: int
    total_bytes: int
    most_new_bytes: Callable[[], int]

    def at_least(self, new_bytes: int) -> Need:
        """Return the same need with at least so many new bytes.

        Shared blocks may add some, because they are copied before they are written.
        """
        more = max(0, new_bytes - self.new_bytes)
        return replace(self, new_bytes=self.new_bytes + more, total_bytes=self.total_bytes + more)

    def refusal(self, arena: Arena) -> CapacityError:
        """Explain why the requests do not fit: never, not now, or only into free pieces that are too small.

        The error names a capacity that is enough for the requests in addition to all that is held now.
        """
        capacity, free, unit = arena.capacity_bytes, arena.free_bytes, arena.unit
        what = f"{_count(self.n_tokens, 'token')} for {_count(self.n_requests, 'sequence')}"
        apart = CapacityError.why_apart(self.new_bytes, free)
        needed = enough = capacity + max(self.new_bytes, self.most_new_bytes()) - (0 if apart else free)
        if self.total_bytes > capacity:
            place = "a budget" if unit == BUDGET_UNIT else "host_pages"
            why = (
                f"need {self.total_bytes:,} {unit}, what is held of the same included: {place} of {capacity:,} can "
                f"never hold them. {CapacityError.remedy(unit, enough, 'Feed fewer tokens')}"
            )
        else:
            needed, remedy = self.new_bytes, CapacityError.remedy(unit, enough)
            why = (
                f"do not fit now: they need {needed:,} {unit} more, and {free:,} of {capacity:,} are free{apart}. "
                f"{remedy[0].upper()}{remedy[1:]}"
            )
        return CapacityError(f"{what} {why}", needed=needed, free=free, unit=unit, capacity=capacity)


def need_of(
    holders: Holders, slots: Int64s, lengths: Int64s, peaks: Int64s, counts: Int64s, max_tokens: int, *, on_grid: bool
) -> Need:
    """Compute the bytes of requests that are fed in the steps of `memory.sequences.chunks`.

    Args:
        slots: (S,) the slots of the requests' sequences; -1 for a sequence that is not open yet.
        lengths, peaks: (S,) the ledger's lengths and peaks.
        counts: (S,) tokens of each request.
        on_grid: True if the requests are cut on the grid.
    Cost: O(requests + steps). Only the last 1024 steps count, but on the grid all do.
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
    stretch = Stretch(slots[request], starts, stops, np.maximum(peaks[request], starts))
    before, inside, after, _ = holders.bytes_for(stretch)
    # A finished request holds all its tokens. An unfinished one holds what its last step has left.
    is_done = ends <= first
    done = lengths[is_done] + counts[is_done]
    done_bytes = holders.bytes_for(Stretch(slots[is_done], done, done, np.maximum(peaks[is_done], done)))[0].sum()
    goes_on = request[1:] == request[:-1]
    is_first, n_steps = np.append(True, ~goes_on), int(step.max()) + 1

    def most_bytes(held: Int64s, inside: Int64s, after: Int64s) -> int:
        """Return how many bytes all requests together hold at the worst moment.

        `held` is what each request holds before its first step.
        """
        before = np.empty_like(after)
        before[is_first], before[1:][goes_on] = held, after[:-1][goes_on]
        grown = np.bincount(step, after - before, n_steps).cumsum()
        steps = held.sum() + np.append(0, grown[:-1]) + np.bincount(step, inside - before, n_steps)
        return int(done_bytes + max(steps.max(), held.sum() + grown[-1]))

    held_bytes = [holders.held_bytes(slot) for slot in held.tolist()]
    new_bytes = max(0, most_bytes(before[is_first], inside, after) - sum(held_bytes))
    total_bytes = new_bytes + holders.held_bytes(*held.tolist())

    def most_new_bytes() -> int:
        """Return the most bytes: every block that is written again is copied first, and nothing is freed."""
        before, inside, after, _ = holders.bytes_for(replace(stretch, at_most=True))
        stay, begins = holders.bytes_for(Stretch(slots, lengths, lengths, peaks))[3], starts == lengths[request]
        held = np.where(begins & (slots[request] >= 0), stay[request], before)[is_first]
        return most_bytes(held, inside, after) - int(stay[slots >= 0].sum())

    return Need(n_tokens, len(counts), new_bytes, total_bytes, most_new_bytes)


def _count(n: int, what: str) -> str:
    """Return "1 token" or "2 tokens"."""
    return f"{n:,} {what}{'' if n == 1 else 's'}"


class Room:
    """Finds room in the budget for calls that allocate blocks, or refuses them.

    Attributes:
        reclaimers: functions that are called with the number of missing bytes. Each frees optional bytes, and returns
            True if it has freed any.
        compactors: `CapacityError.unit` -> the compactor that moves blocks in the memory with this unit.
    Args:
        abort_abandoned: aborts steps that an interrupt left open, and returns True if there was any.
        on_grid: True if runs cut requests on the grid of `memory.sequences.chunks`.
    """

    def __init__(
        self, arena: Arena, ledger: Ledger, compactors: Mapping[str, Compactor],
        abort_abandoned: Callable[[], bool], *, on_grid: bool,
    ) -> None:  # fmt: skip
        self.arena = arena
        self.on_grid = on_grid
        self.reclaimers: list[Callable[[int], bool]] = []
        self._ledger = ledger
        self.compactors = compactors
        self._abort_abandoned = abort_abandoned

    def need(self, slots: Int64s, counts: Int64s, max_tokens: int | None, unit: str = BUDGET_UNIT) -> Need:
        """Compute the bytes that requests of counts (S,) tokens for slots (S,) need; see `need_of`.

        Args:
            max_tokens: the most tokens in a step of a run. None: all requests are fed in one step.
        """
        lengths, peaks, is_run = self._ledger.lengths[slots], self._ledger.peaks[slots], max_tokens is not None
        return need_of(
            self.compactors[unit].layers, slots, lengths, peaks, counts, max_tokens or int(counts.sum()),
            on_grid=self.on_grid and is_run,
        )  # fmt: skip

    def refusal(self, need: Need) -> CapacityError:
        """Return the error for requests that never fit into this budget, or do not fit now."""
        return need.refusal(self.arena)

    def lack(
        self, slots: Int64s, counts: Int64s, max_tokens: int | None, error: CapacityError | None = None
    ) -> CapacityError:  # fmt: skip
        """Return the error for requests that do not fit, with the bytes that all of them need.

        Args:
            error: the error that only a part of the requests has met. Everything is as it was before.
        """
        unit = BUDGET_UNIT if error is None else error.unit
        need, arena = self.need(slots, counts, max_tokens, unit), self.compactors[unit].store.arena
        if error is not None:
            need = need.at_least(error.needed + arena.free_bytes - error.free)
        return need.refusal(arena)

    def refuse_hopeless(self, sequences: list[Sequence], values: list[Any]) -> None:
        """Raise CapacityError if these are thousands of tokens that can never fit. Only the tokens' number is read."""
        if set(map(type, values)) != {int} and (counts := count_tokens(values)).sum() > _MANY_TOKENS:
            slots = self._ledger.check_all_usable(sequences)
            need = self.need(slots, counts, None)
            if need.total_bytes > self.arena.capacity_bytes:
                raise self.refusal(need)

    def require(self, sequences: list[Sequence], counts: Int64s, max_tokens: int) -> None:
        """Refuse requests that cannot fit, before they change anything.

        If freeing optional bytes makes them fit, do so.

        Args:
            counts: (S,) the number of tokens of each request.
        Raises:
            CapacityError: it names the bytes that all requests need together. SequenceError.
        """
        slots = self._ledger.check_all_usable(sequences)

        def attempt() -> None:
            need = self.need(slots, counts, max_tokens)
            if need.total_bytes > self.arena.capacity_bytes or need.new_bytes > self.arena.free_bytes:
                raise self.refusal(need)

        self.make(attempt)

    def make(self, attempt: Callable[[], _T]) -> _T:
        """Return what `attempt` returns. If it lacks room, make room and call it again.

        If enough bytes are free but lie apart, blocks are moved together where that is cheap. Otherwise optional bytes
        are freed. When nothing more can be freed, blocks are moved at any cost. If even the whole budget is too small,
        nothing is freed.
        """
        least_bytes = 0
        while True:
            try:
                return attempt()
            except CapacityError as error:
                if self._abort_abandoned():
                    continue
                # The layer memory that refuses does not know what the next ones need. So this asks for more each time.
                least_bytes = max(error.needed, 2 * least_bytes) if error.needed <= error.free else 0
                if self._compact(error, least_bytes) or self._reclaim(error):
                    continue
                if not self._compact(error, least_bytes, at_any_cost=True):
                    raise

    def _compact(self, error: CapacityError, least_bytes: int, *, at_any_cost: bool = False) -> bool:
        """Move blocks if enough bytes are free in total, so that moving can help. True if any block has moved."""
        n_bytes = min(least_bytes, error.free)
        return n_bytes > 0 and self.compactors[error.unit].make_room(n_bytes, at_any_cost=at_any_cost)

    def _reclaim(self, error: CapacityError) -> bool:
        """Free optional bytes. True if any were freed."""
        if error.unit == HOST_UNIT:  # In host memory, room is made only by closing checkpoints that are there.
            can_help = any(s.is_checkpoint and s.is_on_host for s in self._ledger.handles.values())
        else:
            can_help = error.needed <= self.arena.capacity_bytes
        missing_bytes = max(1, error.needed - error.free)
        return can_help and any(reclaim(missing_bytes) for reclaim in [*self.reclaimers])
