"""Builds the memory of a spec: its layer memories, the store that they share, and the coordinator."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch

from hybridmem.memory.attention.cross import CrossAttentionCache
from hybridmem.memory.attention.evicting import EvictingAttention
from hybridmem.memory.attention.host_pages import HostPages
from hybridmem.memory.attention.indexed import IndexedAttention, IndexKeys
from hybridmem.memory.attention.offload import Attention, HostedAttention
from hybridmem.memory.attention.quantized import QuantizedAttention
from hybridmem.memory.attention.selection import Selection
from hybridmem.memory.attention.span_keys import SpanKeys
from hybridmem.memory.attention_cache import AttentionCache
from hybridmem.memory.blocks.arena import read_budget
from hybridmem.memory.blocks.arguments import check_usable, read_device, read_dtype
from hybridmem.memory.blocks.hints import OF_TRANSFORMERS, is_of_transformers
from hybridmem.memory.blocks.pinned import HostAttention, host_store
from hybridmem.memory.blocks.store import Store
from hybridmem.memory.coordinator import Coordinator
from hybridmem.memory.errors import SpecError
from hybridmem.memory.eviction import Budget, EvictionPolicy, Quest
from hybridmem.memory.kernels import OF_STATES, chosen_kernels, warm_up, why_not_reproducible
from hybridmem.memory.kernels.eight_bits import LARGEST
from hybridmem.memory.layer_memories import LayerMemories, Place, Places
from hybridmem.memory.quantization import Storage
from hybridmem.memory.recurrent_state import RecurrentState
from hybridmem.memory.sequences.folding import Fold, TailRules
from hybridmem.memory.sequences.pages import PageGrid
from hybridmem.memory.specs import AttentionSpec, CrossAttentionSpec, IndexSpec, LayerSpec, MemorySpec, RecurrentSpec
from hybridmem.memory.state.readers import HeadReader, TailReader
from hybridmem.memory.state.tail_blocks import TailBlocks, TailMember
from hybridmem.memory.storage.files import check_url, read_path
from hybridmem.memory.storage.tiers import Tiers


@dataclass
class Kinds:
    """Holds the layer memories of a spec, by name and by kind.

    Attributes:
        by_name: name -> layer memory, in the order in which they plan.
        attention: for each attention of the spec, the name of its cache, the cache, and the attention's number there.
        indexes: the same of each index.
    """

    by_name: LayerMemories = field(default_factory=LayerMemories)
    attention: list[tuple[str, Attention, int]] = field(default_factory=list)
    indexes: list[tuple[str, IndexKeys, int]] = field(default_factory=list)
    cross_attention: CrossAttentionCache | None = None
    recurrent: RecurrentState[Any] | None = None


_Chosen = tuple[int | None, int]
"""How many rows an index chooses, and how many of them together."""
_Group = tuple[int | None, Budget | None, Storage | None, _Chosen]
"""A window, a policy, a storage, and what an index chooses. Layers that have all in common share blocks."""


def _attention_groups(memories: list[LayerSpec]) -> Iterator[tuple[AttentionSpec, _Group]]:
    """Yield each attention of a spec with its group. `EvictionPolicy.of_layer` has made the policy of the group."""
    attention = [m for m in memories if isinstance(m, AttentionSpec)]
    for memory in attention:
        if not isinstance(memory.policy, EvictionPolicy | Quest | None):
            raise SpecError(
                f"{memory.policy!r} is no EvictionPolicy and no Quest; give an instance of one, such as H2O(1024)"
            )
        if not isinstance(memory.storage, Storage | None):
            raise SpecError(f"{memory.storage!r} is no Storage; give an instance of one, such as Quantized(4)")
        if memory.policy is not None and not _is_hashable(memory.policy):
            raise SpecError(
                f"{type(memory.policy).__name__} has a field that cannot be hashed; layers of equal policies share "
                "blocks"
            )
    n_layers = Counter(memory.policy for memory in attention)
    numbers: Counter[Budget | None] = Counter()
    for memory in attention:
        policy = memory.policy
        own = None if policy is None else policy.of_layer(numbers[policy], n_layers[policy])
        if policy is not None and not isinstance(own, EvictionPolicy if isinstance(policy, EvictionPolicy) else Quest):
            raise SpecError(
                f"{type(policy).__name__}.of_layer gave {own!r}; it must give a policy of its kind, such as itself"
            )
        yield memory, (memory.window, own, memory.storage, (memory.n_chosen, memory.span_tokens))
        numbers[policy] += 1


def _is_hashable(x: object) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def make_kinds(spec: MemorySpec, page_tokens: int, rules: TailRules, store: Store) -> Kinds:
    """Make an attention cache for each window, policy and storage, and a layer memory for each other kind."""
    kinds, flat = Kinds(), [memory for specs in spec.layers for memory in specs]
    groups: dict[_Group, list[AttentionSpec]] = {}
    places: list[tuple[_Group, int]] = []
    for memory, key in _attention_groups(flat):
        group = groups.setdefault(key, [])
        places.append((key, len(group)))
        group.append(memory)
    caches: dict[_Group, tuple[str, Attention]] = {}
    for (window, policy, storage, chosen), group in sorted(groups.items(), key=lambda item: item[0][0] or 0):
        cache: Attention
        if isinstance(policy, EvictionPolicy):
            name = f"attention {len(caches)}, {policy.label}" + (f" of {storage.label}" if storage else "")
            cache = EvictingAttention(group, policy, storage, spec.dtype, rules.rollback_window, store, name)
        elif isinstance(policy, Quest) and storage is not None:
            name = f"attention {len(caches)}, {policy.label} of {storage.label}"
            selection = Selection(policy, storage.group, store, f"{storage} a smaller group")
            cache = QuantizedAttention(
                group, storage, spec.dtype, page_tokens, rules.rollback_window, store, name, selection=selection
            )
        elif isinstance(policy, Quest):
            name = f"attention {len(caches)}, {policy.label}"
            grid, selection = PageGrid(page_tokens, None, rules.rollback_window), Selection(policy, page_tokens, store)
            cache = AttentionCache(group, spec.dtype, grid, store, name=f"pages of {name}", selection=selection)
        elif storage is not None:
            name = f"attention {len(caches)}, {storage.label}"
            cache = QuantizedAttention(group, storage, spec.dtype, page_tokens, rules.rollback_window, store, name)
        elif chosen[0] is not None:
            name = _indexed("attention", chosen, spec)
            grid = PageGrid(page_tokens, None, rules.rollback_window)
            cache = IndexedAttention(group, spec.dtype, grid, store, f"pages of {name}")
        else:
            name = "attention" if window is None else f"attention over {window}"
            cache = AttentionCache(group, spec.dtype, PageGrid(page_tokens, window, rules.rollback_window), store)
        caches[window, policy, storage, chosen], kinds.by_name[name] = (name, cache), cache
    kinds.attention = [(*caches[key], number) for key, number in places]
    _add_indexes(kinds, spec, page_tokens, rules, store)
    if cross := [m for m in flat if isinstance(m, CrossAttentionSpec)]:
        kinds.by_name["cross-attention"] = kinds.cross_attention = CrossAttentionCache(
            cross, spec.dtype, page_tokens, store
        )
    if recurrent := [m for m in flat if isinstance(m, RecurrentSpec)]:
        blocks = TailBlocks([TailMember.of(m, deferred=rules.defers) for m in recurrent], spec.dtype, rules, store)
        reader = TailReader(recurrent, blocks) if rules.defers else HeadReader(recurrent, blocks)
        kinds.by_name["recurrence"] = kinds.recurrent = RecurrentState[Any](blocks, reader)
    for kind in _KINDS:
        for i, member in enumerate(spec.of_kind(kind)):
            name = kinds.attention[i][0] if kind == "attention" else kinds.indexes[i][0] if kind == "index" else kind
            kinds.by_name.members.setdefault(name, []).append(member)
    return kinds


_KINDS = ("attention", "index", "cross-attention", "recurrence")


def _indexed(what: str, chosen: _Chosen, spec: MemorySpec) -> str:
    """Return the name of a layer memory with an index. It has the number of chosen rows if a model has several."""
    memories = (m for layer in spec.layers for m in layer if isinstance(m, AttentionSpec | IndexSpec))
    suffix = "" if len({(m.n_chosen, m.span_tokens) for m in memories} - {(None, 1)}) == 1 else f" of {chosen[0]} rows"
    suffix += f" in spans of {chosen[1]}" if suffix and chosen[1] > 1 else ""
    return f"{what}{suffix}" if what == "index" else f"indexed {what}{suffix}"


def _add_indexes(kinds: Kinds, spec: MemorySpec, page_tokens: int, rules: TailRules, store: Store) -> None:
    """Make a layer memory for all indexes that choose the same number of rows."""
    groups: dict[_Chosen, list[IndexSpec]] = {}
    numbers = list[tuple[_Chosen, int]]()
    for _, memory in spec.of_kind("index"):
        assert isinstance(memory, IndexSpec)
        chosen: _Chosen = memory.n_chosen, memory.span_tokens
        group = groups.setdefault(chosen, [])
        numbers.append((chosen, len(group)))
        group.append(memory)
    made = dict[_Chosen, tuple[str, IndexKeys]]()
    for chosen, group in groups.items():
        name, grid = _indexed("index", chosen, spec), PageGrid(page_tokens, None, rules.rollback_window)
        keys = IndexKeys if chosen[1] == 1 else SpanKeys
        made[chosen] = name, keys(group, spec.dtype, grid, store, f"pages of {name}")
        kinds.by_name[name] = made[chosen][1]
    kinds.indexes = [(*made[chosen], number) for chosen, number in numbers]


def with_host_pages(
    kinds: Kinds, spec: MemorySpec, page_tokens: int, rules: TailRules, store: Store, host_store: Store
) -> HostPages:
    """Give each attention cache of a memory a second cache in host memory.

    Raises SpecError if the model has no attention, or if host memory has no room for one sequence.
    """
    attention = replace(
        spec, layers=tuple(tuple(m for m in layer if isinstance(m, AttentionSpec)) for layer in spec.layers)
    )
    if spec.of_kind("index"):
        raise SpecError(
            f"{spec.model} chooses rows by an index, whose attention must be on the device; leave host_pages out"
        )
    host_kinds = make_kinds(attention, page_tokens, rules, host_store)
    if not host_kinds.attention:
        raise SpecError(f"{spec.model} has no attention whose pages could be in host memory; leave host_pages out")
    if (needed := host_kinds.by_name.least_bytes) > (given := host_store.arena.capacity_bytes):
        raise SpecError(
            f"host_pages={given:,} bytes are too few for one sequence of {spec.model}; give {needed:,} or more"
        )
    hosted, on_device = dict[str, HostedAttention](), LayerMemories()
    for (name, cache, _), (_, twin, _) in zip(kinds.attention, host_kinds.attention, strict=True):
        specs = [member for _, member in host_kinds.by_name.members[name] if isinstance(member, AttentionSpec)]
        hosted[name], on_device[name] = HostedAttention(cache, twin, store, host_store, specs, spec.dtype), cache
    kinds.by_name.update(hosted)
    kinds.attention = [(name, hosted[name], number) for name, _, number in kinds.attention]
    return HostPages(store, host_store, on_device, host_kinds.by_name, hosted)


def default_fold(spec: MemorySpec, device_type: str, rollback_window: int) -> Fold:
    """Choose the fold mode for a device: "keep" on the CPU; on CUDA "defer" if it moves fewer bytes, else "replay".

    With "defer" a step writes no states, but reads tails, whose mean length is the window and half a fold. States of 8
    bits have no other mode.
    """
    if has_8_bits(spec):
        return "defer"
    if device_type == "cpu":
        return "keep"
    recurrent = [m for _, m in spec.of_kind("recurrence") if isinstance(m, RecurrentSpec)]
    if device_type != "cuda" or not recurrent or not all(m.can_defer for m in recurrent):
        return "replay"
    # States with an empty ring (windows of convolutions) do not count: every fold mode reads them from the rows of the
    # tail.
    states = [state for m in recurrent for state in m.states if state.ring]
    state_bytes = sum(_bytes([(state.shape, state.dtype)], spec.dtype) for state in states)
    token_bytes = sum(_bytes(state.ring or (), spec.dtype) for state in states)
    mean_tokens = rollback_window + TailRules.of("defer", rollback_window).fold_tokens / 2
    return "defer" if token_bytes * mean_tokens <= state_bytes else "replay"


def has_8_bits(spec: MemorySpec) -> bool:
    """True if states of the spec are stored in 8 bits."""
    recurrent = (m for _, m in spec.of_kind("recurrence") if isinstance(m, RecurrentSpec))
    return any(state.dtype in LARGEST for m in recurrent for state in m.states)


LEAST_FOLD_TOKENS = 8
"""The least distance of two fold points with states of 8 bits.

Every fold rounds the states, and the more often it does, the further outputs drift (`python -m benchmarks drift`).
"""


def check_8_bits(spec: MemorySpec, fold: Fold, rules: TailRules) -> None:
    """Raise SpecError unless a memory with states of 8 bits writes them only at fold points.

    The fold mode and its rules are those of the memory.
    """
    if not has_8_bits(spec):
        return
    of = "states of 8 bits (state_dtype='int8' or 'fp8')"
    if fold != "defer":
        raise SpecError(f"fold={fold!r} writes the state at each token, and {of} are written at fold points; leave it")
    if rules.fold_tokens < LEAST_FOLD_TOKENS:
        raise SpecError(
            f"rollback_window={rules.rollback_window} rounds {of} every {rules.fold_tokens} tokens; give "
            f"{2 * LEAST_FOLD_TOKENS} or more, or state_dtype='bfloat16'"
        )


def _bytes(parts: Iterable[tuple[tuple[int, ...], torch.dtype | None]], dtype: torch.dtype) -> int:
    """Return the bytes of tensors of these shapes and dtypes. A tensor whose dtype is None has `dtype`."""
    return sum(math.prod(shape) * (own or dtype).itemsize for shape, own in parts)


def resolved_spec(
    spec: MemorySpec,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    state_dtype: str | torch.dtype | None,
    reproducible: bool | None = None,
) -> MemorySpec:
    """Return the spec with the options that `HybridMemory` was given. Raises SpecError."""
    if is_of_transformers(spec):
        raise SpecError(f"{type(spec).__name__} is {OF_TRANSFORMERS}")
    if not isinstance(spec, MemorySpec):
        raise SpecError(f"{spec!r} is no MemorySpec; pass model.memory_spec")
    place = spec.device if device is None else read_device("device", device)
    check_usable("device", place)
    of_rows = read_dtype("dtype", spec.dtype if dtype is None else dtype)
    found = replace(spec.with_state_dtype(state_dtype), device=place, dtype=of_rows)
    return found if reproducible is None and not spec.reproducible else _with_reproducible(found, reproducible)


_BY_STEPS = "what a token sees of it depends on how tokens are split into steps"


def _with_reproducible(spec: MemorySpec, wanted: bool | None) -> MemorySpec:
    """Return the spec, with reproducible results if that is wanted. None takes what the model was loaded for.

    Raises SpecError if the promise cannot be kept.
    """
    if wanted not in (None, True, False):
        raise SpecError(f"reproducible={wanted!r}; give True, False, or None for what the model was loaded for")
    if wanted is False:
        return replace(spec, reproducible=False)
    if not spec.reproducible:
        raise SpecError(
            f"{spec.model} was not made to be reproducible, so its own products may give a row other bits in other "
            "steps; load it with load_model(..., reproducible=True), or, if the model is yours and computes each row "
            "alone, give dataclasses.replace(spec, reproducible=True)"
        )
    if (why := _why_not_reproducible(spec)) is not None:
        raise SpecError(f"{spec.model} cannot be reproducible here: {why}; give reproducible=False to do without")
    return spec


def _why_not_reproducible(spec: MemorySpec) -> str | None:
    """Return why a memory of this spec cannot be reproducible; None if it can."""
    for memory in (memory for layer in spec.layers for memory in layer):
        if isinstance(memory, AttentionSpec):
            for what in (memory.policy, memory.storage):
                if what is not None:
                    return f"{memory.name!r} has {what}, and {_BY_STEPS}"
        if isinstance(memory, RecurrentSpec):
            for state in memory.states:
                if state.dtype not in (None, torch.float32) and not state.keeps_dtype:
                    return f"the state {state.name!r} has {state.dtype}, and each step rounds the state at its end"
    return why_not_reproducible(spec.device, spec.dtype)


def check_choices(fold: object, host_attention: object, host_pages: object) -> None:
    """Raise SpecError unless these options of `HybridMemory` have known values and fit each other."""
    if fold not in (None, *get_args(Fold)):
        raise SpecError(f"fold={fold!r}; choose 'keep', 'replay', 'defer', or None for what suits the device")
    if host_attention not in get_args(HostAttention) or (host_attention == "compute" and host_pages is None):
        raise SpecError(
            f"host_attention={host_attention!r}; choose 'stream' or 'compute', and say how many bytes with host_pages="
        )


def kernels_of(spec: MemorySpec, fold: Fold, rollback_window: int) -> dict[str, str]:
    """Return what `HybridMemory.kernels` returns."""
    recurrent = [memory for _, memory in spec.of_kind("recurrence") if isinstance(memory, RecurrentSpec)]
    states = (state.dtype or spec.dtype for m in recurrent for state in m.states if state.dtype not in LARGEST)
    of_states = chosen_kernels(spec.device, spec.dtype, *states, behind_tails=fold == "defer" and rollback_window > 0)
    found = chosen_kernels(spec.device, spec.dtype) | {name: of_states[name] for name in OF_STATES}
    return {name: _PLAIN if kernels == "reference" else kernels for name, kernels in found.items()} | _in_torch(spec)


def _in_torch(spec: MemorySpec) -> dict[str, str]:
    """Return what runs in plain torch: recurrences of unknown families, and the ranks of eviction policies."""
    found = dict[str, str]()
    for memory in (memory for layer in spec.layers for memory in layer):
        if isinstance(memory, RecurrentSpec) and memory.family not in _WITH_KERNELS:
            found[f"recurrence {memory.family}"] = f"{_PLAIN}, unless the recurrence calls kernels itself"
        if isinstance(memory, AttentionSpec) and isinstance(memory.policy, EvictionPolicy):
            found[f"scores and ranks of {memory.policy.label}"] = _PLAIN
    return found


_PLAIN = "plain torch"
_WITH_KERNELS = frozenset(
    {
        *("gated_delta", "kimi_delta", "linear_attention", "mamba1", "mlstm", "rg_lru", "rwkv4", "rwkv7", "ssd"),
        *("short_conv", "token_shift"),
    }
)
"""Families whose recurrences in `memory.recurrences` call kernels of `memory.kernels`."""

_OF_FAMILY = {"mamba1": "selective_scan", "mlstm": "stabilise", "rg_lru": "linear_scan", "rwkv4": "wkv4", "ssd": "ssd"}
"""Kernels that recurrences of a family have for themselves."""

IN_8_BITS = {
    (dtype, n_axes): f"{name}_{of}"
    for dtype, name in ((torch.int8, "int8"), (torch.float8_e4m3fn, "float8"))
    for n_axes, of in ((2, "channels"), (3, "states"))
}
"""Names of the kernels for states of 8 bits, by their dtypes and their numbers of axes."""


def compiled_ahead(spec: MemorySpec) -> set[str]:
    """Return the names of the kernels that steps of this spec call, as in `memory.kernels.cpu.warm_up.NAMES`.

    Only a user's own recurrence may call other kernels. Those are compiled at their first call.
    """
    names = {"rows", "rms_norm"}
    for memory in (memory for layer in spec.layers for memory in layer):
        if isinstance(memory, RecurrentSpec):
            in_8_bits = {IN_8_BITS[s.dtype, len(s.shape)] for s in memory.states if s.dtype in LARGEST}
            if in_8_bits:  # These run behind tails, where other kernels take part.
                names |= {*in_8_bits, "softplus"}
                continue
            if memory.family in _OF_FAMILY:
                names.add(_OF_FAMILY[memory.family])
            if any(state.name == "conv" for state in memory.states):
                names.add("causal_conv")
            if any(len(state.shape) == 3 for state in memory.states):
                names |= {"matrix_scan", "softplus"}
        elif isinstance(memory, IndexSpec):
            names.add("choose_rows")
        else:
            names.add("paged_attention")
        if isinstance(memory, AttentionSpec):
            names |= {"folded_rows"} if memory.storage is not None else set()
            names |= {"choose_pages"} if isinstance(memory.policy, Quest) else set()
    return names


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
    disk_budget: float | str | None,
    poison: bool,
) -> Coordinator:
    """Make every layer memory of a spec in one store. Arguments and errors are those of `HybridMemory`."""
    budget_bytes = read_budget(budget)
    store = Store(budget_bytes, spec.device, poison=poison, is_reproducible=spec.reproducible)
    swapped = Tiers(
        None if host_budget is None else read_budget(host_budget, "host_budget"),
        None if swap_dir is None else check_url("swap_dir", read_path("swap_dir", swap_dir, "a folder or a URL")),
        None if disk_budget is None else read_budget(disk_budget, "disk_budget"),
        store.journal,
    )
    kinds = make_kinds(spec, page_tokens, rules, store)
    if (needed := kinds.by_name.least_bytes) > budget_bytes:
        raise SpecError(
            f"a budget of {budget_bytes:,} bytes is too small for one sequence of {spec.model}; give it {needed:,} or "
            "more"
        )
    warm_up(compiled_ahead(spec), store.device, spec.dtype)
    pages_on_host = None
    if host_pages is not None:
        n_bytes = read_budget(host_pages, "host_pages")
        pinned = host_store(
            n_bytes, spec.device, host_attention, poison=poison, journal=store.journal,
            is_reproducible=spec.reproducible,
        )  # fmt: skip
        pages_on_host = with_host_pages(kinds, spec, page_tokens, rules, store, pinned)
    return Coordinator(spec, kinds.by_name, _places(spec, kinds), store, swapped, pages_on_host)


def _places(spec: MemorySpec, kinds: Kinds) -> Places:
    """Map each layer, kind and name to the layer memory that serves it."""
    places: Places = {}
    for kind in _KINDS:
        for i, (layer, memory) in enumerate(spec.of_kind(kind)):
            if kind in ("attention", "index"):
                name, cache, number = (kinds.attention if kind == "attention" else kinds.indexes)[i]
                place = Place(name, cache, number, i)
            else:
                place = Place(kind, kinds.by_name[kind], i, i)
            places[layer, kind, memory.name] = place
            if sum(spec.kind_of(m) == kind for m in spec.layers[layer]) == 1:
                places[layer, kind, None] = place
    return places
