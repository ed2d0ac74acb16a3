"""Lets plain torch compute in float64 what models and kernels compute in float32 whatever the dtype of a model.

Norms, scores and states are float32 also in models of 16 bits, so code says `x.float()`. In a model of float64 this
would round. Training uses this to show that gradients are right: float32 leaves an error of its own, float64 does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def precision_for(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Return a context manager, in whose block calls of torch that ask for float32 get float64 if `dtype` is float64.

    For other dtypes nothing changes. Functions of `torch.autograd.Function` are not reached: they take the dtype of
    their inputs.
    """
    return _DoublePrecision() if dtype == torch.float64 else nullcontext()


class _DoublePrecision(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(_widened, args), **{name: _widened(value) for name, value in (kwargs or {}).items()})


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
