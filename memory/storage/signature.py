"""The signature of a saved sequence: what its memory must have in common with the one that loads it, in plain JSON.

Nothing in it follows from the name of a class or a variable of this library, so renames leave files readable. Names in files:

    layer memory   KIND LAYER NAME   of the first attention or recurrence that it serves, such as "attention 3 attention"
    pool           NAME OF ITS LAYER MEMORY/ROLE   such as "pages", "exact pages", "states", "tails", "encoder pages"
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from memory.errors import FormatError
from memory.layer_memories import LayerMemories, Snapshot
from memory.rotary import Rotation
from memory.sequences.folding import TailRules
from memory.specs import AttentionSpec, CrossAttentionSpec, LayerSpec, MemorySpec, RecurrentSpec
from memory.storage.version_2 import check_layout

Signature = dict[str, Any]


def signature_of(spec: MemorySpec, page_tokens: int, rules: TailRules) -> Signature:
    """Return what decides whether the bytes of one memory mean the same to another one. Weights are not part of it."""
    return {
        "vocab_size": spec.vocab_size, "dtype": _dtype(spec.dtype), "page_tokens": page_tokens, "rollback_window": rules.rollback_window,
        "fold": rules.mode.value, "layers": [[_memory(memory, rules) for memory in layer] for layer in spec.layers],
    }  # fmt: skip


def _memory(memory: LayerSpec, rules: TailRules) -> dict[str, Any]:
    about: dict[str, Any] = {"kind": MemorySpec.kind_of(memory), "name": memory.name}
    if isinstance(memory, RecurrentSpec):
        parts = memory.tail_parts(deferred=rules.defers)
        return about | {
            "family": memory.family, "row_shape": list(memory.row_shape),
            "states": {s.name: {"shape": list(s.shape), "dtype": _dtype(s.dtype), "initial": s.initial} for s in memory.states},
            "tail": [{"shape": list(shape), "dtype": _dtype(dtype)} for shape, dtype in parts],
        }  # fmt: skip
    about |= {"n_query_heads": memory.n_query_heads, "n_kv_heads": memory.n_kv_heads, "head_dim": memory.head_dim}
    if isinstance(memory, CrossAttentionSpec):
        return about
    assert isinstance(memory, AttentionSpec)
    return about | {
        "value_dim": memory.value_dim, "window": memory.window, "has_bias": memory.has_bias, "rotation": _rotation(memory.rotation),
        "policy": _choice(memory.policy), "storage": _choice(memory.storage),
    }  # fmt: skip


def _rotation(rotation: Rotation | None) -> dict[str, Any] | None:
    """Keys are kept rotated, so the angles count; there may be many, and a digest of them says whether they are the same."""
    if rotation is None:
        return None
    digest = hashlib.sha256(json.dumps(rotation.frequencies).encode()).hexdigest()
    return {"pairing": rotation.layout, "start": rotation.start, "n_pairs": len(rotation.frequencies), "frequencies": digest}


def _choice(choice: Any) -> Any:
    """A policy or a storage by its class and its fields. One of a user's is known by its module as well, so these must keep their names.

    Of a class that is no dataclass, every public attribute counts. A value that JSON lacks counts by its type alone.
    """
    if choice is None or isinstance(choice, bool | int | float | str):
        return choice
    if isinstance(choice, torch.dtype):
        return _dtype(choice)
    if isinstance(choice, list | tuple):
        return [_choice(part) for part in choice]
    if isinstance(choice, dict):
        return {str(name): _choice(part) for name, part in sorted(choice.items(), key=lambda item: str(item[0]))}
    owner = type(choice)
    is_ours = owner.__module__.split(".")[0] == "memory"
    name = owner.__qualname__ if is_ours else f"{owner.__module__}.{owner.__qualname__}"
    names = [field.name for field in fields(choice)] if is_dataclass(choice) else sorted(getattr(choice, "__dict__", ()))
    return {"class": name} | {n: _choice(getattr(choice, n)) for n in names if not n.startswith("_")}


def _dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype)


def fitted(
    path: str, snapshot: Snapshot, about: dict[str, Any], spec: MemorySpec, page_tokens: int, rules: TailRules, layers: LayerMemories
) -> Snapshot:
    """Return a file's snapshot with the names of a memory. Raises FormatError, naming what differs, if the file does not suit it."""
    if about["version"] == 2:
        check_layout(path, about, spec, page_tokens, rules)
        return snapshot
    _check(path, about, signature_of(spec, page_tokens, rules))
    return _with_own_names(snapshot, layers)


def _check(path: str, about: dict[str, Any], ours: Signature) -> None:
    theirs = about.get("signature")
    if not isinstance(theirs, dict):
        raise FormatError(f"{path} does not say of what memory it is a part: it is a swapped-out one; give a file that memory.save wrote")
    found = _difference(theirs, ours)
    if found is None:
        return
    where, their_value, our_value = found
    if where in ours and where != "layers":
        remedy = "load it with that model's memory_spec" if where == "vocab_size" else f"make a memory with {where} like that"
    else:
        where, remedy = f"other layers, policies or storages: {where}", "load it with that model's memory_spec, policies and storages"
    what = f"{where}={_short(their_value)}, not {_short(our_value)} as here"
    raise FormatError(f"{path} was saved from a memory of {about.get('model')} with {what}; {remedy}")


def _difference(theirs: Any, ours: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """Find the first entry that differs: where it is, and both values."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        pairs = [
            (f"{where}.{name}" if where else name, theirs.get(name), ours.get(name)) for name in [*ours, *(theirs.keys() - ours.keys())]
        ]
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(theirs, ours, strict=True))]
    else:
        return None if theirs == ours and type(theirs) is type(ours) else (where, theirs, ours)
    return next((found for name, a, b in pairs if (found := _difference(a, b, name)) is not None), None)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# Names


def _names_in_files(layers: LayerMemories) -> dict[str, str]:
    """Name of a layer memory here -> its name in files."""
    firsts = {name: layers.members[name][0] for name in layers}
    return {name: f"{MemorySpec.kind_of(memory)} {layer} {memory.name}" for name, (layer, memory) in firsts.items()}


def _role(pool: str) -> str:
    """What a pool's blocks are: its name without the layer memory or the window that makes it unique."""
    return re.split(" of | over ", pool)[0]


def with_names_of_files(snapshot: Snapshot, layers: LayerMemories) -> Snapshot:
    """Return the same snapshot with the names that files have."""
    names = _names_in_files(layers)
    pools = {pool.name: f"{names[name]}/{_role(pool.name)}" for name, memory in layers.items() for pool, _ in memory.pools}
    return Snapshot({names[name]: r for name, r in snapshot.records.items()}, {pools[name]: b for name, b in snapshot.blocks.items()})


def _with_own_names(snapshot: Snapshot, layers: LayerMemories) -> Snapshot:
    """Return a file's snapshot with the names of this memory; names that no such memory writes stay."""
    names = {theirs: own for own, theirs in _names_in_files(layers).items()}
    pools = {f"{theirs}/{_role(pool.name)}": pool.name for theirs, own in names.items() for pool, _ in layers[own].pools}
    records = {names.get(name, name): record for name, record in snapshot.records.items()}
    return Snapshot(records, {pools.get(name, name): blocks for name, blocks in snapshot.blocks.items()})
