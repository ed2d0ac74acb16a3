"""Lets models be made whose rows have the same bits in any step."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from hybridmem.memory import SpecError
from hybridmem.memory.kernels import wants_reproducible
from hybridmem.models.loading.architectures import LanguageModel
from hybridmem.models.weights.checkpoint import UnsupportedModelError


def reproducible_rows(reproducible: bool, device: torch.device) -> AbstractContextManager[None]:
    """Let every layer that is made inside of the block give a row the same bits in any step, if that is wanted.

    Raises SpecError if the layers of this device cannot do that.
    """
    if reproducible and device.type not in ("cpu", "meta"):
        raise SpecError(
            f"reproducible=True is for the CPU, not for {device}, whose kernels compute prompts and single tokens in "
            "different ways; leave it out there"
        )
    return wants_reproducible.set_to(bool(reproducible))


def check_reproducible(model: LanguageModel) -> bool:
    """Return whether a model was made so that its rows have the same bits in any step.

    Raises UnsupportedModelError if that was wanted, and the architecture cannot do it.
    """
    if wants_reproducible.get() and model.memory_spec.of_kind("cross-attention"):
        raise UnsupportedModelError(
            f"{model.memory_spec.model} cannot be loaded with reproducible=True: its encoder attends to several inputs "
            "together; leave reproducible out"
        )
    return wants_reproducible.get()
