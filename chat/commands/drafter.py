"""Loads a draft model, and makes the drafter of an engine from it."""

from __future__ import annotations

from typing import Any

from hybridmem.chat.commands.start import Unread, load
from hybridmem.chat.engine.draft_models import ModelDrafter, check_same_tokens
from hybridmem.chat.prompts import Tokenizer
from hybridmem.defaults import ROLLBACK_WINDOW
from hybridmem.memory import HybridMemory, MemorySpec, SpecError
from hybridmem.memory.blocks import read_budget
from hybridmem.memory.capacity import plan_sequence
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import LanguageModel

_COMPARED_TOKENS = 1024
"""Both memories hold equally many sequences of this length."""


def make_drafter(
    name: str, model: LanguageModel, tokenizer: Tokenizer, memory: dict[str, Any], *, weights: str, has_cache: bool
) -> tuple[ModelDrafter, dict[str, Any]]:
    """Load a draft model, and return its drafter and the options of the model's memory beside it.

    The budget is for both memories. It is divided so that both hold equally many sequences.

    Args:
        name: a folder, a GGUF file, or a hub id.
        tokenizer: the model's. The draft model must have the same.
        memory: the options of the model's memory, such as `budget`.
        has_cache: whether the draft model keeps prefixes, as the model does.
    Raises:
        SpecError: there is no rollback window, or the draft model has another tokenizer, which is noticed before its
            weights are read.
        UnsupportedModelError, FormatError: the draft model cannot be loaded.
    """
    window = memory.get("rollback_window", ROLLBACK_WINDOW)
    if not window:
        raise SpecError("--draft-model needs --rollback-window 8 or more, because wrong drafts are rolled back")

    def check(unread: Unread) -> None:
        check_same_tokens(tokenizer, unread.tokenizer, unread.spec.model)

    drafting, own_tokenizer = load(name, str(model.memory_spec.device), "auto", weights, check)
    whole = read_budget(memory["budget"])
    share = draft_share(model.memory_spec, drafting.memory_spec, window)
    own = HybridMemory(drafting.memory_spec, int(whole * share), rollback_window=window)
    prefixes = PrefixCache(own) if has_cache else None
    return ModelDrafter(drafting, own, own_tokenizer, prefixes=prefixes), memory | {"budget": whole - own.budget_bytes}


def draft_share(model: MemorySpec, drafting: MemorySpec, rollback_window: int) -> float:
    """Return the share of a budget that the draft model's memory gets."""
    sizes = [plan_sequence(s, _COMPARED_TOKENS, rollback_window=rollback_window) for s in (model, drafting)]
    return sizes[1].most_bytes / (sizes[0].most_bytes + sizes[1].most_bytes)
