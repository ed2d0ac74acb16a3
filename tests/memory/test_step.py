"""If a layer fails inside of a step and is called again, its second call is right, or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hybridmem.memory import HybridMemory, Step, StepError
from hybridmem.memory.eviction import H2O, Quest, SnapKV
from hybridmem.memory.quantization import Float8, Quantized
from hybridmem.memory.recurrences import FAMILIES
from tests.extent import few_cases
from tests.inside import layer_memory_at
from tests.subjects import Subject
from tests.toy import FamilyToy, Toy


class Failing:
    """Is a step whose layers fail, one after the other, when all work of a call has been done.

    Each is then called again at once.
    """

    def __init__(self, memory: HybridMemory, step: Step) -> None:
        self._memory, self._step = memory, step
        self.n_refused = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def attend(self, layer: int, *arguments: Any, **options: Any) -> torch.Tensor:
        return self._twice("attend", layer, arguments, options)

    def recur(self, layer: int, rows: torch.Tensor, recurrence: Any, **options: Any) -> torch.Tensor:
        def fails(*given: Any) -> Any:
            recurrence(*given)
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            self._step.recur(layer, rows, fails, **options)
        try:
            return self._step.recur(layer, rows, recurrence, **options)
        except StepError as error:
            assert "begun" in str(error)
            self.n_refused += 1
            raise

    def _twice(self, name: str, layer: int, arguments: Any, options: Any) -> torch.Tensor:
        kind = {"attend": "attention", "cross_attend": "cross-attention"}[name]
        owner = layer_memory_at(self._memory, layer, kind, options.get("name"))
        real = getattr(owner, name)

        def fails(*given: Any) -> Any:
            real(*given)
            raise ZeroDivisionError

        try:
            setattr(owner, name, fails)
            with pytest.raises(ZeroDivisionError):
                getattr(self._step, name)(layer, *arguments, **options)
        finally:
            delattr(owner, name)
        return getattr(self._step, name)(layer, *arguments, **options)


def check(subject: Subject, fold: str | None, steps: list[int]) -> None:
    tokens = subject.tokens(sum(steps))
    memory = HybridMemory(subject.spec, "2MiB", rollback_window=4, page_tokens=4, fold=fold, poison=True)  # type: ignore[arg-type]
    expected, sequence, start = memory.open(), memory.open(), 0
    for n in steps:
        chunk, start = tokens[start : start + n], start + n
        with memory.step({expected: chunk}, outputs="all") as step:
            wanted = subject.model(step)
        found = None
        try:
            with memory.step({sequence: chunk}, outputs="all") as step:
                found = subject.model(Failing(memory, step))
        except StepError:
            assert sequence.length == start - n
            memory.check()
            with memory.step({sequence: chunk}, outputs="all") as step:  # The error message asks for this.
                found = subject.model(step)
        subject.assert_same(found, wanted)
        memory.check()


@few_cases
@pytest.mark.parametrize("fold", ["keep", "replay", "defer"])
@pytest.mark.parametrize("name", FAMILIES)
def test_of_a_recurrence(name: str, fold: str) -> None:
    family = FAMILIES[name]
    model = FamilyToy(family)
    if fold == "defer" and not all(m.can_defer for layer in model.memory_spec.layers for m in layer):  # type: ignore[union-attr]
        pytest.skip("needs its state at each token")
    check(Subject(name, fold, model, is_exact=family.is_exact), fold, [3, 1, 1, 6, 1, 1, 1])  # type: ignore[arg-type]


POLICIES = {
    "dense": None,
    "h2o": H2O(9, recent=2, every=4),
    "snapkv": SnapKV(9, recent=2, observed=3, kernel=3, every=4),
    "quest": Quest(16, recent=1, select_up_to=10**6),
}
STORAGES = {"plain": None, "4 bit": Quantized(4, group=8), "float8": Float8(group=4)}


@few_cases
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("policy", POLICIES)
def test_of_attention(policy: str, storage: str) -> None:
    subject = Subject(
        policy, "keep", Toy(recurrent=False), is_exact=True, policy=POLICIES[policy], storage=STORAGES[storage]
    )
    check(subject, None, [5, 1, 1, 9, 1, 1, 20, 1, 1])


def test_of_attention_over_a_window() -> None:
    check(Subject("window", "keep", Toy(recurrent=False, window=5), is_exact=True), None, [5, 1, 1, 9, 1, 1, 20, 1, 1])


def test_what_a_recurrence_never_saw_may_be_said_again() -> None:
    """Rows of a wrong shape are refused before anything is written."""
    model = FamilyToy(FAMILIES["mamba1"])
    memory = HybridMemory(model.memory_spec, "1MiB")
    sequence = memory.open()
    with memory.step({sequence: [1, 2]}) as step:
        with pytest.raises(StepError, match="shape"):
            step.recur(0, torch.zeros(3, 2), lambda states, rows: (rows, states))
        model(step)
    assert sequence.length == 2
