"""Measures what steps cost with and without drafts, and says whether drafts pay.

The seconds of a step with n tokens are modeled as a + b n, fitted to the latest steps. Steps with and without drafts
have fits of their own, because verifying several tokens of a sequence uses other kernels than decoding one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
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
"""The latest measurements are kept for each of `_MOST_SIZES` numbers of tokens. Three are enough for a quartile."""
_OUTLIER = 3.0
"""A step that takes longer than this many times the expected seconds counts as this many times. The machine did
something else then.
"""
TRIED_SHARE, LOST_SHARE = 0.01, 0.02
"""A drafter is tried again while it has lost at most the first share of the time. It is used at all while it has lost
at most the second, whatever it promises.
"""
_REACH = 2
"""A line through measurements says what steps take of at most so many times the tokens of the largest measured one."""
_OF_TREES = 1.5
"""Before steps with trees were measured, they are expected to cost this many times as much as those with chains."""
MARGIN = 1.05
"""Drafts are used if they promise this many times the tokens a second that plain steps bring."""


@dataclass
class Cost:
    """Estimates the seconds of steps from their numbers of tokens. The latest measurements weigh most.

    Where steps with exactly so many tokens were measured, the lower quartile of their seconds counts, because a machine
    that does something else as well makes steps slower, and never faster. Elsewhere a line through the quartiles is
    fitted. So slow steps, such as those that compile a kernel, do not change what is expected. Steps that are far
    larger than all measured ones may use other kernels, so each further token is expected to take its whole share.
    """

    weight: float = 0.0
    n_noted: int = 0
    recent: dict[int, deque[float]] = field(default_factory=dict)
    quartiles: dict[int, float] = field(default_factory=dict)
    latest: dict[int, int] = field(default_factory=dict)
    line: _Line | None = None

    def note(self, n_tokens: int, seconds: float) -> None:
        self.n_noted += 1
        if self.n_noted <= _WARMING:
            return
        if self.is_known:
            seconds = min(seconds, _OUTLIER * self.of(n_tokens))
        self.weight = _KEPT * self.weight + 1
        recent = self.recent.get(n_tokens)
        if recent is None:
            if len(self.recent) == _MOST_SIZES:
                oldest = min(self.latest, key=self.latest.__getitem__)
                for kept in (self.recent, self.quartiles, self.latest):
                    del kept[oldest]
            recent = self.recent[n_tokens] = deque(maxlen=_RECENT)
        recent.append(seconds)
        self.quartiles[n_tokens] = sorted(recent)[(len(recent) - 1) // 4]
        self.latest[n_tokens] = self.n_noted
        self.line = None

    @property
    def is_known(self) -> bool:
        return self.weight >= _LEAST_WEIGHT

    @property
    def is_well_known(self) -> bool:
        return self.weight >= _GOOD_WEIGHT

    def of(self, n_tokens: int) -> float:
        """Return the expected seconds of a step with this many tokens."""
        recent = self.recent.get(n_tokens)
        if recent is not None and len(recent) >= _LEAST_RECENT:
            return self.quartiles[n_tokens]
        line, n_reached = self._fitted(), _REACH * max(self.recent)
        seconds = line.mean_seconds + line.slope * (min(n_tokens, n_reached) - line.mean_n)
        return max(seconds, line.mean_seconds / 4) * max(1.0, n_tokens / n_reached)

    @property
    def slope(self) -> float:
        """Return the seconds that one token more is expected to take."""
        return self._fitted().slope

    @property
    def has_sizes(self) -> bool:
        """True if steps of different sizes were measured lately, so that the slope is not a guess."""
        return self.is_known and self._fitted().is_of_sizes

    def _fitted(self) -> _Line:
        if self.line is None:
            self.line = _fit(
                [
                    (_KEPT ** (self.n_noted - self.latest[n]) * len(self.recent[n]), n, seconds)
                    for n, seconds in self.quartiles.items()
                ]
            )
        return self.line


@dataclass(frozen=True)
class _Line:
    """Holds a line through measured costs: its middle, the seconds of one token more, and whether sizes differed."""

    mean_n: float
    mean_seconds: float
    slope: float
    is_of_sizes: bool


def _fit(points: list[tuple[float, int, float]]) -> _Line:
    """Fit a line to points, each of which is its weight, a number of tokens, and seconds."""
    weight = sum(w for w, _, _ in points)
    mean_n = sum(w * n for w, n, _ in points) / weight
    mean_seconds = sum(w * seconds for w, _, seconds in points) / weight
    variance = sum(w * (n - mean_n) ** 2 for w, n, _ in points)
    both = sum(w * (n - mean_n) * (seconds - mean_seconds) for w, n, seconds in points)
    most = mean_seconds / mean_n  # A token costs at most its proportional share of a step.
    if variance < 0.25 * weight:
        return _Line(mean_n, mean_seconds, most / 2, is_of_sizes=False)
    return _Line(mean_n, mean_seconds, min(max(both / variance, 0.0), most), is_of_sizes=True)


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

    def allows(self, share: float, free: float = 0.0) -> bool:
        """Return whether at most this share of the time was lost, beyond `free` seconds."""
        return self.lost <= share * self.seconds + free


@dataclass
class Pace:
    """Holds the costs of steps, and says whether drafts pay.

    Attributes:
        plain: steps that only decode, without drafts. drafted: such steps with drafts, by all tokens that they feed.
        model: the steps of a drafter.
        branched: steps that only decode, in which drafts are trees, by all tokens that they feed. Recurrent layers may
            compute a token once for each path that it is on.
    """

    plain: Cost = field(default_factory=Cost)
    drafted: Cost = field(default_factory=Cost)
    model: Cost = field(default_factory=Cost)
    branched: Cost = field(default_factory=Cost)

    @property
    def is_known(self) -> bool:
        """True if the costs of steps with and without drafts are known."""
        return self.plain.is_known and self.drafted.is_known

    def worth(self, n_sequences: int, right: Sequence[float]) -> float:
        """Return how many tokens of plain steps the right tokens of drafts save, for as many drafts as `right` has.

        One token more for all sequences saves a step. One token more for a single sequence saves only its row of a
        later step, because the others still need that step. Where plain steps of one size only were measured, a row is
        expected to take as long as a drafted one.
        """
        of_all = min(right) if len(right) == n_sequences else 0.0
        row = (self.plain if self.plain.has_sizes or not self.drafted.has_sizes else self.drafted).slope
        part = min(1.0, row * n_sequences / self.plain.of(n_sequences))
        return n_sequences * of_all + part * (sum(right) - len(right) * of_all)

    def seconds(self, n_sequences: int, n_drafted: int, *, is_branched: bool = False) -> float:
        """Return the expected seconds of a step that decodes and verifies drafts.

        If a step computes prompts as well, their seconds are left out: drafts are expected to take as long in it as in
        one without prompts. A row of a prompt takes less, because its logits are not computed. No step is expected to
        be faster with drafts than without, which could only have been measured by chance.
        """
        plain, n = self.plain.of(n_sequences), n_sequences + n_drafted
        if is_branched:
            return max(plain, self.branched.of(n) if self.branched.is_known else _OF_TREES * self.drafted.of(n))
        return max(plain, self.drafted.of(n)) if n_drafted else plain

    def speed(self, n_sequences: int, n_drafted: int, n_right: float, *, is_branched: bool = False) -> float:
        """Return how many tokens a second a step is expected to bring.

        Args:
            n_drafted: how many tokens the drafts have together. n_right: how many of them are expected to be right.
            is_branched: whether some drafts are trees.
        """
        return (n_sequences + n_right) / self.seconds(n_sequences, n_drafted, is_branched=is_branched)

    def may_pay(self, n_sequences: int, n_right: float) -> bool:
        """Return whether drafts would pay that took no time, and saved as much as so many tokens."""
        return n_sequences + n_right >= MARGIN * n_sequences
