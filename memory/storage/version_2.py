"""Reads saved sequences of format version 2, whose signature was a digest of the printed specs.

The texts and names are those of the library that wrote such files, spelled out: nothing here follows from how specs
print today.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import Any

from hybridmem.memory.errors import FormatError
from hybridmem.memory.layer_memories import LayerMemories, Snapshot
from hybridmem.memory.rotary import Rotation
from hybridmem.memory.sequences.folding import TailRules
from hybridmem.memory.specs import AttentionSpec, CrossAttentionSpec, LayerSpec, MemorySpec, RecurrentSpec, StateTensor
from hybridmem.memory.storage.names import CHOICES, Names, pools_in_files


def check_layout(path: str, about: dict[str, Any], spec: MemorySpec, page_tokens: int, rules: TailRules) -> None:
    """Raise FormatError unless a file with these contents suits a memory of this spec."""
    theirs = about.get("layout")
    if not isinstance(theirs, dict):
        raise FormatError(
            f"{path} lacks the layout of its memory: it is a swap file, not a saved sequence; give a file that "
            "memory.save wrote"
        )
    for name, value in _layout(spec, page_tokens, rules).items():
        if theirs.get(name) != value:
            what = "other layers, policies or storages" if name == "layers" else f"{name}={theirs.get(name)!r}"
            remedy = (
                "load it with that model's memory_spec"
                if name in ("layers", "vocab_size")
                else f"make a memory with {name} like that"
            )
            raise FormatError(
                f"{path} was saved from a memory of {about.get('model')} with {what}, not {value!r} as here; {remedy}"
            )


def _layout(spec: MemorySpec, page_tokens: int, rules: TailRules) -> dict[str, int | str]:
    layers = text_of(spec)
    if rules.defers:  # then tails also hold the rings of states, which the text of a state lacks
        layers += repr(
            [m.tail_parts(deferred=True) for specs in spec.layers for m in specs if isinstance(m, RecurrentSpec)]
        )
    return {
        "vocab_size": spec.vocab_size, "dtype": str(spec.dtype), "page_tokens": page_tokens,
        "rollback_window": rules.rollback_window, "fold": rules.mode.value,
        "layers": hashlib.sha256(layers.encode()).hexdigest(),
    }  # fmt: skip


def text_of(spec: MemorySpec) -> str:
    """Return the layers of a spec as version 2 printed them."""
    text = _tuple(_tuple(_memory(memory) for memory in layer) for layer in spec.layers)
    return re.sub(r" at 0x[0-9a-f]+", "", text)  # of a user's policy without a repr of its own


def _memory(memory: LayerSpec) -> str:
    if isinstance(memory, RecurrentSpec):
        states = _tuple(_state(state) for state in memory.states)
        shape = f"row_shape={memory.row_shape!r}, states={states}"
        return f"RecurrentSpec(family={memory.family!r}, {shape}, name={memory.name!r})"
    heads = f"n_query_heads={memory.n_query_heads!r}, n_kv_heads={memory.n_kv_heads!r}"
    heads = f"{heads}, head_dim={memory.head_dim!r}, name={memory.name!r}"
    if isinstance(memory, CrossAttentionSpec):
        return f"CrossAttentionSpec({heads})"
    return (
        f"AttentionSpec({heads}, window={memory.window!r}, policy={_choice(memory.policy)}, "
        f"storage={_choice(memory.storage)}, value_dim={memory.value_dim!r}, rotation={_rotation(memory.rotation)}, "
        f"has_bias={memory.has_bias!r})"
    )


def _state(state: StateTensor) -> str:
    return (
        f"StateTensor(name={state.name!r}, shape={state.shape!r}, dtype={state.dtype!r}, initial={state.initial!r}, "
        f"keeps_dtype={state.keeps_dtype!r})"
    )


def _rotation(rotation: Rotation | None) -> str:
    return "None" if rotation is None else f"<Rotation of {len(rotation.frequencies)} pairs, {rotation.layout}>"


def _choice(choice: Any) -> str:
    """Return the text of a policy or a storage as version 2 printed it; one of a user's is its repr, as it was then."""
    if (named := CHOICES.get(type(choice))) is None:
        return repr(choice)
    return f"{named.name}({', '.join(f'{name}={value!r}' for name, value in named.values(choice).items())})"


def _tuple(texts: Iterable[str]) -> str:
    texts = list(texts)
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


def with_own_names(snapshot: Snapshot, layers: LayerMemories) -> Snapshot:
    """Return a version 2 file's snapshot with the names of a memory that it suits.

    In version 2 a layer memory of attention with a policy or a storage was "attention N, LABEL", N its number among
    those of attention, and its pools were "ROLE of " that; the pools of attention with a window were "ROLE over
    WINDOW".
    """
    specs = {own: layers.members[own][0] for own in layers}
    attention = [own for own, (_, spec) in specs.items() if isinstance(spec, AttentionSpec)]
    names = Names({}, {})
    for own, (_, spec) in specs.items():
        ending = ""
        if isinstance(spec, RecurrentSpec):
            old = "recurrence"
        elif isinstance(spec, CrossAttentionSpec):
            old = "cross-attention"
        elif spec.policy is None and spec.storage is None:
            ending = "" if spec.window is None else f" over {spec.window}"
            old = f"attention{ending}"
        else:
            beginning = f"attention {attention.index(own)}, "
            old = next((name for name in snapshot.records if name.startswith(beginning)), beginning)
            ending = f" of {old}"
        names.records[old] = own
        for (pool, _), role in zip(layers[own].pools, pools_in_files(spec), strict=True):
            names.pools[f"{role}{ending}"] = pool.name
    return names.renamed(snapshot)
