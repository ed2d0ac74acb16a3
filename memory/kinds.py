"""Which kinds of memory a spec asks for, each made once and all of them in one arena."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memory.arena import Store
from memory.attention_cache import AttentionCache, PageGrid
from memory.cross_attention import CrossAttentionCache
from memory.folding import TailGrid
from memory.interface import AttentionSpec, CrossAttentionSpec, LayerMemory, MemorySpec, RecurrentSpec
from memory.recurrent_state import RecurrentState


@dataclass
class Kinds:
    """The kinds of memory of a spec.

    Attributes:
        by_name: all of them, in the order in which they plan.
        attention: for each attention of the spec the name of its cache, the cache, and its number there.
    """

    by_name: dict[str, LayerMemory[Any]] = field(default_factory=dict)
    attention: list[tuple[str, AttentionCache, int]] = field(default_factory=list)
    cross_attention: CrossAttentionCache | None = None
    recurrent: RecurrentState | None = None


def make_kinds(spec: MemorySpec, page_tokens: int, grid: TailGrid, store: Store) -> Kinds:
    """One cache for the attention layers of each window, for they share tables of pages; one for cross-attention, one for recurrences."""
    kinds, flat = Kinds(), [memory for specs in spec.layers for memory in specs]
    caches: dict[int | None, tuple[str, AttentionCache]] = {}
    attention = [m for m in flat if isinstance(m, AttentionSpec)]
    for window in sorted({m.window for m in attention}, key=lambda window: window or 0):
        group = [m for m in attention if m.window == window]
        name = "attention" if window is None else f"attention over {window}"
        cache = AttentionCache(group, spec.dtype, PageGrid(page_tokens, window, grid.rollback_window), store)
        caches[window], kinds.by_name[name] = (name, cache), cache
    numbers = dict.fromkeys(caches, 0)
    for memory in attention:
        kinds.attention.append((*caches[memory.window], numbers[memory.window]))
        numbers[memory.window] += 1
    if cross := [m for m in flat if isinstance(m, CrossAttentionSpec)]:
        kinds.by_name["cross-attention"] = kinds.cross_attention = CrossAttentionCache(cross, spec.dtype, page_tokens, store)
    if recurrent := [m for m in flat if isinstance(m, RecurrentSpec)]:
        kinds.by_name["recurrence"] = kinds.recurrent = RecurrentState(recurrent, spec.dtype, grid, store)
    return kinds
