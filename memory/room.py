"""What requests take of the budget, told before any of their tokens is looked at, fed, or even copied."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memory.block_layout import aligned_bytes
from memory.blocks.arrays import Int64s, ceil_div
from memory.errors import CapacityError
from memory.interface import Stretch
from memory.tables import count
from memory.together import AllKinds

_MOST_STEPS = 1024
"""That are looked at, the last ones: sequences hold the more the longer they are, but for what comes and goes within few steps."""


@dataclass(frozen=True)
class Need:
    """Bytes of the budget that requests take while they are fed: of new sequences to the byte, of others at least.

    Attributes:
        n_tokens, n_requests: of all of them.
        new_bytes: on top of what is held now, at the worst moment.
        total_bytes: with what their own sequences hold.
        spare_bytes: for gaps that blocks of several sizes leave between them: so much more is enough, less may be.
    """

    n_tokens: int
    n_requests: int
    new_bytes: int
    total_bytes: int
    spare_bytes: int

    def at_least(self, new_bytes: int) -> Need:
        """The same, where so many new bytes were found to be needed: blocks that are shared are copied before they are written."""
        more = max(0, new_bytes - self.new_bytes)
        return replace(self, new_bytes=self.new_bytes + more, total_bytes=self.total_bytes + more)

    def refusal(self, budget_bytes: int, free_bytes: int) -> CapacityError:
        """Why there is no room: never in this budget, or not now. Where numbers say that there is, it lies in pieces that are too small."""
        what = f"{count(self.n_tokens, 'token', 'tokens')} for {count(self.n_requests, 'sequence', 'sequences')}"
        if self.total_bytes > budget_bytes:
            least = self.total_bytes + self.spare_bytes
            return CapacityError(
                f"{what} need {least:,} bytes, what is held of the same included: a budget of {budget_bytes:,} can never hold them. Feed "
                f"fewer tokens, or give the memory a larger budget, of {least:,} bytes",
                needed=least, free=free_bytes,
            )  # fmt: skip
        why = "" if self.new_bytes > free_bytes else ", but not in pieces large enough"
        least = budget_bytes + max(0, self.new_bytes - free_bytes) + self.spare_bytes
        return CapacityError(
            f"{what} do not fit now: they need {self.new_bytes:,} bytes more, and {free_bytes:,} of {budget_bytes:,} are free{why}. Close "
            f"sequences or checkpoints, feed fewer tokens, or give the memory a larger budget, of {least:,} bytes",
            needed=self.new_bytes, free=free_bytes,
        )  # fmt: skip


def need_of(kinds: AllKinds, slots: Int64s, lengths: Int64s, peaks: Int64s, counts: Int64s, max_tokens: int) -> Need:
    """What requests take that are fed as `memory.chunks.split_requests` cuts them. Cost: O(steps), no more than so many, and O(requests).

    Args:
        slots: (S,) of their sequences; -1 for one that is yet to be opened. lengths, peaks: (S,) as the ledger has them.
        counts: (S,) tokens of each request.
    """
    order = counts.argsort(kind="stable")
    slots, lengths, peaks, counts = slots[order], lengths[order], peaks[order], counts[order]
    ends, held = counts.cumsum(), np.unique(slots[slots >= 0])
    begins, n_tokens = ends - counts, int(ends[-1])
    first = max(0, ceil_div(n_tokens, max_tokens) - _MOST_STEPS) * max_tokens
    cuts = np.unique(np.concatenate([begins[begins >= first], np.arange(first, n_tokens, max_tokens)]))
    request, step = ends.searchsorted(cuts, side="right"), (cuts - first) // max_tokens
    starts = lengths[request] + cuts - begins[request]
    piece_ends = lengths[request] + np.append(cuts[1:], n_tokens) - begins[request]
    before, inside, after, _ = bytes_for(kinds, Stretch(slots[request], starts, piece_ends, np.maximum(peaks[request], starts)))
    # What is done holds all its tokens, and what goes on holds what its last step has left.
    is_done = ends <= first
    done = lengths[is_done] + counts[is_done]
    done_bytes = bytes_for(kinds, Stretch(slots[is_done], done, done, np.maximum(peaks[is_done], done)))[0].sum()
    goes_on = request[1:] == request[:-1]
    before[1:][goes_on] = after[:-1][goes_on]
    is_first = np.append(True, ~goes_on)
    n_steps = int(step[-1]) + 1
    grown = np.bincount(step, after - before, n_steps).cumsum()
    steps = before[is_first].sum() + np.append(0, grown[:-1]) + np.bincount(step, inside - before, n_steps)
    most = int(done_bytes + max(steps.max(), before[is_first].sum() + grown[-1]))
    new_bytes = max(0, most - sum(map(kinds.held_bytes, held.tolist())))
    total_bytes = new_bytes + kinds.held_bytes(*held.tolist())
    return Need(n_tokens, len(counts), new_bytes, total_bytes, _spare_bytes(kinds, len(counts), total_bytes))


def _spare_bytes(kinds: AllKinds, n_requests: int, total_bytes: int) -> int:
    """Gaps are of the blocks' own sizes and taken again by the next that fits: more sequences leave more, but never a large part."""
    sizes = [pool.block_bytes for pool, _ in kinds.pools]
    gaps_bytes = max(sum(sizes) + max(sizes, default=0), min(n_requests * sum(sizes), total_bytes // 4))
    return aligned_bytes(gaps_bytes) if len(set(sizes)) > 1 else 0


def bytes_for(kinds: AllKinds, stretch: Stretch) -> Int64s:
    """(4, N) of all kinds; see `LayerMemory.bytes_for`."""
    n_bytes = np.zeros((4, len(stretch.slots)), np.int64)
    for kind in kinds.values():
        n_bytes += kind.bytes_for(stretch)
    return n_bytes
