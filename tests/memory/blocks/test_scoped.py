"""What holds while a block runs does not hold after it, wherever an exception has ended it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hybridmem.memory.blocks.scoped import Scoped, without_gradients
from tests.interrupts import HANDLERS, Outcome, try_places


def test_the_innermost_block_decides() -> None:
    variable = Scoped("variable", 0)
    with variable.set_to(1), variable.set_to(2):
        assert variable.get() == 2
    outer, inner = variable.set_to(3), variable.set_to(4)
    with outer:
        with pytest.raises(ValueError, match="mine"), inner:
            raise ValueError("mine")
        assert variable.get() == 3
    assert variable.get() == 0


def test_nothing_of_a_block_computes_gradients() -> None:
    x = torch.ones(2, requires_grad=True)
    with without_gradients():
        assert not (x * 2).requires_grad
        with without_gradients():
            pass
        assert not torch.is_grad_enabled()
    assert (x * 2).requires_grad
    with torch.no_grad(), without_gradients():
        pass
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("number", HANDLERS)
def test_an_exception_anywhere_ends_the_block(number: int) -> None:
    variable, found = Scoped("variable", 0), list[Any]()

    def call() -> None:
        with variable.set_to(1), without_gradients():
            found.append((variable.get(), torch.is_grad_enabled()))

    def attempt() -> tuple[Callable[[], Any], Callable[[Outcome], None]]:
        def verify(outcome: Outcome) -> None:
            assert variable.get() == 0 and torch.is_grad_enabled()
            call()
            assert found[-1] == (1, False)

        return call, verify

    try_places(attempt, 1000, number=number)
