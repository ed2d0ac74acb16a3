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
from dataclasses import replace
from threading import Lock
from types import TracebackType
from typing import Any, NoReturn
from weakref import ref

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, Cache, PreTrainedConfig, PreTrainedModel

from hybridmem.memory import AttentionSpec, BatchError, MemorySpec, RecurrentSpec, StepError
from hybridmem.memory.blocks import ExitOnStack, has_ended, without_gradients
from hybridmem.memory.errors import HybridMemoryError
from hybridmem.models.hf.cache import HybridCache
from hybridmem.models.hf.latent import attend_latent, check_latent
from hybridmem.models.hf.mixers import MIXERS, WITH_SECOND_OUTPUT, Mix, MixMany, Module
from hybridmem.models.hf.passes import CURRENT_PASS, Pass
from hybridmem.models.hf.probe import check_mixer
from hybridmem.models.loading.load import check_is_of_transformers, check_source, find_adapter, spec_of_loaded
from hybridmem.models.weights.checkpoint import UnsupportedModelError

ATTACHABLE = (
    "BailingHybridForCausalLM",
    "BambaForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "FalconH1ForCausalLM",
    "FalconMambaForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM",
    "KimiLinearForCausalLM",
    "LaraMiniForCausalLM",
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Lfm3ForCausalLM",
    "LlamaForCausalLM",
    "Mamba2ForCausalLM",
    "MambaForCausalLM",
    "MiniMaxForCausalLM",
    "MistralForCausalLM",
    "NemotronHForCausalLM",
    "OlmoHybridForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "RecurrentGemmaForCausalLM",
    "Zamba2ForCausalLM",
    "ZambaForCausalLM",
    "ZayaForCausalLM",
    "xLSTMForCausalLM",
)
"""Classes of transformers models that `attach` accepts."""

_INDEXED = "its attention asks the cache for the index's keys of all tokens, where the memory keeps one for each span"
_CHOOSES = "its attention asks the cache for the index's keys of all tokens, where the memory chooses the rows itself"
_BIASED = "its attention computes a bias for each token of the cache, where the memory adds one for each distance"

NOT_ATTACHED = {
    "DeepseekV32ForCausalLM": _CHOOSES,
    "Glm5NextForConditionalGeneration": _INDEXED,
    "GlmMoeDsaForCausalLM": _CHOOSES,
    "Qwen4ExpForCausalLM": _INDEXED,
    "Inkling2ForCausalLM": _BIASED,
    "Inkling2LoopForCausalLM": _BIASED,
    "InklingForCausalLM": _BIASED,
    "RwkvForCausalLM": "its forward takes and returns a list of tensors, `state`, and no cache",
}
"""Classes that `load_model` loads and `attach` refuses, and why."""

_TAKE_NO_OTHER_CACHE = ("MiniMaxForCausalLM",)
"""Classes that refuse a cache of another class. If they are told to use none, they pass the cache on all the same."""

_HAVE_OWN_CACHE = ("xLSTMForCausalLM",)
"""Classes that read the states of their own class of cache, and so run without one; outputs name the given cache."""

_ATTENTION = "hybrid_memory"
"""Name under which transformers' `AttentionInterface` finds `_attend`."""


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
        self._cache_name = "cache" if "cache" in self._parameters else "past_key_values"  # the first since 5.24
        check_latent(hf_model, self.memory_spec)
        recurrent = [module for module in hf_model.modules() if _known(module) is not None]
        layers = [i for i, own in enumerate(spec.layers) if any(isinstance(one, RecurrentSpec) for one in own)]
        n_recurrences = len(layers)
        self._numbered = [module for module in recurrent if not hasattr(module, "layer_idx")]
        for module, layer in zip(self._numbered, layers, strict=False):
            module.layer_idx = layer  # of xLSTM, whose modules do not know their layer
        mixes = [(module, make(module)) for module in recurrent if (make := _known(module)) is not None]
        if len(mixes) != n_recurrences:
            raise UnsupportedModelError(
                f"{n_recurrences} recurrent layers of {architecture}, of which {len(mixes)} have a module that is "
                f"known; this is transformers {transformers.__version__}, attach is tested with 5.23 and 5.24"
            )
        for module, mix in mixes:
            check_mixer(module, mix, self.memory_spec, hf_model.config.get_text_config().hidden_size)
        self._attention = _AttentionOf(hf_model.config)
        self._forwards = [_Forward(module, _mixer_of(module, mix)) for module, mix in mixes]
        self._forwards.append(_Forward(hf_model, self._run, self._cache_name, "position_ids"))
        self._prepare = hf_model.prepare_inputs_for_generation
        hf_model.prepare_inputs_for_generation = self._check_prompt
        # Assisted generation reads the cache from the model's outputs by the name of the cache's parameter. So it works
        # only with models that return the cache.
        self._lifts_guard = type(hf_model)._is_stateful and self._cache_name in self._parameters
        if self._lifts_guard:
            hf_model._is_stateful = False
        AttentionInterface.register(_ATTENTION, _attend)

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

    # A forward of the model

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
            self._model.config.num_hidden_layers = len(self.memory_spec.layers)
            raise
        if not isinstance(cache, HybridCache):
            return original(**given)
        inputs = given["input_ids"], given.get("attention_mask"), given.pop("position_ids", None)
        spec = self.memory_spec
        with (
            without_gradients(),
            cache.open_pass(*inputs) as current,
            self._attention.taken(),
            CURRENT_PASS.set_to(current),
        ):
            current.step.check_model(spec)
            if type(self._model).__name__ in _TAKE_NO_OTHER_CACHE:
                given["use_cache"] = False  # Otherwise the model would refuse caches of other classes.
            if "position_ids" in self._parameters:
                given["position_ids"] = current.position_ids
            taken = self._cache_name
            if "cache_params" in self._parameters:
                taken = "cache_params"
                given[taken] = given.pop("past_key_values")
            if type(self._model).__name__ not in _HAVE_OWN_CACHE:
                return original(**given)
            output = original(**given | {taken: None, "use_cache": False})
            if not isinstance(output, tuple):
                output[taken] = cache  # where `generate` looks for it
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


def _known(module: Module) -> Callable[[Module], Mix | MixMany] | None:
    """Return the function that makes a `Mix` of a recurrent module or of a subclass; None for any other module."""
    return next((MIXERS[base.__name__] for base in type(module).__mro__ if base.__name__ in MIXERS), None)


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


def _mixer_of(module: Module, mix: Mix | MixMany) -> Callable[..., Any]:
    has_second = any(base.__name__ in WITH_SECOND_OUTPUT for base in type(module).__mro__)

    def run(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current = CURRENT_PASS.get()
        if current is None:
            return original(*args, **kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        mixed = mix(current.pack(hidden), current.step)
        if isinstance(mixed, tuple):
            return tuple(map(current.unpack, mixed))
        output = current.unpack(mixed)
        return (output, None) if has_second else output

    return run


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
    return current.unpack(current.step.attend(layer, q, k, v, scale=scaling)), None


def _check_attention(module: Module, layer: int, current: Pass, options: dict[str, Any]) -> AttentionSpec:
    """Return the layer's spec.

    Raises StepError for attention options that the memory does not have, and would ignore.
    """
    (spec,) = (spec for spec in current.memory.spec.layers[layer] if isinstance(spec, AttentionSpec))
    what = f"{type(module).__name__} of layer {layer}"
    if (window := options.get("sliding_window")) != spec.window:
        raise StepError(f"{what} attends to {window} tokens, its memory holds {spec.window}")
    for name in ("softcap", "s_aux"):
        if options.get(name) is not None:
            raise StepError(f"{what} wants {name}={options[name]!r}, which attach does not implement")
    return spec


class _AttentionOf:
    """Makes modules with this config call `_attend`, without masks, while blocks run: `with attention.taken(): ...`.

    Several threads may be inside of such blocks at the same time.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self._config, self._lock = config, Lock()
        self._blocks: list[ref[Any] | None] = []
        self._before = config._attn_implementation

    def taken(self) -> _Taken:
        return _Taken(self)

    def mend(self, left: ref[Any] | None = None) -> None:
        """Restore the config if no block runs except the one that is being left.

        An exception may have kept the end of the last block from doing so.
        """
        with self._lock:
            self._blocks = [b for b in self._blocks if b is not left and not has_ended(b)]
            if not self._blocks and self._config._attn_implementation == _ATTENTION:
                self._config._attn_implementation = self._before

    def enter(self, block: ref[Any] | None) -> None:
        with self._lock:
            if self._config._attn_implementation != _ATTENTION:
                self._before = self._config._attn_implementation
            self._blocks.append(block)
            self._config._attn_implementation = _ATTENTION


class _Taken:
    """Is the context manager that `_AttentionOf.taken` returns."""

    def __init__(self, attention: _AttentionOf) -> None:
        self._attention = attention
        self._block: ref[Any] | None = None

    def __enter__(self) -> None:
        self._attention.enter(self._block)

    __exit__ = ExitOnStack()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._attention.mend(left=self._block)
