"""Finds the modules of a transformers model that run on a memory, and what their `forward` does instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hybridmem.memory import MemorySpec, RecurrentSpec, StepError
from hybridmem.models.hf.attentions import ATTENTIONS, memory_layer
from hybridmem.models.hf.mixers import MIXERS, Mix, MixMany, Module
from hybridmem.models.hf.passes import CURRENT_PASS, Pass
from hybridmem.models.weights.checkpoint import UnsupportedModelError

_N_FURTHER_OUTPUTS = {
    "DeepseekV32Attention": 1,
    "Glm5NextTextAttention": 2,
    "GlmMoeDsaAttention": 2,
    "Inkling2FullAttention": 1,
    "Inkling2LoopFullAttention": 1,
    "Inkling2LoopSlidingAttention": 1,
    "Inkling2SlidingAttention": 1,
    "InklingAttention": 1,
    "MiniMaxLightningAttention": 1,
    "Qwen4ExpTextAttention": 1,
    "RecurrentGemmaRecurrentBlock": 1,
    "RwkvFeedForward": 1,
    "RwkvSelfAttention": 1,
    "xLSTMLayer": 1,
}
"""Maps classes of modules to the number of values that they return beside their outputs: None serves their layers."""

_KNOWN_ELSEWHERE = {
    "cache", "cache_params", "cache_position", "dropout", "input_ids", "output_attentions", "output_hidden_states",
    "output_router_logits", "past_key_values", "position_embeddings", "position_ids", "return_dict", "use_cache",
}  # fmt: skip
"""Options that transformers gives all modules of a model, and that change no output, or that the pass knows better."""


@dataclass(frozen=True)
class Replaced:
    """Holds a module of transformers and the mix that runs in its place.

    Attributes:
        layer: index in the memory's spec, of the first time that the module runs.
    """

    module: Module
    mix: Mix | MixMany
    layer: int

    @property
    def options(self) -> list[str]:
        """Return the names of further arguments of the module's call that the mix is given."""
        parameters = inspect.signature(self.mix).parameters.values()
        return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

    def forward(self) -> Callable[..., Any]:
        """Return `run(original, *args, **kwargs)`, which runs the mix if a pass is open, and the original if not."""
        n_further = next((_N_FURTHER_OUTPUTS[n] for n in _names_of(self.module) if n in _N_FURTHER_OUTPUTS), 0)
        options, what = self.options, f"{type(self.module).__name__} of layer {self.module.layer_idx}"
        parameters = [*inspect.signature(type(self.module).forward).parameters.values()][1:]
        names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]

        def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            current = CURRENT_PASS.get()
            if current is None:
                return original(*args, **kwargs)
            given = dict(zip(names, args, strict=False)) | kwargs
            refuse_options(what, {name: value for name, value in given.items() if name not in (*names, *options)})
            packed = {name: _pack(given[name], current) for name in options if name in given}
            # Modules call their input by different names, but it always comes first.
            hidden = args[0] if args else given[names[0]]
            mixed = self.mix(current.pack(hidden), current.step, **packed)
            if isinstance(mixed, tuple):
                return tuple(map(current.unpack, mixed))
            output = current.unpack(mixed)
            return (output, *(None,) * n_further) if n_further else output

        return run


def refuse_options(what: str, options: Mapping[str, Any]) -> None:
    """Raise StepError for an option of a module's call that has a value and would be ignored."""
    for name, value in options.items():
        if value is not None and value is not False and name not in _KNOWN_ELSEWHERE:
            shown = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise StepError(f"{what} wants {name}={shown}, which attach does not implement; leave it out")


def find_modules(
    hf_model: PreTrainedModel, spec: MemorySpec, *, all_layers: bool
) -> tuple[list[Replaced], list[Module]]:
    """Return the modules to replace, and those of them that were given a `layer_idx` because they have none.

    Args:
        all_layers: whether each layer must have such a module, not only those with recurrences.
    Raises:
        UnsupportedModelError: a layer has no module that is known.
    """
    config = hf_model.config.get_text_config()
    has_loop = hasattr(config, "loop_num_passes")
    # Where layers run several times, the first time stands for all of them.
    in_order = [memory_layer(config, i) for i in range(len(config.layer_types) if has_loop else len(spec.layers))]
    wanted = [i for i in in_order if any(all_layers or isinstance(one, RecurrentSpec) for one in spec.layers[i])]
    modules = list(_outermost(hf_model, config))
    numbered = [module for module in modules if not hasattr(module, "layer_idx")]
    for i, module in enumerate(numbered):
        module.layer_idx = getattr(module, "layer_id", wanted[i] if i < len(wanted) else None)
    found = {module.layer_idx for module in modules}
    if {memory_layer(config, i) for i in found} != {*wanted}:
        raise UnsupportedModelError(
            f"{len(wanted)} {'' if all_layers else 'recurrent '}layers of {type(hf_model).__name__}, of which "
            f"{len(found)} have a module that is known; this is transformers {transformers.__version__}, attach is "
            "tested with 5.23 and 5.24"
        )
    replaced = list[Replaced]()
    for module in modules:
        make = _maker_of(module, config)
        assert make is not None
        replaced.append(Replaced(module, make(), memory_layer(config, module.layer_idx)))
    return replaced, numbered


def _outermost(module: Module, config: Any) -> Iterator[Module]:
    """Yield the known modules below one, except those that are inside of another."""
    for child in module.children():
        if _maker_of(child, config) is None:
            yield from _outermost(child, config)
        else:
            yield child


def _maker_of(module: Module, config: Any) -> Callable[[], Mix | MixMany] | None:
    """Return the function that makes a module's mix, found by its class or a base class; None if none is known."""
    for name in _names_of(module):
        if name in MIXERS:
            return partial(MIXERS[name], module)
        if name in ATTENTIONS:
            return partial(ATTENTIONS[name], module, config)
    return None


def _names_of(module: Module) -> list[str]:
    return [base.__name__ for base in type(module).__mro__]


def _pack(value: Any, current: Pass) -> Any:
    """Return an argument of a module's call, (B, T, ...), packed: a tensor, a tuple of tensors, or another value."""
    if isinstance(value, tuple):
        return tuple(_pack(part, current) for part in value)
    if not isinstance(value, Tensor):
        return value
    return current.pack(value.expand(current.shape[0], *value.shape[1:]))
