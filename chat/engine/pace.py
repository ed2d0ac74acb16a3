"""Measures what steps cost with and without drafts, and says whether drafts pay.

The seconds of a step with n tokens are modeled as a + b n, fitted to the latest steps. Steps with and without drafts
have fits of their own, because verifying several tokens of a sequence uses other kernels than decoding one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

_KEPT = 0.95
"""With each new step, the weight of all earlier steps is multiplied by this."""
_LEAST_WEIGHT = 3.0
_OUTLIER = 3.0
"""A step that takes longer than this many times the expected seconds counts as this many times. The machine did
something else then.
"""
_LOST_SHARE = 0.01
"""A drafter is tried again while it has lost at most this share of the time."""
MARGIN = 1.05
"""Drafts are used if they promise this many times the tokens a second that plain steps bring."""


@dataclass
class Cost:
    """Fits the seconds of steps to their numbers of tokens. The latest measurements weigh most."""

    weight: float = 0.0
    n: float = 0.0
    nn: float = 0.0
    seconds: float = 0.0
    n_seconds: float = 0.0

    def note(self, n_tokens: int, seconds: float) -> None:
        if self.is_known:
            seconds = min(seconds, _OUTLIER * self.of(n_tokens))
        news = (1.0, float(n_tokens), float(n_tokens) ** 2, seconds, n_tokens * seconds)
        kept = (self.weight, self.n, self.nn, self.seconds, self.n_seconds)
        self.weight, self.n, self.nn, self.seconds, self.n_seconds = (
            _KEPT * old + new for old, new in zip(kept, news, strict=True)
        )

    @property
    def is_known(self) -> bool:
        return self.weight >= _LEAST_WEIGHT

    def of(self, n_tokens: float) -> float:
        """Return the expected seconds of a step with this many tokens."""
        mean_n, mean_seconds = self.n / self.weight, self.seconds / self.weight
        variance = self.nn / self.weight - mean_n**2
        slope = (self.n_seconds / self.weight - mean_n * mean_seconds) / variance if variance > 0.25 else None
        most = mean_seconds / mean_n  # A token costs at most its proportional share of a step.
        slope = most / 2 if slope is None else min(max(slope, 0.0), most)
        return max(mean_seconds + slope * (n_tokens - mean_n), mean_seconds / 4)


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

    @property
    def allows_trial(self) -> bool:
        return self.lost <= _LOST_SHARE * self.seconds


@dataclass
class Pace:
    """Holds the costs of steps with and without drafts, and compares them. `model` is that of a draft model's steps."""

    plain: Cost = field(default_factory=Cost)
    drafted: Cost = field(default_factory=Cost)
    model: Cost = field(default_factory=Cost)
    margin: float = MARGIN

    @property
    def is_known(self) -> bool:
        return self.plain.is_known and self.drafted.is_known

    def pays(self, n_sequences: int, n_tokens: int, n_expected: float) -> bool | None:
        """Return whether drafts give more tokens a second, or None if that is not known yet."""
        if not self.is_known:
            return None
        plain = n_sequences / self.plain.of(n_sequences)
        return n_expected / self.drafted.of(n_tokens) >= MARGIN * plain
