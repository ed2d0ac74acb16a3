"""Keeps torch's compiler from being imported for functions that are only marked for it.

Some configs of transformers, such as Llama's, import code that marks functions with `torch.compiler.disable`. This
imports torch._dynamo at once, which takes a second. torch._dynamo imports triton, which writes pages of text when the
process ends.
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
