"""Without a GPU, the tests see how tuning searches for choices, compares, times and saves them.

Times are made up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks import gpu_tune
from benchmarks.__main__ import app
from benchmarks.gpu_cases import Case, Run, make_cases
from benchmarks.gpu_tune import OPTIONS, Trial, agree, climb, neighbours, tune_all
from benchmarks.harness import Report
from hybridmem.memory.kernels.cuda.choices import TUNABLES, powers_of_2, tunable
from tests.kernels_cuda.on_device import MadeOn

CPU = torch.device("cpu")


class Pair(NamedTuple):
    a: int
    b: int


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a kernel that chooses a and b, for one size."""
    monkeypatch.setitem(OPTIONS, "toy", {"a": (1, 2, 4, 8), "b": (1, 2, 4)})
    made = tunable("toy", Pair, a=powers_of_2(1, 8), b=powers_of_2(1, 4))(lambda size: Pair(2, 2))
    yield made
    del TUNABLES["toy"]


class Toy:
    """Runs the kernel on a clock of its own. A run takes as long as `milliseconds` says for its choice."""

    def __init__(
        self,
        toy: Any,
        milliseconds: Callable[[Pair, int], float],
        wrong: tuple[Pair, ...] = (),
        broken: tuple[Pair, ...] = (),
    ):
        self._toy, self._milliseconds, self._wrong, self._broken = toy, milliseconds, wrong, broken
        self.seconds, self.timed = 0.0, list[Pair]()
        self.chosen, self.run_index, self.size = Pair(0, 0), 0, 0
        self._compiled = set[tuple[Pair, int]]()

    def case(self, n_runs: int = 1, size: Callable[[int], int] = lambda i: 7) -> Case:
        def make(i: int) -> Run:
            def run() -> tuple[Tensor, ...]:
                self.chosen, self.run_index, self.size = self._toy(CPU, size(i)), i, size(i)
                if self.chosen in self._broken:
                    raise RuntimeError("out of shared memory")
                return (torch.ones(3) * (2 if self.chosen in self._wrong else 1 + 1e-3 * self.chosen.a),)

            return run

        return Case("a toy", "toy", tuple(lambda i=i: make(i) for i in range(n_runs)))  # type: ignore[misc]

    def timer(self, run: Run, n_rounds: int) -> float:
        run()
        compiled = self.chosen, self.size
        self.seconds += 0.01 if compiled in self._compiled else 1.0
        self._compiled.add(compiled)
        self.timed.append(self.chosen)
        return self._milliseconds(self.chosen, self.run_index)

    def best(self, n_runs: int = 1, **limits: float) -> tuple[Pair, float, int]:
        trial = Trial(self.case(n_runs), self.timer)
        assert (trial.sizes, trial.default) == ((7,), Pair(2, 2))
        choice, share, n = trial.best(lambda: self.seconds < limits.get("seconds", math.inf))
        return choice, share, n


def bowl(choice: Pair, run: int = 0) -> float:
    """Return a time that is least at (8, 1)."""
    return 10 + abs(math.log2(choice.a) - 3) + abs(math.log2(choice.b))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_gpu_nothing_is_tuned() -> None:
    result = CliRunner().invoke(app, ["tune"])
    assert result.exit_code == 1
    assert "needs an NVIDIA GPU" in result.output


def test_neighbours_differ_by_one_option() -> None:
    assert set(neighbours(Pair(2, 1), OPTIONS["toy"])) == {Pair(1, 1), Pair(4, 1), Pair(2, 2)}
    assert set(neighbours(Pair(3, 9), OPTIONS["toy"])) == {Pair(2, 9), Pair(4, 9), Pair(3, 4)}, (
        "a default need not be an option"
    )


def test_a_climb_finds_the_least_tries_nothing_twice_and_ends() -> None:
    tried = list[Pair]()

    def cost(choice: Pair) -> float:
        tried.append(choice)
        return bowl(choice) / bowl(Pair(2, 2))

    costs = climb(Pair(2, 2), lambda choice: neighbours(choice, OPTIONS["toy"]), cost, lambda: True)
    assert min(costs, key=costs.__getitem__) == Pair(8, 1)
    assert len(tried) == len(set(tried)) == len(costs) - 1 < 4 * 3


def test_the_fastest_wins(toy: Any) -> None:
    choice, share, n_tried = Toy(toy, bowl).best()
    assert choice == Pair(8, 1)
    assert share == pytest.approx(bowl(Pair(8, 1)) / bowl(Pair(2, 2)))
    assert n_tried > 4


def test_what_computes_something_else_is_never_timed_and_what_does_not_compile_is_skipped(toy: Any) -> None:
    work = Toy(toy, bowl, wrong=(Pair(8, 1),), broken=(Pair(4, 1),))
    assert work.best()[0] == Pair(8, 2)
    assert not {Pair(8, 1), Pair(4, 1)} & set(work.timed)


def test_a_default_that_fails_is_an_error(toy: Any) -> None:
    with pytest.raises(RuntimeError, match="shared memory"):
        Toy(toy, bowl, broken=(Pair(2, 2),)).best()


def test_a_gain_of_one_percent_or_of_one_round_is_none(toy: Any) -> None:
    assert Toy(toy, lambda choice, _: 0.99 if choice == Pair(4, 2) else 1.0).best()[:2] == (Pair(2, 2), 1.0)
    luck = iter([0.5])
    assert Toy(toy, lambda choice, _: next(luck, 1.0) if choice == Pair(4, 2) else 1.0).best()[:2] == (Pair(2, 2), 1.0)


def test_no_step_pays_for_another(toy: Any) -> None:
    """(4, 2) halves the time of the first run and doubles that of the second. (8, 2) saves a tenth in both."""
    times = {Pair(4, 2): (0.5, 2.0), Pair(2, 1): (0.9, 0.9)}
    choice, share, _ = Toy(toy, lambda choice, run: times.get(choice, (1.0, 1.0))[run]).best(n_runs=2)
    assert (choice, share) == (Pair(2, 1), pytest.approx(0.9))


def test_a_search_ends_with_its_time(toy: Any) -> None:
    work = Toy(toy, bowl)
    _, _, n_tried = work.best(seconds=3)
    assert n_tried == 3


def test_runs_of_a_case_ask_for_the_same_sizes(toy: Any) -> None:
    with pytest.raises(ValueError, match="same sizes"):
        Trial(Toy(toy, bowl).case(2, size=lambda i: i), lambda run, n: 1.0)


def test_outputs_agree_or_do_not() -> None:
    x = torch.tensor([1.0, -100.0])
    assert agree((x, x), (x + 1, x)) and not agree((x, x + 3), (x, x))
    assert not agree((x * math.nan,), (x,)) and not agree((x,), (x * math.nan,))
    assert agree((x.long(),), (x.long(),)) and not agree((x.long() + 1,), (x.long(),))


def test_each_result_is_saved_at_once_and_time_is_shared(toy: Any) -> None:
    work, saved, report = Toy(toy, bowl), list[dict[Any, Any]](), Report("tune")
    cases = [work.case(size=lambda i, size=size: size) for size in range(5)]  # type: ignore[misc]
    tune_all(
        cases,
        report,
        timer=work.timer,
        clock=lambda: work.seconds,
        seconds=21,
        save=lambda made: saved.append(dict(made)),
    )
    assert [sorted(made) for made in saved] == [[("toy", (i,)) for i in range(n + 1)] for n in range(len(saved))]
    assert len(saved) == 5
    assert set(saved[-1].values()) <= {Pair(2, 2), Pair(8, 1), Pair(4, 2), Pair(8, 2), Pair(2, 1), Pair(4, 1)}
    rows = report.tables["choices"]
    assert min(row["tried"] for row in rows) >= 4, "the first took the time of the last"
    assert work.seconds <= 21 + 1.5, "one candidate may be under way"
    assert rows[0]["sizes"] == "size 0"


def test_cases_that_time_does_not_reach_are_named_and_left(toy: Any) -> None:
    work, saved, report = Toy(toy, bowl), list[dict[Any, Any]](), Report("tune")
    cases = [work.case(size=lambda i, size=size: size) for size in range(4)]  # type: ignore[misc]
    tune_all(
        cases,
        report,
        timer=work.timer,
        clock=lambda: work.seconds,
        seconds=5,
        save=lambda made: saved.append(dict(made)),
    )
    assert 1 <= len(saved) < 4
    (note,) = report.notes
    assert note.startswith("no time for " + "; ".join(["a toy"] * (4 - len(saved))) + ":")


def test_every_kernel_is_tuned_over_values_that_it_may_have() -> None:
    assert OPTIONS.keys() == TUNABLES.keys()
    for kernel, options in OPTIONS.items():
        assert options.keys() == TUNABLES[kernel].allowed.keys()
        for name, values in options.items():
            assert list(values) == sorted(values)
            assert all(value in TUNABLES[kernel].allowed[name] for value in values), (kernel, name)


def test_all_kernels_are_tuned_and_no_case_fills_a_gpu() -> None:
    """Cases have full size, on a device that holds nothing.

    An H200 has 140 GB, and two cases may be there at once.
    """
    found = set[str]()
    for case in make_cases():
        with MadeOn(torch.device("meta")) as made:
            for make in case.runs:
                make()
        found.add(case.kernel)
        assert 0 < made.n_bytes < 60e9, (case.name, made.n_bytes)
    assert found == OPTIONS.keys() - {"toy"}


def test_what_is_tuned_counts_in_the_package_or_in_the_cache(
    toy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """The whole command runs, except its cases and its clock."""
    from benchmarks import gpu_cases, gpu_states
    from hybridmem.memory.kernels.cuda import choices

    work = Toy(toy, bowl)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choices, "shipped_file", lambda capability: tmp_path / f"shipped_{capability}.json")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a toy GPU")
    monkeypatch.setattr(gpu_cases, "make_cases", lambda: [work.case()] * 4)
    monkeypatch.setattr(gpu_states, "time_graph", lambda run, n: type("", (), {"median_ms": work.timer(run, n)}))
    for ship, path in ((False, choices.cache_file("sm90")), (True, tmp_path / "shipped_sm90.json")):
        report = gpu_tune.tune(quick=False, ship=ship)
        assert choices.read(path, "sm90") == {("toy", (7,)): Pair(8, 1)}
        assert f"written to {path}" in report.notes and "a toy GPU" in path.read_text()
