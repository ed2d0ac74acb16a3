"""Checks that a recurrent module of transformers computes what ours computes: both run on a few random rows."""

from __future__ import annotations

import inspect
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor

from hybridmem.memory import AttentionSpec, ChosenRows, HybridMemory, IndexSpec, MemorySpec
from hybridmem.models.hf.mixers import Module
from hybridmem.models.hf.replacing import Replaced
from hybridmem.models.layers.indexer import CHOSEN
from hybridmem.models.weights.checkpoint import UnsupportedModelError

_N_ROWS = 5
"""How many rows run, which are more than the taps of a usual convolution."""
_MOST_OFF = 0.05
"""The greatest accepted difference, divided by the norm of the outputs.

In 16 bits, rounding gives about a hundredth of the norm. Another formula gives a difference of most of the norm.
"""


@torch.no_grad()
def check_mixer(replaced: Replaced, spec: MemorySpec, config: Any) -> None:
    """Raise UnsupportedModelError unless a mix returns what the module's own `forward` returns for a new sequence.

    Args:
        spec: the spec of the whole model.
        config: the config of the language model.
    Cost: the module's forward runs over five tokens, twice. A memory of 64 MiB exists meanwhile.
    """
    module, n_model = replaced.module, _n_inputs(replaced.module, config)
    chosen = _chosen_before(replaced, spec)
    n_rows = _N_ROWS if chosen is None else min(_N_ROWS, chosen.n_chosen)
    x_TM = torch.randn(n_rows, n_model, generator=torch.Generator().manual_seed(1)).to(spec.device, spec.dtype)
    others = _others(replaced, spec, x_TM)
    theirs = module(x_TM[None], **others)
    ours = _run(replaced, x_TM, spec, others, chosen)
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


def _n_inputs(module: Module, config: Any) -> int:
    """Return the size of the rows that a module is given: those of all residual streams, or of one."""
    return int(config.hidden_size * getattr(module, "hc_count", 1))


def _others(replaced: Replaced, spec: MemorySpec, x_TM: Tensor) -> dict[str, Any]:
    """Return the other arguments that a module's `forward` needs. They keep the module from storing its states."""
    parameters = [*inspect.signature(replaced.module.forward).parameters.values()][1:]
    names = {p.name for p in parameters}
    needed = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    places = torch.arange(len(x_TM), device=x_TM.device)
    found: dict[str, Any] = dict.fromkeys(needed)
    for name in ("key_hidden_states", "value_hidden_states"):
        if name in needed:
            found[name] = x_TM[None]
    attentions = [one for one in spec.layers[replaced.layer] if isinstance(one, AttentionSpec)]
    if attentions and needed & {"attention_mask", "position_embeddings"}:
        found |= _for_attention(replaced.module, attentions[0], x_TM, names)
    if "position_ids" in needed or "relative_distance" in needed:
        found["position_ids"] = places[None]
    if "relative_distance" in needed:
        found["relative_distance"] = places[:, None] - places
    if "input_ids" in needed:
        found["input_ids"] = torch.zeros_like(places)[None]
    if "use_cache" in names:
        found["use_cache"] = False
    return found


def _for_attention(module: Module, spec: AttentionSpec, x_TM: Tensor, names: set[str]) -> dict[str, Any]:
    """Return those of these arguments that a module takes: a mask, angles, rows that an earlier layer has chosen."""
    n_rows, found = len(x_TM), dict[str, Any]()
    places = torch.arange(n_rows, device=x_TM.device)
    distance = places[:, None] - places
    is_seen = (distance >= 0) & (distance < (spec.window or n_rows))
    if "position_embeddings" in names:
        n_angles = len(spec.rotation.frequencies) if spec.rotation is not None else 0
        angles = torch.randn(1, n_rows, n_angles, generator=torch.Generator().manual_seed(2)).repeat(1, 1, 2)
        found["position_embeddings"] = tuple(each.to(x_TM) for each in (angles.cos(), angles.sin()))
        mask = x_TM.new_zeros(n_rows, n_rows).masked_fill(~is_seen, torch.finfo(x_TM.dtype).min)
        found["attention_mask"] = mask[None, None]
    elif "relative_distance" in names or "conv_mask" in names:
        mask = x_TM.new_zeros(n_rows, n_rows).masked_fill(~is_seen, torch.finfo(x_TM.dtype).min)
        found["attention_mask"] = mask[None, None]
    else:
        found["attention_mask"] = torch.ones_like(places, dtype=torch.bool)[None]  # There is no padding.
    if "prev_topk_indices" in names:
        found["prev_topk_indices"] = torch.where(distance >= 0, places, places[:, None])[None].to(torch.int32)
    return found


def _chosen_before(replaced: Replaced, spec: MemorySpec) -> ChosenRows | None:
    """Return all rows if the module reads rows that the index of an earlier layer has chosen; otherwise None."""
    own = spec.layers[replaced.layer]
    attention = next((one for one in own if isinstance(one, AttentionSpec) and one.n_chosen is not None), None)
    if attention is None or any(isinstance(one, IndexSpec) for one in own):
        return None
    assert attention.n_chosen is not None
    return ChosenRows(attention.n_chosen, None, attention.span_tokens)


class _Seen(Exception):  # noqa: N818
    """Is raised to leave a step that must not be committed."""


def _run(
    replaced: Replaced, x_TM: Tensor, spec: MemorySpec, others: dict[str, Any], chosen: ChosenRows | None
) -> Tensor | tuple[Tensor, ...]:
    """Run a mix on a memory of its layer alone, and abort the step, because other modules may serve the layer too."""
    layers = tuple(own if i == replaced.layer else () for i, own in enumerate(spec.layers))
    memory = HybridMemory(replace(spec, layers=layers), "64MiB", rollback_window=0)
    options = {name: _unbatched(others[name]) for name in replaced.options if name in others}
    found: Tensor | tuple[Tensor, ...] | None = None
    with suppress(_Seen), memory.step({memory.open(): [0] * len(x_TM)}) as step:
        step.notes[CHOSEN] = chosen
        found = replaced.mix(x_TM, step, **options)
        raise _Seen
    assert found is not None
    return found


def _unbatched(value: Any) -> Any:
    return tuple(part[0] for part in value) if isinstance(value, tuple) else value[0]
