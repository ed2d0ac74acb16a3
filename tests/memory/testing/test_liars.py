"""The kit never passes what does not work: errors count as faults, and refusals fail."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridmem.memory import CapacityError
from hybridmem.memory.eviction import Candidates, EvictionPolicy, KNorm
from hybridmem.memory.testing import PROMISES, HybridAdapter, InjectedError, RefusedError, check
from hybridmem.memory.testing.__main__ import main, table
from hybridmem.memory.testing.adapter import Logits
from hybridmem.memory.testing.toys import Toy
from tests.extent import few_cases, only_in_long

_MODEL, _HYBRID = Toy(recurrent=False), Toy()


@dataclass(frozen=True)
class OfAnotherShape(EvictionPolicy):
    """Ranks three rows, whatever it is asked."""

    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        return torch.zeros(3)


@dataclass(frozen=True)
class RaisesInScore(KNorm):
    def score(self, rows: Candidates) -> Tensor:
        raise CapacityError("as if there were no room", needed=1, free=0)


@dataclass(frozen=True)
class RaisesOnceItEvicts(KNorm):
    def rank(self, rows: Candidates, scores: Tensor) -> Tensor:
        raise RuntimeError("no ranks today")


@dataclass(frozen=True)
class EndsTheRun(KNorm):
    def score(self, rows: Candidates) -> Tensor:
        sys.exit(0)


@dataclass(frozen=True)
class SkipsTheTest(KNorm):
    def score(self, rows: Candidates) -> Tensor:
        pytest.skip("not today")


@only_in_long
@pytest.mark.parametrize("policy", [OfAnotherShape, RaisesInScore, RaisesOnceItEvicts, EndsTheRun, SkipsTheTest])
def test_a_policy_that_raises_fails_every_promise_that_it_meets(policy: type[EvictionPolicy]) -> None:
    def subject() -> HybridAdapter:
        return HybridAdapter(_MODEL, _MODEL.memory_spec.with_policy(policy(9, recent=2, every=4)))

    results = check(subject, ["a text in parts is as the whole text", "tokens taken back leave no trace"], n_examples=4)
    assert [result.verdict for result in results] == ["failed", "failed"]


def test_a_policy_that_never_evicts_is_reported_as_such() -> None:
    def subject() -> HybridAdapter:
        return HybridAdapter(_MODEL, _MODEL.memory_spec.with_policy(RaisesOnceItEvicts(512, every=4)))

    (result,) = check(subject, ["tokens taken back leave no trace"], n_examples=2)
    assert result.exercised["rows evicted"] == 0
    never = next(line for line in table("mine", [result]).splitlines() if line.startswith("never exercised"))
    assert "rows evicted" in never and "forks" in never and "rollbacks" not in never


class Honest(HybridAdapter):
    """Passes everything on."""

    def __init__(self) -> None:
        super().__init__(_HYBRID)


class RefusesLongSteps(Honest):
    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        if max(map(len, requests.values())) > 6:
            raise RefusedError("at most 6 tokens of a sequence in a step")
        return super().step(requests, fail_after=fail_after)

    def branch(self, sequence: Any, tokens: list[int], parents: list[int], path: list[int]) -> Logits:
        if len(tokens) > 6:
            raise RefusedError("at most 6 tokens of a sequence in a step")
        return super().branch(sequence, tokens, parents, path)


class IsAlwaysFull(Honest):
    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        raise RefusedError("there is no room")


class RefusesRollbacks(Honest):
    def rollback(self, sequence: Any, to: int) -> None:
        raise RefusedError("not today")

    def can(self, call: str, *arguments: Any) -> bool | None:
        return None


class RefusesSomeRollbacks(RefusesRollbacks):
    """Goes back one token, and never further."""

    def rollback(self, sequence: Any, to: int) -> None:
        if to < self.length(sequence) - 1:
            raise RefusedError("a token is enough")
        HybridAdapter.rollback(self, sequence, to)


class RefusesForks(Honest):
    def fork(self, sequence: Any) -> Any:
        raise RefusedError("no forks today")


class RefusesSecondForks(Honest):
    """Forks one sequence, and then no other."""

    n_forks = 0

    def fork(self, sequence: Any) -> Any:
        self.n_forks += 1
        if self.n_forks > 1:
            raise RefusedError("one fork is enough")
        return super().fork(sequence)


_LONG, _FORK = "a text in parts is as the whole text", "a fork goes its own way"
REFUSING: dict[Callable[[], HybridAdapter], str] = {
    RefusesLongSteps: _LONG,
    IsAlwaysFull: _LONG,
    RefusesRollbacks: "tokens taken back leave no trace",
    RefusesSomeRollbacks: "a sequence can go back twice, and back and forth",
    RefusesForks: _FORK,
    RefusesSecondForks: _FORK,
}


@few_cases
@pytest.mark.parametrize("subject", REFUSING, ids=lambda subject: subject.__name__)
def test_what_a_memory_refuses_it_has_not_passed(subject: Callable[[], HybridAdapter]) -> None:
    (result,) = check(subject, [REFUSING[subject]], n_examples=4)
    assert result.verdict == "refused" and result.n_refused


def test_a_memory_of_short_steps_passes_nothing() -> None:
    verdicts = {result.promise.name: result.verdict for result in check(RefusesLongSteps, PROMISES, n_examples=1)}
    assert verdicts == dict.fromkeys(PROMISES, "refused")


class RaisesAlways(Honest):
    """Says that a layer failed, even if none was to fail."""

    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        raise InjectedError


class IgnoresCheckpoints(Honest):
    """Returns to no checkpoint, and does not say so."""

    def return_to(self, sequence: Any, checkpoint: Any) -> None:
        pass


class MovesItsCheckpoints(Honest):
    """Takes the sequence itself as its checkpoint."""

    def checkpoint(self, sequence: Any) -> Any:
        return sequence

    def return_to(self, sequence: Any, checkpoint: Any) -> None:
        if sequence is not checkpoint:
            super().return_to(sequence, checkpoint)

    def close(self, sequence: Any) -> None:
        if sequence.is_open:
            super().close(sequence)


class EndsTheRunWhereBytesAreCounted(Honest):
    def usage(self) -> int:
        sys.exit(0)


class IsNoNumber(Honest):
    def step(self, requests: Mapping[Any, list[int]], *, fail_after: int | None = None) -> list[Logits]:
        return [row * np.nan for row in super().step(requests, fail_after=fail_after)]


_AFAR = "a checkpoint is returned to from afar"
FAILING: dict[Callable[[], HybridAdapter], str] = {
    RaisesAlways: _LONG,
    IgnoresCheckpoints: _AFAR,
    MovesItsCheckpoints: _AFAR,
    IsNoNumber: _LONG,
    EndsTheRunWhereBytesAreCounted: _LONG,
}


@pytest.mark.parametrize("subject", FAILING, ids=lambda subject: subject.__name__)
def test_a_memory_that_does_something_else_fails(subject: Callable[[], HybridAdapter]) -> None:
    (result,) = check(subject, [FAILING[subject]], n_examples=2)
    assert result.verdict == "failed"


def test_a_memory_that_cannot_be_made_is_an_error_that_no_runner_takes_for_a_skip() -> None:
    def skips() -> HybridAdapter:
        pytest.skip("not today")

    with pytest.raises(RuntimeError, match="making the memory raised Skipped: not today"):
        list(check(skips, [_LONG], n_examples=1))


def test_refusals_fail_the_command_unless_they_are_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["--subject", f"{__name__}:RefusesForks", "--only", "fork", "--subject-examples", "1"]
    assert main(call) == 1
    assert "0 passed, 0 failed, 2 refused, 0 allowed" in capsys.readouterr().out
    assert main([*call, "--allow-refused", _FORK]) == 1
    names = [_FORK, "a fork can go back, and its origin stays"]
    assert main([*call, *(part for name in names for part in ("--allow-refused", name))]) == 0
    assert "0 passed, 0 failed, 0 refused, 2 allowed" in capsys.readouterr().out
