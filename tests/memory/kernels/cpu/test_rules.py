"""Every function states its own floating-point rules, so that bits do not depend on what is compiled first."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator

import pytest
from numba import njit
from numba.core.dispatcher import Dispatcher

import hybridmem.memory.kernels.cpu
import hybridmem.models.layers
import hybridmem.models.products
from hybridmem.memory.kernels.cpu.rules import ELEMENTWISE, subroutine

_ROOMS = (hybridmem.memory.kernels.cpu, hybridmem.models.products, hybridmem.models.layers)


def _compiled_functions() -> Iterator[tuple[str, Dispatcher]]:
    for room in _ROOMS:
        for module in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, Dispatcher):
                    yield f"{module.name}.{name}", value


def test_each_function_states_its_rules() -> None:
    functions = dict(_compiled_functions())
    silent = [
        name
        for name, function in functions.items()
        if function.targetoptions.get("inline") != "always"
        and not function.targetoptions.keys() >= {"fastmath", "error_model"}
    ]
    assert len(functions) > 100 and silent == []


@pytest.mark.parametrize("first", ["relaxed", "exact"])
def test_a_subroutine_is_compiled_by_its_own_rules(first: str) -> None:
    """With numba's own decorator, a subroutine would get the rules of the first kernel that needs it."""
    multiply_add = subroutine()(lambda x, y, z: x * y + z)
    inheriting = njit(lambda x, y, z: x * y + z)
    rules = {"relaxed": ELEMENTWISE, "exact": set()}
    for kind in sorted(rules, key=lambda kind: kind != first):
        own = njit(fastmath=rules[kind])(lambda x, y, z: multiply_add(x, y, z) + inheriting(x, y, z))
        own(1.0, 2.0, 3.0)
    assert "contract" not in multiply_add.inspect_llvm(multiply_add.signatures[0])
    assert ("contract" in inheriting.inspect_llvm(inheriting.signatures[0])) == (first == "relaxed")
