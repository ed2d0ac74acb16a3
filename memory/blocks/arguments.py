"""Reads arguments that have several forms: counts, dtypes and devices. Errors name the option and its value."""

from __future__ import annotations

import operator
from typing import Any, TypeGuard

import numpy as np
import torch

from hybridmem.memory.blocks.forked_process import check_process
from hybridmem.memory.errors import HybridMemoryError, SpecError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes of rows and states, by name."""


def is_integer(value: Any, least: int | None = None) -> TypeGuard[int]:
    """True if `value` is an integer (Python's or numpy's, but not a bool) and at least `least`."""
    is_one = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_one and (least is None or bool(value >= least))


def read_count(
    option: str, value: Any, least: int, unit: str = "", *, error: type[HybridMemoryError] = SpecError
) -> int:
    """Return `value` if it is an integer of at least `least`. Otherwise raise `error`."""
    if not is_integer(value, least):
        raise error(f"{option}={value!r}; it must be an integer of at least {least}{unit and ' ' + unit}")
    return operator.index(value)


def read_dtype(option: str, dtype: Any, others: str = "") -> torch.dtype:
    """Read a dtype, which is one of `DTYPES` or its name. Raises SpecError.

    Args:
        others: what else the caller accepts, as text for the error message.
    """
    for name, known in DTYPES.items():
        if dtype is known or (isinstance(dtype, str) and dtype == name):
            return known
    raise SpecError(f"{option}={dtype!r}; give {others}'float32', 'bfloat16', 'float16' or one of these as torch.dtype")


def read_device(option: str, device: Any) -> torch.device:
    """Read a device or its name. The machine need not have the device. Raises SpecError."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise SpecError(f"{option}={device!r} is no device; give 'cpu', 'cuda', 'cuda:1' or 'meta'") from error


def check_usable(option: str, device: torch.device) -> None:
    """Raise SpecError unless this machine has the device, and this process can compute with it."""
    check_process(device)
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).partition("\n")[0]
        raise SpecError(
            f"{option}={str(device)!r} cannot be used on this machine ({why}); give device='cpu'"
        ) from error
