"""Keeps torch's compiler from being imported for marks that nobody may ever read.

Some configs of transformers, such as Llama's, import code that marks functions with `torch.compiler.disable`, which
imports torch._dynamo at once: that takes a second, and triton, which it imports, writes pages when the process ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch


@contextmanager
def compiler_when_called() -> Iterator[None]:
    """Let functions that are marked with `torch.compiler.disable` meanwhile be marked when they are called first."""
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
