"""Chooses the fastest parameters of each kernel for this GPU, by hill climbing from the kernel's default parameters.

A choice whose results differ from those of the default is never timed. A choice is made for each size of layer that
models have. It may not depend on the number of sequences, so it is timed over steps of few and of many sequences
together. It counts only if it is faster than the default in a second round too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu_cases
from benchmarks.gpu_cases import Case, Run
from benchmarks.harness import Report

SECONDS = 420.0
"""Time for all choices, compilation included."""
_GAIN, _LOSS = 0.98, 1.05
"""A choice must take at most this share of the default's time in all runs together, and at most that in one run."""
_TOLERANCE = 2e-2
"""Share of the largest value by which outputs may differ from the default's, as rows are in bfloat16."""

OPTIONS: dict[str, dict[str, tuple[int, ...]]] = {
    "attend": {"block_n": (16, 32, 64, 128), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3, 4, 5)},
    "split": {"rows": (128, 256, 512, 1024), "programs": (128, 256, 512)},
    "read_states": {
        "rows": (16, 32, 64),
        "num_warps": (1, 2, 4),
        "block": (16, 32),
        "num_stages": (2, 3, 4),
        "max_registers": (96, 128, 168, 255),
    },
    "scan_tokens": {"rows": (8, 16, 32, 64), "num_warps": (1, 2, 4, 8)},
    "scan_chunks": {"chunk": (16, 32, 64), "rows": (16, 32, 64), "num_warps": (2, 4, 8), "num_stages": (1, 2, 3)},
    "scan_columns": {"chunk": (16, 32), "rows": (16, 32, 64), "num_warps": (2, 4, 8)},
    "selective_scan": {"channels": (32, 64, 128), "chunk": (32, 64, 128), "num_warps": (1, 2, 4)},
    "vectors": {"channels": (64, 128, 256), "num_warps": (1, 2, 4)},
    "causal_conv": {"rows": (8, 16, 32), "elements": (512, 1024, 2048), "num_warps": (2, 4, 8)},
    "score_pages": {"block_n": (32, 64, 128), "num_warps": (2, 4, 8)},
}
"""Values that are tried, by kernel and field."""

Timer = Callable[[Run, int], float]
"""Returns the median milliseconds of a number of rounds."""


def tune(*, quick: bool, ship: bool) -> Report:
    """Choose parameters of all kernels, and write them into the user's cache, or with `ship` into the package.

    Needs a CUDA device.
    """
    import triton

    from benchmarks.gpu_states import time_graph
    from hybridmem.memory.kernels.cuda import choices

    device, cases = torch.device("cuda"), gpu_cases.make_cases()
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
    """Make the choices of all cases within `seconds`; later cases get the time that a case does not use.

    Each result is saved at once. Cases for which no time is left keep their earlier choices.
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
    """Holds the runs of a case, and their results with the default's parameters."""

    def __init__(self, case: Case, timer: Timer) -> None:
        from hybridmem.memory.kernels.cuda.choices import TUNABLES

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
        """Return the best choice, its time as a share of the default's, and how many choices were tried."""
        base = self._times(self.default, 5)
        shares = climb(
            self.default, lambda choice: neighbours(choice, self._options), lambda c: self._share(c, base, 5), has_time
        )
        choice = min(shares, key=shares.__getitem__)
        share = 1.0 if choice == self.default else self._share(choice, self._times(self.default, 20), 20)
        return (choice, share, len(shares)) if share <= _GAIN else (self.default, 1.0, len(shares))

    def _share(self, choice: Any, base: list[float], n_rounds: int) -> float:
        """Return the time of a choice as a share of the default's, as a geometric mean over all runs.

        Returns infinity if one run becomes too slow, or gives another result.
        """
        try:
            found = [ours / default for ours, default in zip(self._times(choice, n_rounds), base, strict=True)]
        except _failures():  # A choice may need too much shared memory, for example.
            return math.inf
        return math.prod(found) ** (1 / len(found)) if max(found) <= _LOSS else math.inf

    def _times(self, choice: Any, n_rounds: int) -> list[float]:
        with self.tunable.instead(lambda *_: self.tunable.checked(choice._asdict())):
            if not all(agree(run(), expected) for run, expected in zip(self._runs, self._expected, strict=True)):
                return [math.inf] * len(self._runs)
            return [self._timer(run, n_rounds) for run in self._runs]


def _failures() -> tuple[type[Exception], ...]:
    """Return the errors that a choice may raise when it is compiled.

    Errors of the device itself have the same types. The next run of the default parameters raises those again.
    """
    from triton import TritonError

    return TritonError, RuntimeError


def agree(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Return whether floating-point results are within the tolerance, and integers equal. A NaN never agrees."""
    return all(
        bool((x.float() - y.float()).abs().max() <= _TOLERANCE * y.abs().max())
        if y.is_floating_point()
        else torch.equal(x, y)
        for x, y in zip(found, expected, strict=True)
    )


def neighbours(choice: Any, options: dict[str, tuple[int, ...]]) -> Iterator[Any]:
    """Yield the choices that differ from this one in one field, by one option up or down."""
    for name, values in options.items():
        value = getattr(choice, name)
        for other in (*[x for x in values if x < value][-1:], *[x for x in values if x > value][:1]):
            yield choice._replace(**{name: other})


def climb(
    start: Any, around: Callable[[Any], Iterator[Any]], cost: Callable[[Any], float], has_time: Callable[[], bool]
) -> dict[Any, float]:
    """Search from `start` for cheaper choices; return the cost of each choice that was tried. `start` costs 1.

    The search continues from the best choice so far, until all choices around that one were tried.
    """
    best, costs = start, {start: 1.0}
    while has_time():
        untried = next((choice for choice in around(best) if choice not in costs), None)
        if untried is None:
            break
        costs[untried] = cost(untried)
        best = min(costs, key=costs.__getitem__)
    return costs
