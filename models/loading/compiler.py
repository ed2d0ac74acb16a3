"""Keeps configs of transformers from importing torch's compiler and torch.distributed, of which they use nothing.

Some configs, such as Llama's, import transformers' activation functions to check names. These import kernels, and
`torch.distributed.tensor`, which takes a third of a second. They also mark functions with `torch.compiler.disable`,
which imports torch._dynamo at once. This takes a second, and imports triton, which writes pages of text when the
process ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial, wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

_ACTIVATIONS = "transformers.activations"


@contextmanager
def light_configs() -> Iterator[None]:
    """Inside the block, import configs of transformers without activation functions and without torch's compiler.

    Both are imported later if they are used.
    """
    is_known = _ACTIVATIONS in sys.modules
    if not is_known:
        sys.modules[_ACTIVATIONS] = _Later(_ACTIVATIONS)
    try:
        with compiler_when_called():
            yield
    finally:
        if not is_known and isinstance(sys.modules.get(_ACTIVATIONS), _Later):
            del sys.modules[_ACTIVATIONS]


class _Later(ModuleType):
    """Stands for the module of activation functions, which is imported when something of it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python asks whether the module is a package.
        return _LaterTable() if name == "ACT2FN" else getattr(_import_activations(), name)


class _LaterTable(Mapping[str, Any]):
    """Stands for the table of activation functions by their names."""

    def __getitem__(self, name: str) -> Any:
        return _import_activations().ACT2FN[name]

    def __iter__(self) -> Iterator[str]:
        return iter(_import_activations().ACT2FN)

    def __len__(self) -> int:
        return len(_import_activations().ACT2FN)


def _import_activations() -> Any:
    if isinstance(sys.modules.get(_ACTIVATIONS), _Later):
        del sys.modules[_ACTIVATIONS]
    return import_module(_ACTIVATIONS)


@contextmanager
def compiler_when_called() -> Iterator[None]:
    """Inside the block, delay `torch.compiler.disable`: a function is marked when it is first called."""
    at_once: Any = torch.compiler.disable

    def when_called(function: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        if function is None:
            return partial(when_called, recursive=recursive, **options)
        marked = cache(lambda: at_once(function, recursive, **options))

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return marked()(*args, **kwargs)

        return call

    if "torch._dynamo" in sys.modules:
        yield
        return
    torch.compiler.disable = when_called  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compiler.disable = at_once
