"""Builds the memory that a spec asks for: its layer memories, the bytes that they share, and what coordinates them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from memory.archive import read_path
from memory.arena import Store, read_budget
from memory.arguments import check_usable, read_device, read_dtype
from memory.coordinator import Coordinator
from memory.errors import SpecError
from memory.folding import Fold, TailRules
from memory.host_bytes import HostAttention, host_store
from memory.kernels import OF_STATES, chosen_kernels
from memory.kinds import Kinds, make_kinds, with_host_pages
from memory.layer_memories import Place, Places
from memory.specs import MemorySpec, RecurrentSpec
from memory.tiers import Tiers


def resolved_spec(
    spec: MemorySpec, device: str | torch.device | None, dtype: str | torch.dtype | None, state_dtype: str | torch.dtype | None
) -> MemorySpec:
    """The spec with the device and the dtypes that its memory was asked to have. Raises SpecError."""
    if not isinstance(spec, MemorySpec):
        raise SpecError(f"{spec!r} is no MemorySpec; pass model.memory_spec")
    place = spec.device if device is None else read_device("device", device)
    check_usable("device", place)
    of_rows = spec.dtype if dtype is None else read_dtype("dtype", dtype)
    return replace(spec.with_state_dtype(state_dtype), device=place, dtype=of_rows)


def check_choices(fold: object, host_attention: object, host_pages: object) -> None:
    """Raise SpecError unless these options are known and fit each other."""
    if fold not in (None, *get_args(Fold)):
        raise SpecError(f"fold={fold!r}; choose 'keep', 'replay', 'defer', or None for what suits the device")
    if host_attention not in get_args(HostAttention) or (host_attention == "compute" and host_pages is None):
        raise SpecError(f"host_attention={host_attention!r}; choose 'stream' or 'compute', and say how many bytes with host_pages=")


def kernels_of(spec: MemorySpec, fold: Fold, rollback_window: int) -> dict[str, str]:
    """See `HybridMemory.kernels`."""
    recurrent = [memory for _, memory in spec.of_kind("recurrence") if isinstance(memory, RecurrentSpec)]
    states = (state.dtype or spec.dtype for memory in recurrent for state in memory.states)
    of_states = chosen_kernels(spec.device, spec.dtype, *states, behind_tails=fold == "defer" and rollback_window > 0)
    return chosen_kernels(spec.device, spec.dtype) | {name: of_states[name] for name in OF_STATES}


def build(
    spec: MemorySpec,
    budget: float | str,
    *,
    page_tokens: int,
    rules: TailRules,
    host_pages: float | str | None,
    host_attention: HostAttention,
    host_budget: float | str | None,
    swap_dir: str | Path | None,
    poison: bool,
) -> Coordinator:
    """Make every layer memory of a spec in one store. Arguments and errors as `HybridMemory`."""
    budget_bytes = read_budget(budget)
    swapped = Tiers(
        None if host_budget is None else read_budget(host_budget, "host_budget"),
        None if swap_dir is None else Path(read_path("swap_dir", swap_dir, "a folder")),
    )
    store = Store(budget_bytes, spec.device, poison=poison)
    kinds = make_kinds(spec, page_tokens, rules, store)
    if (needed := kinds.by_name.least_bytes) > budget_bytes:
        raise SpecError(f"a budget of {budget_bytes:,} bytes is too small for one sequence of {spec.model}; give it {needed:,} or more")
    pages_on_host = None
    if host_pages is not None:
        pinned = host_store(read_budget(host_pages, "host_pages"), spec.device, host_attention, poison=poison)
        pages_on_host = with_host_pages(kinds, spec, page_tokens, rules, store, pinned)
    return Coordinator(spec, kinds.by_name, _places(spec, kinds), store, swapped, pages_on_host)


def _places(spec: MemorySpec, kinds: Kinds) -> Places:
    places: Places = {}
    for kind in ("attention", "cross-attention", "recurrence"):
        for i, (layer, memory) in enumerate(spec.of_kind(kind)):
            if kind == "attention":
                name, cache, number = kinds.attention[i]
                place = Place(name, cache, number, i)
            else:
                place = Place(kind, kinds.by_name[kind], i, i)
            places[layer, kind, memory.name] = place
            if sum(spec.kind_of(m) == kind for m in spec.layers[layer]) == 1:
                places[layer, kind, None] = place
    return places
