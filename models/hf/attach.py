"""Implements `attach`: the layers of a transformers model, with its own classes and weights, use a `HybridMemory`.

While a model is attached, a forward call with a `HybridCache` is one step of the cache's memory. Attention passes its
queries, keys and values to the step through transformers' `AttentionInterface`. Recurrent modules are run by
`models.hf.mixers`, because only the memory can start a recurrence from a sequence's state and roll it back. All other
code that runs is transformers'.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache, GenerationMixin, PreTrainedModel

from hybridmem.memory import AttentionSpec, BatchError, MemorySpec, StepError
from hybridmem.memory.blocks import without_gradients
from hybridmem.memory.errors import HybridMemoryError
from hybridmem.models.hf.attention_config import ATTENTION, AttentionOf
from hybridmem.models.hf.cache import HybridCache
from hybridmem.models.hf.classes import ATTACHABLE, NOT_ATTACHED, RUN_WITHOUT_CACHE, TAKE_NO_OTHER_CACHE
from hybridmem.models.hf.latent import attend_latent, check_latent
from hybridmem.models.hf.mixers import Module
from hybridmem.models.hf.passes import CURRENT_PASS, Pass
from hybridmem.models.hf.probe import check_mixer
from hybridmem.models.hf.replacing import find_modules, refuse_options
from hybridmem.models.loading.load import check_is_of_transformers, check_source, find_adapter, spec_of_loaded
from hybridmem.models.weights.checkpoint import UnsupportedModelError


def attach(hf_model: PreTrainedModel) -> Attached:
    """Prepare a loaded transformers model for `HybridCache`, until `detach`.

    Use it as `attach(m)` or `with attach(m) as attached:`. It changes only this object. `forward` of the model and of
    its recurrent modules checks whether the call has a `HybridCache`, and runs the original if not. `generate` no
    longer refuses assisted generation, which a HybridCache supports. While a forward with a HybridCache runs,
    `config._attn_implementation` names another implementation.

    Large matrices are used in place. Small tensors of recurrences (taps, decays, norms) are copied now, so attach again
    if they change.

    Returns:
        An object with `.memory_spec`, which `HybridMemory` needs, and `.detach()`, which undoes all changes.
    Raises:
        UnsupportedModelError: the class is not in `ATTACHABLE` and descends from none of these; a recurrent module's
            outputs on a few random rows differ from ours; weights are quantized or on several devices; or the model is
            compiled.
        StepError: the model is attached already.
    Cost: only the small tensors are copied. Recurrent modules run over five tokens, twice.
    """
    return Attached(hf_model)


class Attached:
    """Holds a transformers model that is prepared for `HybridCache`.

    Attributes:
        memory_spec: the spec of the model's memory, on the model's device and in its dtype. It equals
            `from_transformers(hf_model).memory_spec`, so both models can use the same sequences.
    """

    def __init__(self, hf_model: PreTrainedModel) -> None:
        check_is_of_transformers(hf_model)
        name = type(hf_model).__name__
        architecture = next((base.__name__ for base in type(hf_model).__mro__ if base.__name__ in ATTACHABLE), None)
        if architecture is None:
            these = f"these are: {', '.join(ATTACHABLE)}"
            remedy = "give the model that was compiled, ._orig_mod" if name == "OptimizedModule" else these
            if find_adapter(hf_model) is not None:
                remedy = "of a model with an adapter give the one inside, .get_base_model()"
            known = next((base.__name__ for base in type(hf_model).__mro__ if base.__name__ in NOT_ATTACHED), None)
            why = "" if known is None else f", because {NOT_ATTACHED[known]}"
            raise UnsupportedModelError(f"{name} cannot be attached{why}; {remedy}")
        device = check_source(hf_model)
        if isinstance(vars(hf_model).get("forward"), _Forward):
            raise StepError(f"this {name} is attached already; detach it first")
        spec = spec_of_loaded(hf_model, architecture)
        self.memory_spec: MemorySpec = replace(spec, device=device, model=architecture)
        self._model = hf_model
        self._parameters = _signature_of(hf_model).parameters
        prepared = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
        # Transformers 5.24 renamed the parameter by which models take their cache.
        self._cache_name = "cache" if "cache" in prepared else "past_key_values"
        self._n_layers = hf_model.config.get_text_config().num_hidden_layers
        self._runs_alone = architecture in RUN_WITHOUT_CACHE
        if not self._runs_alone:
            check_latent(hf_model, self.memory_spec)
        replaced, self._numbered = find_modules(hf_model, spec, all_layers=self._runs_alone)
        for one in replaced:
            check_mixer(one, self.memory_spec, hf_model.config.get_text_config())
        self._attention = AttentionOf(hf_model.config)
        self._forwards = [_Forward(one.module, one.forward()) for one in replaced]
        self._forwards.append(_Forward(hf_model, self._run, self._cache_name, "position_ids"))
        self._prepare = hf_model.prepare_inputs_for_generation
        hf_model.prepare_inputs_for_generation = self._check_prompt
        # Assisted generation reads the cache from the model's outputs by the name of the cache's parameter. So it works
        # only with models that return the cache.
        gives_cache = self._runs_alone or self._cache_name in self._parameters
        self._lifts_guard = type(hf_model)._is_stateful and gives_cache
        if self._lifts_guard:
            hf_model._is_stateful = False
        AttentionInterface.register(ATTENTION, _attend)

    def detach(self) -> None:
        """Restore the model as it was before `attach`.

        Raises StepError if something else has replaced a `forward` since `attach`.
        """
        for forward in self._forwards:
            forward.check()
        for forward in self._forwards:
            forward.remove()
        for module in self._numbered:
            del module.layer_idx
        self._numbered = []
        if self._forwards:
            del self._model.prepare_inputs_for_generation
        self._forwards = []
        if self._lifts_guard:
            del self._model._is_stateful
            self._lifts_guard = False

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.detach()

    def _check_prompt(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Refuse a prompt that does not continue what a HybridCache remembers, before `generate` feeds a part of it."""
        caches = (kwargs.get(name) for name in (self._cache_name, "past_key_values"))
        cache = next((cache for cache in caches if isinstance(cache, HybridCache)), None)
        mask = kwargs.get("attention_mask")
        # Otherwise these tokens are a chunk of a prompt.
        is_whole = mask is None or mask.shape[1] == input_ids.shape[1]
        if cache is not None and is_whole and kwargs.get("is_first_iteration"):
            cache.check_prompt(input_ids)
        return self._prepare(input_ids, *args, **kwargs)

    # The methods below run a forward of the model.

    def _run(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        names = [name for name, p in self._parameters.items() if p.kind is not p.VAR_KEYWORD]
        given = dict(zip(names, args, strict=False)) | kwargs
        if self._cache_name == "cache":
            _rename_cache(given)
        self._attention.mend()
        cache = given.get(self._cache_name)
        try:
            self._check(given, cache) if isinstance(cache, HybridCache) else self._check_other(given)
        except HybridMemoryError:
            # Early-exit assisted generation changes this number for a while, and does not restore it after an error.
            self._model.config.get_text_config().num_hidden_layers = self._n_layers
            raise
        if not isinstance(cache, HybridCache):
            return original(**given)
        inputs = given["input_ids"], given.get("attention_mask"), given.pop("position_ids", None)
        spec = self.memory_spec
        with (
            without_gradients(),
            cache.open_pass(*inputs) as current,
            # Replaced modules call no attention of transformers. Other modules may, for rows that no memory holds.
            nullcontext() if self._runs_alone else self._attention.taken(),
            CURRENT_PASS.set_to(current),
        ):
            current.step.check_model(spec)
            if type(self._model).__name__ in TAKE_NO_OTHER_CACHE:
                given["use_cache"] = False  # Otherwise the model would refuse caches of other classes.
            if "position_ids" in self._parameters:
                given["position_ids"] = current.position_ids
            taken = self._cache_name
            if "cache_params" in self._parameters:
                taken = "cache_params"
                given[taken] = given.pop("past_key_values")
            if not self._runs_alone:
                return original(**given)
            # Replaced modules know the padding from the pass, and read no mask. Transformers would still enlarge one.
            others = {"use_cache": False, taken: None, "attention_mask": None}
            output = original(**given | {name: value for name, value in others.items() if name in self._parameters})
            if not isinstance(output, tuple):
                output[taken] = cache  # This is where `generate` looks for it.
            return output

    def _check_other(self, given: dict[str, Any]) -> None:
        """Raise, for a call without a HybridCache, what the model's own `forward` and `generate` would raise."""
        cache = given.get(self._cache_name)
        cache = given.get("cache_params") if cache is None else cache
        if isinstance(cache, HybridCache):
            # Under this name, `generate` would feed a cached prompt again.
            raise BatchError("give a HybridCache as past_key_values=, to Mamba models too, not as cache_params=")
        for name in (self._cache_name, "position_ids"):
            if name not in self._parameters and given.pop(name, None) is not None and name == self._cache_name:
                raise BatchError(f"{type(self._model).__name__} takes caches that are no HybridCache as cache_params=")
        if (
            self._lifts_guard
            and isinstance(cache, Cache)
            and any(getattr(layer, "record_past", False) for layer in cache.layers)
        ):
            raise StepError(
                f"assisted generation of {type(self._model).__name__} needs {self._cache_name}=HybridCache(...): "
                f"{type(cache).__name__} does not take recurrent states back. "
                "Detach a model that only assists another one"
            )

    def _check(self, given: dict[str, Any], cache: HybridCache) -> None:
        """Raise for options that a HybridCache cannot serve."""
        name = type(self._model).__name__
        if _is_compiled():
            raise StepError(
                f"a HybridCache inside torch.compile, which cannot follow a memory; call {name} as it was before"
            )
        if self._model.training:
            raise StepError(f"{name} is in training mode, and a HybridCache carries no gradients; call its .eval()")
        if given.get("output_attentions") or self._model.config.output_attentions:
            raise StepError("output_attentions=True; a memory's attention keeps no weights to show")
        if given.get("use_cache") is False:
            raise BatchError("use_cache=False with a HybridCache; leave out one of them")
        for what in ("pixel_values", "pixel_values_videos", "state"):
            if given.get(what) is not None:
                raise BatchError(f"{what}= with a HybridCache, which remembers tokens alone; leave it out")
        if given.get("inputs_embeds") is not None or not isinstance(given.get("input_ids"), Tensor):
            raise BatchError("a HybridCache remembers tokens; give input_ids (rows, tokens), not inputs_embeds")
        most = getattr(self._model.config, "max_inference_chunksize", given["input_ids"].shape[1])
        if given["input_ids"].shape[1] > most:
            raise BatchError(
                f"{given['input_ids'].shape[1]} tokens at once, which {name} cuts into parts of "
                f"max_inference_chunksize={most} by itself; feed as many at most (generate takes prefill_chunk_size)"
            )
        other = given.get("cache_params")
        if (
            other is not None
            and other is not cache
            and any(any(layer.has_previous_state.values()) for layer in other.layers)
        ):
            raise BatchError(
                "two caches that both remember something, past_key_values= and cache_params=; give the first"
            )


def _rename_cache(given: dict[str, Any]) -> None:
    """Let the names for caches from before transformers 5.24 mean `cache`. Raises BatchError if two are given."""
    for name in ("past_key_values", "cache_params"):
        if (cache := given.pop(name, None)) is not None:
            if given.get("cache", cache) is not cache and given["cache"] is not None:
                raise BatchError(f"two caches, {name}= and another one; give one, as cache=")
            given["cache"] = cache


class _Forward:
    """Replaces a module's `forward` by `run(original, *args, **kwargs)`.

    Args:
        extra: parameters that its signature has in addition to the original's. `generate` inspects the signature.
    """

    def __init__(self, module: Module, run: Callable[..., Any], *extra: str) -> None:
        self._module, self._run, self._original = module, run, module.forward
        self._before = vars(module).get("forward")
        signature = _signature_of(module)
        missing = [name for name in extra if name not in signature.parameters]
        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in missing]
        ordered = sorted([*signature.parameters.values(), *added], key=lambda parameter: parameter.kind)
        self.__signature__ = signature.replace(parameters=ordered)
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self._original, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise StepError(
            f"a copy of an attached {type(self._module).__name__} would run the original; detach it, copy, attach both"
        )

    def check(self) -> None:
        if vars(self._module).get("forward") is not self:
            raise StepError(f"forward of {type(self._module).__name__} was replaced after attach; undo that first")

    def remove(self) -> None:
        if self._before is None:
            del self._module.forward
        else:
            self._module.forward = self._before


def _is_compiled() -> bool:
    """True if torch.compile traces this call, or runs it uncompiled after a graph break.

    The second case can be detected only by a private name of torch.
    """
    if torch.compiler.is_compiling():
        return True
    return "torch._dynamo" in sys.modules and callable(torch._C._dynamo.eval_frame.get_eval_frame_callback())


def _signature_of(module: Module) -> inspect.Signature:
    """Return the signature of the class's `forward`. The object's own may be a wrapper without parameter names."""
    signature = inspect.signature(type(module).forward)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _attend(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers calls it: (B, H, T, D) queries, keys, values of new tokens -> (B, T, H, D)."""
    current = CURRENT_PASS.get()
    if current is None:
        raise StepError(
            f"{type(module).__name__} ran without a HybridCache while another thread ran the model with one; "
            "use one thread"
        )
    layer = current.attending
    spec = _check_attention(module, layer, current, kwargs)
    if spec.value_dim is not None:
        return current.unpack(attend_latent(module, spec, current, query, scaling)), None
    q, k, v = (current.pack(t.transpose(1, 2)) for t in (query, key, value))
    sinks = None if (own := kwargs.get("s_aux")) is None else own.float()
    y_THD = current.step.attend(layer, q, k, v, scale=scaling, softcap=kwargs.get("softcap"), sinks=sinks)
    return current.unpack(y_THD), None


def _check_attention(module: Module, layer: int, current: Pass, options: dict[str, Any]) -> AttentionSpec:
    """Return the layer's spec.

    Raises StepError for attention options that the memory does not have, and would ignore.
    """
    (spec,) = (spec for spec in current.memory.spec.layers[layer] if isinstance(spec, AttentionSpec))
    what = f"{type(module).__name__} of layer {layer}"
    if (window := options.get("sliding_window")) != spec.window:
        raise StepError(f"{what} attends to {window} tokens, its memory holds {spec.window}")
    honoured = {"sliding_window"}
    if spec.value_dim is None:
        honoured |= {"softcap"}
        honoured |= {"s_aux"} if options.get("s_aux") is getattr(module, "sinks", None) else set()
    refuse_options(what, {name: value for name, value in options.items() if name not in honoured})
    return spec
