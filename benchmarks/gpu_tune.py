"""Choices of the kernels for this GPU: from each default up the slope of measured time.
What computes something else is never timed.

A choice is made for the sizes of layers that models have, over steps of few and of many sequences together: it may not
depend on which of them runs. It counts only if it beats the default in a second round too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Report

SECONDS = 420.0
"""For everything, compilation included."""
_GAIN, _LOSS = 0.98, 1.05
"""Of the default's time: what a choice needs at least, all steps together, and what it may lose in one of them."""
_TOLERANCE = 2e-2
"""Of the largest value: how far outputs may be from the default's, from rows in bfloat16."""

OPTIONS: dict[str, dict[str, tuple[int, ...]]] = {
    "attend": {"block_n": (16, 32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3, 4, 5)},
    "split": {"rows": (128, 256, 512, 1024), "programs": (128, 256, 512)},
    "read_states": {"rows": (8, 16, 32, 64), "num_warps": (1, 2, 4, 8), "block": (8, 16, 32)},
    "scan_tokens": {"rows": (8, 16, 32, 64), "num_warps": (1, 2, 4, 8)},
    "scan_chunks": {"chunk": (16, 32, 64), "rows": (16, 32, 64), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3)},
    "scan_columns": {"chunk": (16, 32), "rows": (16, 32, 64), "num_warps": (2, 4, 8)},
    "selective_scan": {"channels": (32, 64, 128), "chunk": (32, 64, 128), "num_warps": (1, 2, 4)},
    "vectors": {"channels": (64, 128, 256), "num_warps": (1, 2, 4)},
    "causal_conv": {"rows": (8, 16, 32), "elements": (512, 1024, 2048), "num_warps": (2, 4, 8)},
    "score_pages": {"block_n": (32, 64, 128), "num_warps": (2, 4, 8)},
}
"""Values that are tried, by kernel and field."""

Run = Callable[[], tuple[Tensor, ...]]
"""What is timed; it returns what is compared."""
Timer = Callable[[Run, int], float]
"""Median milliseconds of so many rounds."""


@dataclass(frozen=True)
class Case:
    """A choice to make for the sizes that these runs ask for, the same in each.
    A run is made when it is needed: it fills gigabytes.
    """

    name: str
    kernel: str
    runs: tuple[Callable[[], Run], ...]


def tune(*, quick: bool, ship: bool) -> Report:
    """Needs a CUDA device. Writes into the user's cache, or to `ship` into the package."""
    import triton

    from benchmarks.gpu_cases import make_cases
    from benchmarks.gpu_states import time_graph
    from memory.kernels.cuda import choices

    device, cases = torch.device("cuda"), make_cases()
    capability = choices.capability_of(device)
    path = (choices.shipped_file if ship else choices.cache_file)(capability)
    before = choices.read(path, capability)
    made_on = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    report = Report("tune", notes=[f"device: {made_on}", f"written to {path}"])
    tune_all(
        cases[:: len(cases) // 4] if quick else cases, report, timer=lambda run,
        n_rounds: time_graph(run, n_rounds).median_ms, clock=time.monotonic, seconds=SECONDS / 8 if quick else SECONDS,
        save=lambda made: choices.write(path, capability, before | made, made_on),
    )  # fmt: skip
    return report


def tune_all(
    cases: list[Case],
    report: Report,
    *,
    timer: Timer,
    clock: Callable[[], float],
    seconds: float,
    save: Callable[[dict[Any, Any]], None],
) -> None:
    """Time that one case leaves is the others'.
    Each result is saved at once; cases that time does not reach are left as they were.
    """
    end, made, missed = clock() + seconds, dict[Any, Any](), list[str]()
    for i, case in enumerate(cases):
        if clock() >= end:
            missed.append(case.name)
            continue
        until = clock() + (end - clock()) / (len(cases) - i)
        trial = Trial(case, timer)
        choice, share, n_tried = trial.best(lambda until=until: clock() < until)  # type: ignore[misc]
        if n_tried == 1:
            missed.append(case.name)
            continue
        made[case.kernel, trial.sizes] = choice
        save(made)
        sizes = ", ".join(f"{name} {size}" for name, size in zip(trial.tunable.sizes, trial.sizes, strict=True))
        report.add("choices", {
            "case": case.name, "kernel": case.kernel, "sizes": sizes, "tried": n_tried, "choice": _text(choice),
            "default": _text(trial.default), "time / default's": share,
        })  # fmt: skip
    if missed:
        report.notes.append(f"no time for {'; '.join(missed)}: run it again, what is compiled is found again")


def _text(choice: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in choice._asdict().items())


class Trial:
    """The runs of a case, with what the default makes of them."""

    def __init__(self, case: Case, timer: Timer) -> None:
        from memory.kernels.cuda.choices import TUNABLES

        self.tunable, self._timer, self._options = TUNABLES[case.kernel], timer, OPTIONS[case.kernel]
        self._runs = [make() for make in case.runs]
        asked = set[tuple[int, ...]]()

        def ask(*sizes: int) -> Any:
            asked.add(sizes)
            return self.tunable.default(*sizes)

        with self.tunable.instead(ask):
            self._expected = [tuple(x.clone() for x in run()) for run in self._runs]
        if len(asked) != 1:
            raise ValueError(
                f"{case.name} asks {case.kernel} for {sorted(asked)}; the runs of a case must ask for the same sizes"
            )
        self.sizes = asked.pop()
        self.default = self.tunable.default(*self.sizes)

    def best(self, has_time: Callable[[], bool]) -> tuple[Any, float, int]:
        """The choice; its time, of the default's; and how many were tried."""
        base = self._times(self.default, 5)
        shares = climb(
            self.default, lambda choice: neighbours(choice, self._options), lambda c: self._share(c, base, 5), has_time
        )
        choice = min(shares, key=shares.__getitem__)
        share = 1.0 if choice == self.default else self._share(choice, self._times(self.default, 20), 20)
        return (choice, share, len(shares)) if share <= _GAIN else (self.default, 1.0, len(shares))

    def _share(self, choice: Any, base: list[float], n_rounds: int) -> float:
        """Of the default's time, a geometric mean over all runs; infinite if one of them suffers, or gives something
        else.
        """
        try:
            found = [ours / default for ours, default in zip(self._times(choice, n_rounds), base, strict=True)]
        except _failures():  # too much shared memory, say
            return math.inf
        return math.prod(found) ** (1 / len(found)) if max(found) <= _LOSS else math.inf

    def _times(self, choice: Any, n_rounds: int) -> list[float]:
        with self.tunable.instead(lambda *_: self.tunable.checked(choice._asdict())):
            if not all(agree(run(), expected) for run, expected in zip(self._runs, self._expected, strict=True)):
                return [math.inf] * len(self._runs)
            return [self._timer(run, n_rounds) for run in self._runs]


def _failures() -> tuple[type[Exception], ...]:
    """Of a compiler. The device's own are among them; the next default meets those again, and they are raised."""
    from triton import TritonError

    return TritonError, RuntimeError


def agree(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Whether all numbers are as close as two kernels must be, integers equal; a NaN is close to nothing."""
    return all(
        bool((x.float() - y.float()).abs().max() <= _TOLERANCE * y.abs().max())
        if y.is_floating_point()
        else torch.equal(x, y)
        for x, y in zip(found, expected, strict=True)
    )


def neighbours(choice: Any, options: dict[str, tuple[int, ...]]) -> Iterator[Any]:
    """One field one option up or down."""
    for name, values in options.items():
        value = getattr(choice, name)
        for other in (*[x for x in values if x < value][-1:], *[x for x in values if x > value][:1]):
            yield choice._replace(**{name: other})


def climb(
    start: Any, around: Callable[[Any], Iterator[Any]], cost: Callable[[Any], float], has_time: Callable[[], bool]
) -> dict[Any, float]:
    """Costs of what was tried, 1 for the start.
    Whatever is better is where the search goes on, until all around it was tried.
    """
    best, costs = start, {start: 1.0}
    while has_time():
        untried = next((choice for choice in around(best) if choice not in costs), None)
        if untried is None:
            break
        costs[untried] = cost(untried)
        best = min(costs, key=costs.__getitem__)
    return costs
