"""Checks that a recurrent module of transformers computes what ours computes: both run on a few random rows."""

from __future__ import annotations

import inspect
from dataclasses import replace

import torch
import transformers
from torch import Tensor

from hybridmem.memory import HybridMemory, MemorySpec, RecurrentSpec
from hybridmem.models.hf.mixers import Mix, MixMany, Module
from hybridmem.models.weights.checkpoint import UnsupportedModelError

_N_ROWS = 5
"""How many rows run, which are more than the taps of a usual convolution."""
_MOST_OFF = 0.05
"""The greatest accepted difference, divided by the norm of the outputs.

In 16 bits, rounding gives about a hundredth of the norm. Another formula gives a difference of most of the norm.
"""


@torch.no_grad()
def check_mixer(module: Module, mix: Mix | MixMany, spec: MemorySpec, n_model: int) -> None:
    """Raise UnsupportedModelError unless `mix` returns what the module's own `forward` returns for a new sequence.

    Args:
        spec: the spec of the whole model.
    Cost: the module's forward runs over five tokens, twice. A memory of 64 MiB exists meanwhile.
    """
    x_TM = torch.randn(_N_ROWS, n_model, generator=torch.Generator().manual_seed(1)).to(spec.device, spec.dtype)
    theirs = module(x_TM[None], **_others(module))
    ours = _run(mix, x_TM, spec, int(module.layer_idx))
    if isinstance(ours, tuple):
        ours_TM, theirs_TM = _in_rows(*ours), _in_rows(*(part[0] for part in theirs))
    else:
        ours_TM, theirs_TM = _in_rows(ours), _in_rows((theirs if isinstance(theirs, Tensor) else theirs[0])[0])
    off = float((ours_TM - theirs_TM).norm()) / max(float(theirs_TM.norm()), 1e-6)
    if off > _MOST_OFF:
        raise UnsupportedModelError(
            f"{type(module).__name__} of layer {module.layer_idx} is not what this library knows by that name: outputs "
            f"differ by {off:.2g} of their norm. This is transformers {transformers.__version__}; "
            "attach is tested with 5.23 and 5.24"
        )


def _in_rows(*parts: Tensor) -> Tensor:
    return torch.cat([part.flatten(1).float() for part in parts], -1)


def _others(module: Module) -> dict[str, Tensor | bool | None]:
    """Return what else a module's `forward` must be given. Modules that keep their states are to keep none of these."""
    parameters = [*inspect.signature(module.forward).parameters.values()][1:]
    found: dict[str, Tensor | bool | None] = {
        p.name: None for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    }
    if "position_ids" in found:
        found["position_ids"] = torch.arange(_N_ROWS)[None]
    if any(p.name == "use_cache" for p in parameters):
        found["use_cache"] = False
    return found


def _run(mix: Mix | MixMany, x_TM: Tensor, spec: MemorySpec, layer: int) -> Tensor | tuple[Tensor, ...]:
    """Run a mix on a memory of this layer's recurrence alone."""
    own = tuple(one for one in spec.layers[layer] if isinstance(one, RecurrentSpec))
    layers = tuple(own if i == layer else () for i in range(len(spec.layers)))
    memory = HybridMemory(replace(spec, layers=layers), "64MiB", rollback_window=0)
    with memory.step({memory.open(): [0] * len(x_TM)}) as step:
        return mix(x_TM, step)
