"""Loads a draft model, and makes the drafter of an engine from it. It divides budgets between both memories."""

from __future__ import annotations

from dataclasses import dataclass
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

_DIVIDED, _ALIGNED = ("budget", "host_budget", "disk_budget"), 64
"""Options of a memory that are divided, into multiples of so many bytes, as budgets are."""
_COMPARED_TOKENS = 1024
"""Both memories hold equally many sequences of this length."""


@dataclass(frozen=True)
class Budgets:
    """Holds the options of a memory, and how many bytes its prefix cache may take outside of its budget."""

    memory: dict[str, Any]
    prefix_bytes: int = 0

    @staticmethod
    def of(memory: dict[str, Any], prefix_bytes: str) -> Budgets:
        return Budgets(memory, 0 if prefix_bytes == "0" else read_budget(prefix_bytes, "--prefix-bytes"))

    @property
    def rollback_window(self) -> int:
        return int(self.memory.get("rollback_window", ROLLBACK_WINDOW))

    def divide(self, model: MemorySpec, drafting: MemorySpec) -> tuple[Budgets, Budgets]:
        """Return the budgets of a drafter's memory and of the model's, so that both hold equally many sequences."""
        share = draft_share(model, drafting, self.rollback_window)
        whole = {name: read_budget(self.memory[name], name) for name in _DIVIDED if self.memory.get(name)}
        own = {name: int(n_bytes * share) // _ALIGNED * _ALIGNED for name, n_bytes in whole.items()}
        left = {name: n_bytes - own[name] for name, n_bytes in whole.items()}
        also = {name: self.memory[name] for name in ("rollback_window", "swap_dir") if name in self.memory}
        n_own = int(self.prefix_bytes * share)
        return Budgets(also | own, n_own), Budgets(self.memory | left, self.prefix_bytes - n_own)


def make_drafter(
    name: str, model: LanguageModel, tokenizer: Tokenizer, budgets: Budgets, *, weights: str, has_cache: bool
) -> tuple[ModelDrafter, Budgets]:
    """Load a draft model, and return its drafter and what is left for the model's memory beside it.

    Args:
        name: a folder, a GGUF file, or a hub id.
        tokenizer: the model's. The draft model must have the same.
        budgets: the budgets of both memories.
        has_cache: whether the draft model keeps prefixes, as the model does.
    Raises:
        SpecError: there is no rollback window, or the draft model has another tokenizer, which is noticed before its
            weights are read.
        UnsupportedModelError, FormatError: the draft model cannot be loaded.
    """
    if not budgets.rollback_window:
        raise SpecError("--draft-model needs --rollback-window 8 or more, because wrong drafts are rolled back")

    def check(unread: Unread) -> None:
        check_same_tokens(tokenizer, unread.tokenizer, unread.spec.model)

    drafting, own_tokenizer = load(name, str(model.memory_spec.device), "auto", weights, check)
    own, left = budgets.divide(model.memory_spec, drafting.memory_spec)
    memory = HybridMemory(drafting.memory_spec, **own.memory)
    prefixes = PrefixCache(memory, max_bytes=own.prefix_bytes) if has_cache else None
    return ModelDrafter(drafting, memory, own_tokenizer, prefixes=prefixes), left


def draft_share(model: MemorySpec, drafting: MemorySpec, rollback_window: int) -> float:
    """Return the share of a budget that the draft model's memory gets."""
    sizes = [plan_sequence(s, _COMPARED_TOKENS, rollback_window=rollback_window) for s in (model, drafting)]
    return sizes[1].most_bytes / (sizes[0].most_bytes + sizes[1].most_bytes)
