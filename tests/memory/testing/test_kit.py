"""The kit finds planted faults, and its commands say so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hybridmem.memory.testing import PROMISES, HybridAdapter, RefusedError, check
from hybridmem.memory.testing.__main__ import main, table
from hybridmem.memory.testing.adapter import Logits
from hybridmem.memory.testing.histories import Fed, Fork, Misuse, Open, Reorder, ReturnTo, Rollback, Step, head
from hybridmem.memory.testing.subjects import attention, hybrid
from hybridmem.memory.testing.tally import Tally
from hybridmem.memory.testing.toys import Toy
from hybridmem.memory.testing.trial import Oracle, Trial
from tests.extent import few_cases, only_in_long

ROOT = Path(__file__).parent.parent.parent.parent

_MODEL = Toy(recurrent=False)


class Sound(HybridAdapter):
    """A memory without a fault."""

    def __init__(self) -> None:
        super().__init__(_MODEL)


class TrimsAttentionOnly(Sound):
    """Goes back one token less than it says, as a memory whose recurrent states stay behind."""

    def rollback(self, sequence: Any, to: int) -> None:
        super().rollback(sequence, to)
        if to:
            super().rollback(sequence, to - 1)
            super().step({sequence: [0]})


class AdvancesOnFailure(Sound):
    """Keeps the tokens of a step whose model fails."""

    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        try:
            return super().step(requests, fail_after=fail_after)
        finally:
            if fail_after is not None and fail_after < 2:
                super().step({next(iter(requests)): [1]})


class SharesForks(Sound):
    """Gives a fork its origin's handle."""

    def fork(self, sequence: Any) -> Any:
        return sequence


class ReordersOneByOne(Sound):
    """Moves one pair after the other."""

    def reorder(self, moves: Mapping[Any, Any]) -> None:
        for target, source in moves.items():
            super().reorder({target: source})


class Lies(Sound):
    """Claims to go back anywhere, but cannot."""

    def can(self, call: str, *arguments: Any) -> bool | None:
        return True

    def rollback(self, sequence: Any, to: int) -> None:
        raise RefusedError("not to there")


class Leaks(Sound):
    """Counts what is closed as used."""

    n_closed = 0

    def close(self, sequence: Any) -> None:
        super().close(sequence)
        self.n_closed += 1

    def usage(self) -> int:
        return super().usage() + self.n_closed


class TakesAnything(Sound):
    """Takes tokens that are none."""

    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        kept = {s: [t % self.vocab_size for t in tokens] or [0] for s, tokens in requests.items()}
        return super().step(kept, fail_after=fail_after)


class MixesRows(Sound):
    """Returns the rows of a batch in another order than was asked."""

    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        return super().step(requests, fail_after=fail_after)[::-1]


class LosesState(Sound):
    """Loads a sequence without its last token."""

    def load(self, path: Path) -> Any:
        sequence = super().load(path)
        super().rollback(sequence, sequence.length - 1)
        super().step({sequence: [0]})
        return sequence


class TakesMoreThanItSays(Sound):
    """Claims that it cannot go back, but does."""

    def can(self, call: str, *arguments: Any) -> bool | None:
        return False


class LeaksOnMisuse(Leaks):
    """Keeps bytes for what it has refused."""

    def close(self, sequence: Any) -> None:
        HybridAdapter.close(self, sequence)

    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        try:
            return super().step(requests, fail_after=fail_after)
        except Exception:
            self.n_closed += fail_after is None
            raise


class LeaksOnRefusal(LeaksOnMisuse):
    """Keeps bytes for a fork that it has refused."""

    def fork(self, sequence: Any) -> Any:
        self.n_closed += 1
        raise RefusedError("no forks here")


class SaysNothing(Sound):
    """Returns numbers that are none."""

    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        rows = super().step(requests, fail_after=fail_after)
        return [row * np.nan if len(requests) > 1 else row for row in rows]


class SaysTooMuch(Sound):
    """Returns more rows than there are tokens."""

    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        rows = super().step(requests, fail_after=fail_after)
        return [np.concatenate([row, row]) if len(requests) > 1 else row for row in rows]


class CannotCount(Sound):
    """Raises where it is asked how long a sequence is."""

    def length(self, sequence: Any) -> int:
        raise ZeroDivisionError("no length today")


class IsNoneFromTheStart(Sound):
    """Returns numbers that are none for each long text, even if it is fed alone."""

    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        rows = super().step(requests, fail_after=fail_after)
        return [row * np.nan if self.length(s) > 30 else row for s, row in zip(requests, rows, strict=True)]


class SaysOneNumber(Sound):
    """Returns the same for all tokens."""

    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        return [np.zeros_like(row) for row in super().step(requests, fail_after=fail_after)]


FAULTS: dict[Callable[[], HybridAdapter], str] = {
    TrimsAttentionOnly: "tokens taken back leave no trace",
    AdvancesOnFailure: "a step that fails in any layer changes nothing",
    SharesForks: "a fork goes its own way",
    ReordersOneByOne: "sequences reorder all at once",
    Lies: "it says what it can",
    Leaks: "bytes in use are those of open sequences",
    TakesAnything: "tokens that are none are refused, and nothing changes",
    MixesRows: "a batch of any lengths is as each sequence alone",
    LosesState: "a saved sequence goes on as it was",
    TakesMoreThanItSays: "it says what it can",
    LeaksOnMisuse: "tokens that are none are refused, and nothing changes",
    LeaksOnRefusal: "a fork goes its own way",
    SaysNothing: "a batch of any lengths is as each sequence alone",
    SaysTooMuch: "a batch of any lengths is as each sequence alone",
    CannotCount: "a fork goes its own way",
    IsNoneFromTheStart: "a part of a chunk taken back leaves no trace",
    SaysOneNumber: "a text in parts is as the whole text",
}


@few_cases
@pytest.mark.parametrize("faulty", FAULTS, ids=lambda faulty: faulty.__name__)
def test_a_planted_fault_is_found(faulty: Callable[[], HybridAdapter]) -> None:
    (result,) = check(faulty, [FAULTS[faulty]], n_examples=4)
    assert result.verdict == "failed" and result.seed is not None


def test_a_failing_history_is_made_small() -> None:
    """The history has forty operations.

    Only those that show the fault are left: two sequences, a token each, and the reordering.
    """
    (result,) = check(ReordersOneByOne, ["anything, in any order"], n_examples=60)
    assert result.verdict == "failed" and result.why.count("\n") < 12


def test_what_a_memory_has_not_is_refused_and_not_passed() -> None:
    class WithoutForks(Sound):
        def fork(self, sequence: Any) -> Any:
            raise RefusedError("no forks here")

    (result,) = check(WithoutForks, ["a fork goes its own way"], n_examples=2)
    assert (result.verdict, result.why) == ("refused", "no forks here")
    assert 'refused: a fork goes its own way (--allow-refused "a fork goes its own way"): no forks' in table(
        "mine", [result]
    )


def test_what_was_loaded_and_cannot_go_back_has_not_shown_that_it_can() -> None:
    class StaysWhereItWasSaved(Sound):
        def load(self, path: Path) -> Any:
            self.saved = super().load(path)
            return self.saved

        def rollback(self, sequence: Any, to: int) -> None:
            if sequence is self.saved:
                raise RefusedError("not behind its file")
            super().rollback(sequence, to)

        def can(self, call: str, *arguments: Any) -> bool | None:
            return None

    (result,) = check(StaysWhereItWasSaved, ["a saved sequence can go back"], n_examples=3)
    assert (result.verdict, result.why) == ("refused", "not behind its file")


def test_texts_are_recomputed_in_steps_that_a_memory_takes() -> None:
    class TakesTwenty(Sound):
        def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
            if max(map(len, requests.values())) > 20:
                raise RefusedError("at most 20 tokens of a sequence in a step")
            return super().step(requests, fail_after=fail_after)

    (result,) = check(TakesTwenty, ["a text in parts is as the whole text"], n_examples=8)
    assert result.verdict == "refused" and result.n_compared > 100


def test_tokens_that_are_masked_in_all_texts_are_no_fault() -> None:
    class Masks(Sound):
        def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
            rows = [row.copy() for row in super().step(requests, fail_after=fail_after)]
            for row in rows:
                row[:, 0] = -np.inf
            return rows

    (result,) = check(Masks, ["a fork goes its own way"], n_examples=2)
    assert result.verdict == "passed"


def test_a_recurrence_that_raises_is_a_fault_and_no_refusal() -> None:
    class Broken(Sound):
        def __init__(self) -> None:
            super().__init__()
            self.model = lambda step: Toy()(step)  # The model is of another spec.

    (result,) = check(Broken, ["a fork goes its own way"], n_examples=1)
    assert result.verdict == "failed" and "StepError" in result.why


def test_a_step_that_is_taken_back_in_part_is_recomputed_by_a_step_of_its_length() -> None:
    """Of 17 tokens, 12 stay.

    Another kernel would compute 12 alone, and its rounding would change a code of 8 bits.
    """
    fed = [
        (11,), (17, 9, 1, 15, 14, 1, 7, 5, 1, 2, 14, 0, 1, 1, 8, 11, 13),
        (10, 14, 17, 11, 15, 1, 3, 18, 7, 13, 11, 9, 15, 3, 4, 18, 3), (11,), (7, 2, 5, 9, 17), (4,),
    ]  # fmt: skip
    steps = [Step((("a", tokens),)) for tokens in fed]

    def subject() -> HybridAdapter:
        return hybrid("snapkv", "8-bit")

    tally = Tally()
    Trial(subject, Oracle(subject), tally).run((Open("a"), *steps[:2], Rollback("a", 5), *steps[2:]))
    assert tally.compared == sum(map(len, fed))


def test_what_is_left_of_a_step_remembers_what_was_taken_back() -> None:
    parts = (Fed((1, 2)), Fed((3, 4, 5)), Fed((6,)))
    assert head(parts, 4) == (Fed((1, 2)), Fed((3, 4), (5,)))
    assert head(head(parts, 4), 3) == (Fed((1, 2)), Fed((3,), (4, 5)))
    assert head(parts, 2) == parts[:1]


@only_in_long
def test_every_promise_is_about_an_operation_that_its_histories_hold() -> None:
    results = list(check(attention, PROMISES, n_examples=1))
    assert [r.verdict for r in results] == ["refused" if p.is_optional else "passed" for p in PROMISES.values()]
    asked_of_all = [name for name, promise in PROMISES.items() if not promise.is_optional]
    assert [r.promise.name for r in check(attention, n_examples=1)] == asked_of_all
    names = {operation.__name__ for operation in (Open, Step, Rollback, ReturnTo, Fork, Reorder, Misuse)}
    assert names <= {promise.needs for promise in PROMISES.values()} | {"Open"}


def test_the_command_says_what_failed_and_how_to_see_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    only = ["--only", "reorder", "--examples", "3"]
    assert main(["hybridmem.memory.testing.subjects:attention", *only]) == 0
    assert main([f"{__name__}:ReordersOneByOne", *only]) == 1
    text = capsys.readouterr().out
    assert "--seed 0 --examples 1" in text and "Reorder(moves=" in text and "0 passed, 1 failed" in text
    once = ["--only", "reorder", "--examples", "1", "--minutes"]
    assert main(["hybridmem.memory.testing.subjects:attention", *once, "0.001"]) == 0
    assert re.search("anything, in any order +passed", capsys.readouterr().out)
    assert main([f"{__name__}:MixesRows", *once, "1"]) == 1  # This takes no longer than needed.
    assert "failed: anything, in any order (--seed" in capsys.readouterr().out
    wrongs = ("hybridmem.memory.testing.subjects:nothing", "memory", "os:getcwd", "--only=no such", "--examples=0")
    for wrong in (*wrongs, "--allow-refused=no such"):
        assert main([wrong]) == 2
    assert "names no adapter" in capsys.readouterr().err


@only_in_long
def test_pytest_takes_a_subject_of_the_command_line_and_what_it_may_refuse(tmp_path: Path) -> None:
    """It works in any folder, as from an installed wheel, where the entry point of the same name gives the option.

    The script `pytest` does not look for modules in the current folder by itself. Of three promises one is kept and two
    are refused, of which one may be refused.
    """
    (tmp_path / "mine.py").write_text(_REFUSES_FORKS)
    options = ["--subject", "mine:make", "--subject-examples", "1", "-k", "reorder or fork"]
    options += ["--allow-refused", "a fork goes its own way"]
    script = "import sys; sys.path[0] = ''; del sys.path[0]; import pytest; sys.exit(pytest.main())"
    call = [
        sys.executable,
        "-c",
        script,
        "-q",
        "-n",
        "0",
        "-p",
        "hybridmem.pytest_options",
        "--pyargs",
        "hybridmem.memory.testing",
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    found = subprocess.run(
        [*call, *options], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "1 failed, 1 passed, 1 skipped" in found.stdout, found.stdout + found.stderr
    assert 'refused (--allow-refused "a fork can go back, and its origin stays"): not today' in found.stdout


_REFUSES_FORKS = """
from hybridmem.memory.testing import HybridAdapter, RefusedError
from hybridmem.memory.testing.toys import Toy

model = Toy(recurrent=False)


class RefusesForks(HybridAdapter):
    def __init__(self):
        super().__init__(model)

    def fork(self, sequence):
        raise RefusedError("not today")


make = RefusesForks
"""
