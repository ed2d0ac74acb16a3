"""Measures what steps cost with and without drafts, and says whether drafts pay.

The seconds of a step with n tokens are modeled as a + b n, fitted to the latest steps. Steps with and without drafts
have fits of their own, because verifying several tokens of a sequence uses other kernels than decoding one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_KEPT = 0.95
"""With each new step, the weight of all earlier steps is multiplied by this."""
_LEAST_WEIGHT = 2.8
"""Three measurements have this weight."""
_GOOD_WEIGHT = 6.0
"""Seven measurements have this weight."""
_WARMING = 2
"""The first measurements are not counted, because they include the compilation of kernels."""
_RECENT, _LEAST_RECENT, _MOST_SIZES = 9, 3, 64
"""The latest measurements are kept for each of `_MOST_SIZES` numbers of tokens. Three have a median."""
_OUTLIER = 3.0
"""A step that takes longer than this many times the expected seconds counts as this many times. The machine did
something else then.
"""
TRIED_SHARE, LOST_SHARE = 0.01, 0.02
"""A drafter is tried again while it has lost at most the first share of the time. It is used at all while it has lost
at most the second, whatever it promises.
"""
MARGIN = 1.05
"""Drafts are used if they promise this many times the tokens a second that plain steps bring."""


@dataclass
class Cost:
    """Estimates the seconds of steps from their numbers of tokens. The latest measurements weigh most.

    Where steps with exactly so many tokens were measured, their median counts. Elsewhere a line is fitted.
    """

    weight: float = 0.0
    n: float = 0.0
    nn: float = 0.0
    seconds: float = 0.0
    n_seconds: float = 0.0
    n_skipped: int = 0
    recent: dict[int, deque[float]] = field(default_factory=dict)
    medians: dict[int, float] = field(default_factory=dict)

    def note(self, n_tokens: int, seconds: float) -> None:
        if self.n_skipped < _WARMING:
            self.n_skipped += 1
            return
        if self.is_known:
            seconds = min(seconds, _OUTLIER * self.of(n_tokens))
        news = (1.0, float(n_tokens), float(n_tokens) ** 2, seconds, n_tokens * seconds)
        kept = (self.weight, self.n, self.nn, self.seconds, self.n_seconds)
        self.weight, self.n, self.nn, self.seconds, self.n_seconds = (
            _KEPT * old + new for old, new in zip(kept, news, strict=True)
        )
        recent = self.recent.get(n_tokens)
        if recent is None:
            if len(self.recent) == _MOST_SIZES:
                oldest = next(iter(self.recent))
                del self.recent[oldest]
                self.medians.pop(oldest, None)
            recent = self.recent[n_tokens] = deque(maxlen=_RECENT)
        recent.append(seconds)
        if len(recent) >= _LEAST_RECENT:
            self.medians[n_tokens] = sorted(recent)[len(recent) // 2]

    @property
    def is_known(self) -> bool:
        return self.weight >= _LEAST_WEIGHT

    @property
    def is_well_known(self) -> bool:
        return self.weight >= _GOOD_WEIGHT

    def of(self, n_tokens: int) -> float:
        """Return the expected seconds of a step with this many tokens."""
        if (median := self.medians.get(n_tokens)) is not None:
            return median
        mean_n, mean_seconds = self.n / self.weight, self.seconds / self.weight
        return max(mean_seconds + self.slope * (n_tokens - mean_n), mean_seconds / 4)

    @property
    def slope(self) -> float:
        """Return the seconds that one token more is expected to take."""
        mean_n, mean_seconds = self.n / self.weight, self.seconds / self.weight
        variance = self.nn / self.weight - mean_n**2
        slope = (self.n_seconds / self.weight - mean_n * mean_seconds) / variance if variance > 0.25 else None
        most = mean_seconds / mean_n  # A token costs at most its proportional share of a step.
        return most / 2 if slope is None else min(max(slope, 0.0), most)


@dataclass
class Ledger:
    """Counts the seconds that a drafter has lost, so that trying it again costs little.

    Attributes:
        seconds: the time in steps so far. lost: the part of it that was lost by drafts that did not pay.
    """

    seconds: float = 0.0
    lost: float = 0.0

    def note(self, seconds: float, lost: float) -> None:
        """Count a step. What a step gains (`lost` is negative then) makes up for earlier losses, and not for later."""
        self.seconds += seconds
        self.lost = max(0.0, self.lost + lost)

    def allows(self, share: float) -> bool:
        """Return whether at most this share of the time was lost."""
        return self.lost <= share * self.seconds


@dataclass
class Pace:
    """Holds the costs of steps, and says whether drafts pay.

    Attributes:
        plain: steps that only decode, without drafts. drafted: such steps with drafts, by all tokens that they feed.
        mixed: steps with prompts. model: the steps of a drafter.
    """

    plain: Cost = field(default_factory=Cost)
    drafted: Cost = field(default_factory=Cost)
    mixed: Cost = field(default_factory=Cost)
    model: Cost = field(default_factory=Cost)

    def knows(self, *, is_mixed: bool) -> bool:
        """Return whether the costs of such steps are known, with and without drafts."""
        return self.plain.is_known and (self.mixed if is_mixed else self.drafted).is_known

    def seconds(self, n_sequences: int, n_drafted: int, *, is_mixed: bool) -> float:
        """Return the expected seconds of a step that decodes and verifies drafts.

        If it computes prompts as well, their seconds are left out.
        """
        if is_mixed:
            return self.plain.of(n_sequences) + n_drafted * self.mixed.slope
        return self.drafted.of(n_sequences + n_drafted) if n_drafted else self.plain.of(n_sequences)

    def pays(self, n_sequences: int, n_drafted: int, n_right: float, *, is_mixed: bool = False) -> bool | None:
        """Return whether drafts give more tokens a second, or None if that is not known yet.

        Args:
            n_drafted: how many tokens the drafts have together. n_right: how many of them are expected to be right.
        """
        if not self.knows(is_mixed=is_mixed):
            return None
        speed = (n_sequences + n_right) / self.seconds(n_sequences, n_drafted, is_mixed=is_mixed)
        return speed >= MARGIN * n_sequences / self.plain.of(n_sequences)
