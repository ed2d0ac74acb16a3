"""Makes the drafter of an engine from a draft head, of the model's own checkpoint or of a folder."""

from __future__ import annotations

from hybridmem.chat.commands.drafter import Budgets
from hybridmem.chat.engine.blank_drafts import BlankDrafter
from hybridmem.chat.engine.head_drafts import HeadDrafter
from hybridmem.memory import HybridMemory, SpecError
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import LanguageModel
from hybridmem.models.draft_heads import BlankHead
from hybridmem.models.loading.draft_heads import load_draft_head

NONE, AUTO = "none", "auto"
"""What --draft-head may be beside a folder: no draft head, or the checkpoint's own, if it has one."""


def check_draft_options(draft_model: str | None, draft_head: str, rollback_window: int | None) -> None:
    """Raise SpecError if both a model and a head are to draft, or if their drafts could not be rolled back."""
    if draft_head == NONE:
        return
    if draft_model is not None:
        raise SpecError(f"--draft-model {draft_model} and --draft-head {draft_head}: only one can draft; leave one out")
    if rollback_window == 0:
        raise SpecError("--draft-head needs --rollback-window 8 or more, because wrong drafts are rolled back")


def make_head_drafter(
    name: str, model: LanguageModel, budgets: Budgets, *, weights: str, has_cache: bool
) -> tuple[HeadDrafter | None, Budgets]:
    """Return the drafter of a draft head, and what is left for the model's memory beside it.

    Args:
        name: "auto" for the head that was loaded with the model, or a folder.
        budgets: the budgets of both memories.
        has_cache: whether the head keeps prefixes, as the model does.
    Returns None and the same budgets if the checkpoint has no head, and none is named.
    Raises:
        SpecError: the model has no hidden states for draft heads. UnsupportedModelError, FormatError: the folder holds
            no head for this model.
    """
    head = getattr(model, "draft_head", None) if name == AUTO else load_draft_head(name, model, weights=weights)
    if head is None:
        return None, budgets
    own, left = budgets.divide(model.memory_spec, head.memory_spec)
    window = max(budgets.rollback_window, head.n_fed) if isinstance(head, BlankHead) else budgets.rollback_window
    memory = HybridMemory(head.memory_spec, **own.memory | {"rollback_window": window})
    prefixes = PrefixCache(memory, max_bytes=own.prefix_bytes) if has_cache else None
    if isinstance(head, BlankHead):
        return BlankDrafter(model, head, memory, prefixes=prefixes), left
    return HeadDrafter(model, head, memory, prefixes=prefixes), left
