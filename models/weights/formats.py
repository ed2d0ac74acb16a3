"""Says in which format the weights of products are kept while a model is made."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, get_args

import torch

from hybridmem.memory.blocks.scoped import Scoped
from hybridmem.memory.errors import SpecError

IntegerFormat = Literal["int8", "int8-row", "int4"]
"""Integers of 8 or 4 bits with a scale for each group of 32 inputs; "int8-row" has one for all inputs of an output."""

WeightFormat = Literal["auto", IntegerFormat]
"""Formats of `load_model(weights=...)`; "auto" is the model's dtype."""

_format = Scoped[IntegerFormat | None]("weights", None)


def weights_in(weights: WeightFormat, device: torch.device) -> AbstractContextManager[None]:
    """Let every product that is made meanwhile round its weights; "auto" leaves them as they are.

    Raises:
        SpecError: there is no such format, or it is not for this device.
    """
    formats = "auto", *get_args(IntegerFormat)
    if weights not in formats:
        raise SpecError(f"weights={weights!r}; give {', '.join(map(repr, formats))}")
    if weights != "auto" and device.type not in ("cpu", "meta"):
        raise SpecError(f"weights={weights!r} is for the CPU, not for {device}; give weights='auto' there")
    return _format.set_to(None if weights == "auto" else weights)


def wanted_format() -> IntegerFormat | None:
    """Return the format that `weights_in` asks for."""
    return _format.get()
