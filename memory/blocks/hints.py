"""Tells users of another library how a call or an attribute is named here.

A method that is often called with other names takes all other arguments as `*excess: Never, **unknown: Never`. A type
checker then refuses them as usual. Without a type checker, the call raises the error of `refuse_arguments`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn

_TAKE_BACK = "memory.rollback(sequence, n_tokens=2) takes the newest 2 tokens back, and to=2 keeps the first 2"
_MAKE_CACHE = (
    "to generate with a model of transformers, attach(hf_model) and give cache=HybridCache(memory, "
    "[memory.open()]), both from models"
)
_AT = "fork it first, and then memory.rollback(fork, to=position)"
_REQUESTS = "give the tokens of each sequence together: {sequence: token_ids}"
_WINDOW = "the option is rollback_window, in tokens"
_NO_LIMIT = "a sequence may grow until the budget in bytes is full, memory.needed_bytes(n_tokens) says what it takes"
_DTYPE = "the option is dtype"
_DEVICE = "a model is on one device: device='cpu' or device='cuda'"

ARGUMENTS: dict[str, dict[str, str]] = {
    "HybridMemory": {
        "window": _WINDOW, "max_rollback": _WINDOW, "page_size": "the option is page_tokens",
        "block_size": "the option is page_tokens", "max_length": _NO_LIMIT, "max_seq_len": _NO_LIMIT,
        "max_cache_len": _NO_LIMIT, "max_batch_size": "open as many sequences as the budget in bytes holds",
        "batch_size": "open as many sequences as the budget in bytes holds", "torch_dtype": _DTYPE,
        "memory": "the option is budget", "size": "the option is budget", "config": "give model.memory_spec",
    },
    "memory.open": {
        "": "open() makes an empty sequence; feed it with memory.run(model, {sequence: token_ids})",
        "tokens": "feed an open sequence with memory.run(model, {sequence: token_ids})",
        "prompt": "feed an open sequence with memory.run(model, {sequence: token_ids})",
    },
    "memory.close": {"": "memory.close(sequence) forgets one sequence; memory.close_all() closes the whole memory"},
    "memory.fork": dict.fromkeys(("", "at", "to", "position", "length"), _AT) | {"n": "call it once for each fork"},
    "memory.checkpoint": dict.fromkeys(("", "at", "to", "position", "length"), _AT),
    "memory.rollback": dict.fromkeys(("", "n", "tokens", "num_tokens", "k", "steps", "by", "position"), _TAKE_BACK),
    "memory.run": {
        "": f"{_REQUESTS}, as in memory.run(model, {{sequence: token_ids}})", "tokens": _REQUESTS,
        "input_ids": _REQUESTS, "sequence": _REQUESTS,
        "max_new_tokens": "it reads tokens and draws none; hybridmem.chat.engine.Engine writes replies",
    },
    "memory.step": {"": _REQUESTS, "input_ids": _REQUESTS},
    "load_model": {
        "torch_dtype": _DTYPE, "device_map": _DEVICE, "load_in_8bit": "the option is weights='int8'",
        "load_in_4bit": "the option is weights='int4'", "quantization_config": "the option is weights='int8' or 'int4'",
        "trust_remote_code": "code of a checkpoint is never run", "attn_implementation": "model kernels are its own",
    },
}  # fmt: skip
"""Maps a call and an argument to the advice what to do instead.

The argument "" stands for positional arguments: too many, or missing ones.
"""

_OF_MEMORY = {
    name: f"memory.{name}(sequence{more})"
    for name, more in {
        "rollback": ", n_tokens=2", "fork": "", "checkpoint": "", "close": "", "drop": ", start, end", "save": ", path",
        "swap_out": "", "swap_in": "", "to_host": "", "can_rollback": ", to=2", "resume_point": ", to=2",
    }.items()
}  # fmt: skip
_FEED = "memory.run(model, {sequence: token_ids})"
_NO_MODULE = "load_model(path, device=..., dtype=...): a model here only computes, and is no torch module with modes"
_STEP = "logits = memory.run(model, {sequence: token_ids}), or hybridmem.chat.engine.Engine for whole replies"

ATTRIBUTES: dict[str, dict[str, str]] = {
    "Sequence": _OF_MEMORY | {
        "run": _FEED, "append": _FEED, "extend": _FEED, "step": "memory.step({sequence: token_ids})",
        "crop": _OF_MEMORY["rollback"], "truncate": _OF_MEMORY["rollback"], "token_ids": "sequence.tokens",
        "ids": "sequence.tokens", "seq_len": "sequence.length", "size": "sequence.length",
        "is_closed": "sequence.closed", "memory": "the memory that made it, which it does not keep alive",
    },
    "HybridMemory": dict.fromkeys(
        ("get_seq_length", "is_compileable", "is_initialized", "update", "key_cache", "layers", "to_legacy_cache",
         "reorder_cache", "get_max_cache_shape", "get_max_length", "get_mask_sizes", "is_sliding", "batch_size"),
        _MAKE_CACHE,
    ) | {
        "crop": _OF_MEMORY["rollback"], "truncate": _OF_MEMORY["rollback"], "generate": _STEP, "forward": _STEP,
        "reset": "memory.rollback(sequence, to=0) empties one sequence; memory.close_all() closes the whole memory",
        "clear": "memory.rollback(sequence, to=0) empties one sequence; memory.close_all() closes the whole memory",
        "to": "HybridMemory(spec, device=...), at the start", "cuda": "HybridMemory(spec, device='cuda'), at the start",
        "delete": "memory.close(sequence)", "new": "memory.open()", "add": "memory.open()",
    },
    "Decoder": dict.fromkeys(
        ("eval", "train", "to", "cuda", "cpu", "half", "float", "bfloat16", "parameters", "state_dict", "compile",
         "device", "dtype", "forward"),
        _NO_MODULE,
    ) | {"generate": _STEP},
}  # fmt: skip
"""Maps a class and an attribute that it does not have to the advice what to use instead."""


def refuse_arguments(call: str, positional: Iterable[object], named: Mapping[str, object]) -> NoReturn:
    """Raise TypeError for arguments that a call does not have, with advice if another library has them."""
    known = ARGUMENTS[call]
    excess = [f"{value!r:.60}" for value in positional]
    what = ", ".join(excess + [f"{name}={value!r:.60}" for name, value in named.items()])
    found = ([] if named and not excess else [known.get("", "")]) + [known.get(name, "") for name in named]
    hint = "; ".join(dict.fromkeys(hint for hint in found if hint))
    raise TypeError(f"{call}() {f'does not take {what}' if what else 'needs a sequence'}{hint and f'; {hint}'}")


def refuse_attribute(owner: object, kind: str, name: str) -> NoReturn:
    """Raise AttributeError, with advice if another library has this name."""
    hint = ATTRIBUTES[kind].get(name)
    what = f"{type(owner).__name__!r} object has no attribute {name!r}"
    raise AttributeError(f"{what}; instead: {hint}" if hint else what, name=name, obj=owner)


def is_of_transformers(model: object) -> bool:
    """True for a model of transformers. The check does not import transformers."""
    return any(
        base.__name__ == "PreTrainedModel" and base.__module__.partition(".")[0] == "transformers"
        for base in type(model).__mro__
    )


OF_TRANSFORMERS = (
    "a model of transformers, which has caches of its own. Make one of this library with from_transformers(hf_model), "
    "which has .memory_spec; or keep it: attach(hf_model), and generate with "
    "cache=HybridCache(memory, [memory.open()]). All three are in models"
)
"""The message of the error if a caller passes such a model where a model or a spec of this library is needed."""
