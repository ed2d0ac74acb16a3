"""Decides which memories can be reproducible: their outputs are a function of the text, bit for bit.

Then the outputs for a token depend on the model, on the memory's options and on the tokens before it, and on nothing
else: neither on how tokens were split into steps, nor on other sequences, nor on what was taken back. What cannot keep
this promise is refused here, by its name.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hybridmem.memory.errors import SpecError
from hybridmem.memory.kernels import why_not_reproducible
from hybridmem.memory.specs import AttentionSpec, MemorySpec, RecurrentSpec

_BY_STEPS = "what a token sees of it depends on how tokens are split into steps"


def with_reproducible(spec: MemorySpec, wanted: bool | None) -> MemorySpec:
    """Return the spec of a memory that is reproducible if that is wanted. None takes what the model was loaded for.

    Raises SpecError if the promise cannot be kept.
    """
    if wanted not in (None, True, False):
        raise SpecError(f"reproducible={wanted!r}; give True, False, or None for what the model was loaded for")
    if wanted is False:
        return replace(spec, reproducible=False)
    if not spec.reproducible:
        raise SpecError(
            f"{spec.model} was not made to be reproducible, so its own products may give a row other bits in other "
            "steps; load it with load_model(..., reproducible=True), or, if the model is yours and computes each row "
            "alone, give dataclasses.replace(spec, reproducible=True)"
        )
    if (why := why_not(spec)) is not None:
        raise SpecError(f"{spec.model} cannot be reproducible here: {why}; give reproducible=False to do without")
    return spec


def why_not(spec: MemorySpec) -> str | None:
    """Return why a memory of this spec cannot be reproducible; None if it can."""
    for memory in (memory for layer in spec.layers for memory in layer):
        if isinstance(memory, AttentionSpec):
            for what in (memory.policy, memory.storage):
                if what is not None:
                    return f"{memory.name!r} has {what}, and {_BY_STEPS}"
        if isinstance(memory, RecurrentSpec):
            for state in memory.states:
                if state.dtype not in (None, torch.float32) and not state.keeps_dtype:
                    return f"the state {state.name!r} has {state.dtype}, and each step rounds the state at its end"
    return why_not_reproducible(spec.device, spec.dtype)
