"""Checks the parts that an engine is built from: model, memory, tokenizer, stop ids.

The error messages show how the call should look.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hybridmem.memory import BatchError, HybridMemory, SpecError
from hybridmem.memory.blocks import is_integer
from hybridmem.memory.hybrid import require_memory
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.sequences import why_no_ids
from hybridmem.models import LanguageModel

HOW_TO_LOAD = "with a model from load_model(...) and memory = HybridMemory(model.memory_spec, budget)"


def check_parts(model: object, memory: object, call: str) -> None:
    """Raise SpecError unless `model` is a model and `memory` is a memory.

    The message shows `call`, the right call.
    """
    if isinstance(model, HybridMemory | str | Path) or not callable(model):
        raise SpecError(f"{model!r:.80} is no model; call {call}, {HOW_TO_LOAD}")
    require_memory(memory, call)


def check_belonging(model: LanguageModel, memory: HybridMemory, prefixes: PrefixCache | None) -> None:
    """Raise SpecError unless model, memory and prefix cache belong together.

    Otherwise every request would fail later.
    """
    spec, own = model.memory_spec, memory.spec
    if not own.same_memories(spec):
        raise SpecError(
            f"this memory was made for {own.model}, not for {spec.model}; make it with HybridMemory(model.memory_spec)"
        )
    if own.device.type != "meta" and (own.dtype, own.device.type) != (spec.dtype, spec.device.type):
        raise SpecError(
            f"this memory holds {own.dtype} on {own.device.type}, {spec.model} runs in {spec.dtype} on "
            f"{spec.device.type}; make it with HybridMemory(model.memory_spec), without device= and dtype=, or load "
            "the model so"
        )
    if not isinstance(prefixes, PrefixCache | None):
        raise SpecError(f"prefixes={prefixes!r}; give PrefixCache(memory) of memory.prefix, or None for no cache")
    if prefixes is not None and prefixes.memory is not memory:
        raise SpecError(
            "prefixes= is the cache of another memory; give PrefixCache(memory) with the memory that the engine has"
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raise SpecError unless the tokenizer is None or can decode token ids."""
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise SpecError(
            f"tokenizer={tokenizer!r} is none; give chat.prompts.load_tokenizer(folder), with the model's folder, or "
            "None for no text"
        )


def check_can_decode(memory: HybridMemory, tokenizer: object, sequence: object, stop: tuple[str, ...]) -> None:
    """Raise BatchError if a request needs a tokenizer or a sequence with an encoder's output, and has none."""
    if stop and tokenizer is None:
        raise BatchError(f"stop={stop!r}, but this engine has no tokenizer to find text with; give it one, or stop_ids")
    if sequence is None and memory.spec.of_kind("cross-attention"):
        raise BatchError(f"{memory.spec.model} decodes what its encoder said; give sequence=memory.open(encoder=...)")


def read_stop_ids(stop_ids: Any, vocab_size: int | None = None) -> tuple[int, ...]:
    """Return the ids of tokens that end a reply. Raises BatchError.

    `vocab_size` is None if it is not known yet.
    """
    if isinstance(stop_ids, int | np.integer):
        raise BatchError(f"stop_ids={stop_ids!r}; give several token ids, such as [{int(stop_ids)}]")
    if isinstance(stop_ids, str | bytes) or not isinstance(stop_ids, Iterable):
        raise BatchError(f"stop_ids={stop_ids!r}; give token ids, such as [tokenizer.eos_token_id]")
    ids = tuple(stop_ids)
    for token in ids:
        if not is_integer(token):
            raise BatchError(f"stop_ids hold {token!r}; give token ids, such as [tokenizer.eos_token_id]")
        if vocab_size is not None and not 0 <= token < vocab_size:
            raise BatchError(f"stop_ids hold {token}: {why_no_ids(int(token), vocab_size)}")
    return tuple(map(int, ids))
