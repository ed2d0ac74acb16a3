"""Replaces the code of existing functions by a mutant's code, or imports the mutant where that is impossible.

Defaults, constants and class bodies run on import, so they cannot be replaced later. For these, a process that has not
imported the library imports the mutant.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from types import CodeType, FunctionType, ModuleType
from typing import Any

from benchmarks.mutants.operators import Mutant, mutated
from benchmarks.mutants.running import ROOT

_Key = tuple[tuple[str, int], ...]
"""Name and first line of a function and of those around it, outermost first."""


def replace(mutant: Mutant) -> bool:
    """Replace functions' code by a mutant's; return False, and change nothing, if the mutant must be imported."""
    path = ROOT / mutant.path
    source = path.read_text()
    old = dict(_codes(compile(source, str(path), "exec"), ()))
    new = dict(_codes(compile(mutated(source, mutant.number), str(path), "exec"), ()))
    changed = [key for key in old if key not in new or _own(old[key]) != _own(new[key])]
    if not changed or any(key not in new or not old[key].co_flags & CO_OPTIMIZED for key in changed):
        return False
    # An outer function's code holds the code of its inner functions, so both have changed.
    whole = {key[:n] for key in changed for n in range(1, len(key) + 1)}
    names = [key[-1] for key in old if key]
    if any(names.count(key[-1]) > 1 for key in whole):
        return False
    wanted = {key[-1]: new[key] for key in whole if key in new}
    found = [
        (function, wanted[name])
        for function in gc.get_objects()
        # `isinstance` reads `__class__`, which makes lazy modules import what they stand for.
        if type(function) is FunctionType
        and function.__code__.co_filename == str(path)
        and (name := (function.__code__.co_name, function.__code__.co_firstlineno)) in wanted
    ]
    reached = {(function.__code__.co_name, function.__code__.co_firstlineno) for function, _ in found}
    if any(not any(part in reached for part in key) for key in changed):
        return False
    if any(code.co_freevars != function.__code__.co_freevars for function, code in found):
        return False
    for function, code in found:
        function.__code__ = code
    return True


def import_instead(mutant: Mutant) -> None:
    """Make later imports in this process load the mutant instead of the original module."""
    sys.meta_path.insert(0, _Finder(mutant))


def _codes(code: CodeType, around: _Key) -> Iterator[tuple[_Key, CodeType]]:
    yield around, code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant, (*around, (constant.co_name, constant.co_firstlineno)))


def _own(code: CodeType) -> tuple[Any, ...]:
    constants = [repr(constant) for constant in code.co_consts if not isinstance(constant, CodeType)]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module by its name, and loads other code for it."""

    def __init__(self, mutant: Mutant) -> None:
        self._path = ROOT / mutant.path
        self._name = mutant.path.removesuffix(".py").replace("/", ".")
        self._code = compile(mutated(self._path.read_text(), mutant.number), str(self._path), "exec")

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=str(self._path))
        spec.has_location = True
        return spec

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, vars(module))
