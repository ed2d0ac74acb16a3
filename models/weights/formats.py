"""Defines the formats of products' weights, and in which format weights are kept while a model is made."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal, get_args

import torch

from hybridmem.memory.blocks import Scoped
from hybridmem.memory.errors import SpecError

IntegerFormat = Literal["int8", "int8-row", "int4"]
"""Integers of 8 or 4 bits with a scale for each group of 32 inputs.

"int8-row" has one scale for all inputs of an output.
"""

WeightFormat = Literal["auto", "dense", IntegerFormat]
"""Formats of `load_model(weights=...)`. "auto" keeps the bits of the files, "dense" uses the model's dtype."""

HeldFormat = WeightFormat | Literal["plain"]
"""Formats of `Linear(format=...)`. "plain" uses tensors that torch multiplies, so that gradients reach them."""

_format = Scoped[HeldFormat]("weights", "auto")


def weights_in(weights: WeightFormat, device: torch.device) -> AbstractContextManager[None]:
    """Let every product that is made inside of the block hold its weights in this format.

    Raises:
        SpecError: the format does not exist, or is not for this device.
    """
    formats = "auto", "dense", *get_args(IntegerFormat)
    if weights not in formats:
        raise SpecError(f"weights={weights!r}; give {', '.join(map(repr, formats))}")
    if weights not in ("auto", "dense") and device.type not in ("cpu", "meta"):
        raise SpecError(f"weights={weights!r} is for the CPU, not for {device}; give weights='auto' there")
    return _format.set_to(weights)


def plain_weights() -> AbstractContextManager[None]:
    """Let every product that is made inside of the block be torch's own, which can be differentiated."""
    return _format.set_to("plain")


def wanted_format() -> HeldFormat:
    """Return the format that `weights_in` or `plain_weights` asks for."""
    return _format.get()


def wanted_vocabulary_format() -> HeldFormat:
    """Return the format of heads and embeddings: 8 bits if products have 4, because fewer bits harm them most."""
    return "int8" if _format.get() == "int4" else _format.get()
