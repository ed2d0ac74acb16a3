"""Makes the signature of a memory, as plain JSON. A saved sequence can be loaded by a memory of the same signature.

Nothing in it depends on names of classes or variables of this library: `memory.storage.names` has their names in files.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridmem.memory.errors import FormatError, MismatchError
from hybridmem.memory.rotary import Rotation
from hybridmem.memory.sequences.folding import TailRules
from hybridmem.memory.specs import AttentionSpec, CrossAttentionSpec, IndexSpec, LayerSpec, MemorySpec, RecurrentSpec
from hybridmem.memory.storage.names import CHOICES, kind_in_files

Signature = dict[str, Any]


def signature_of(spec: MemorySpec, page_tokens: int, rules: TailRules) -> Signature:
    """Return everything that decides whether the bytes of one memory mean the same in another, except the weights."""
    about: Signature = {
        "vocab_size": spec.vocab_size, "dtype": _dtype(spec.dtype), "page_tokens": page_tokens,
        "rollback_window": rules.rollback_window, "fold": rules.mode.value,
        "layers": [[_memory(memory, rules) for memory in layer] for layer in spec.layers],
    }  # fmt: skip
    if spec.reproducible:  # Files of other memories do not have the entry.
        about["reproducible"] = True
    return about


def _memory(memory: LayerSpec, rules: TailRules) -> dict[str, Any]:
    about: dict[str, Any] = {"kind": kind_in_files(memory), "name": memory.name}
    if isinstance(memory, RecurrentSpec):
        parts = memory.tail_parts(deferred=rules.defers)
        return about | {
            "family": memory.family, "row_shape": list(memory.row_shape),
            "states": [  # States are in the order of their bytes.
                {"name": s.name, "shape": list(s.shape), "dtype": _dtype(s.dtype), "initial": s.initial}
                for s in memory.states
            ],
            "tail": [{"shape": list(shape), "dtype": _dtype(dtype)} for shape, dtype in parts],
        }  # fmt: skip
    about |= {"n_query_heads": memory.n_query_heads, "n_kv_heads": memory.n_kv_heads, "head_dim": memory.head_dim}
    if isinstance(memory, CrossAttentionSpec):
        return about
    if isinstance(memory, IndexSpec):
        return about | _spans(memory) | {"n_chosen": memory.n_chosen, "rotation": _rotation(memory.rotation)}
    assert isinstance(memory, AttentionSpec)
    about |= _spans(memory)
    if memory.n_chosen is not None:  # Files of memories without an index do not have the entry.
        about["n_chosen"] = memory.n_chosen
    return about | {
        "value_dim": memory.value_dim, "window": memory.window, "has_bias": memory.has_bias,
        "rotation": _rotation(memory.rotation), "policy": _choice(memory.policy), "storage": _choice(memory.storage),
    }  # fmt: skip


def _spans(memory: AttentionSpec | IndexSpec) -> dict[str, Any]:
    """Return the number of tokens of a span. Files of memories that choose single rows do not have the entry."""
    return {} if memory.span_tokens == 1 else {"span_tokens": memory.span_tokens}


def _rotation(rotation: Rotation | None) -> dict[str, Any] | None:
    """Return how keys were rotated, because rotated keys are stored.

    Frequencies are given as a digest: there may be many.
    """
    if rotation is None:
        return None
    digest = hashlib.sha256(json.dumps(rotation.frequencies).encode()).hexdigest()
    return {
        "pairing": rotation.layout,
        "start": rotation.start,
        "n_pairs": len(rotation.frequencies),
        "frequencies": digest,
    }


def _choice(choice: Any) -> Any:
    """Return a policy or a storage as the name of its class and its parameters.

    A policy or storage of this library has its names of `CHOICES`. One of a user has the module and the qualified name
    of its class, which must not change, and its fields: for a dataclass, each field that takes part in comparisons
    (`compare=True`, the default); for another class, each public attribute. Values count as follows, also inside lists,
    tuples, sets and dicts. Numbers, texts, dtypes, paths and bytes count by value. Tensors and arrays count by dtype,
    shape and a digest of their elements. Members of an enum, functions and classes count by module and name, so code is
    not compared. Other objects count as policies and storages do, or, if they have no attributes, by their repr without
    addresses.
    """
    if choice is None:
        return None
    if (named := CHOICES.get(type(choice))) is not None:
        return {"class": named.name} | {name: _value(value) for name, value in named.values(choice).items()}
    owner = type(choice)
    if is_dataclass(choice):
        names = [field.name for field in fields(choice) if field.compare]
    else:  # Cached properties are left out, because they appear in `vars` only after they have been read.
        names = [
            n
            for n in sorted(vars(choice))
            if n[0] != "_" and not isinstance(getattr(owner, n, None), functools.cached_property)
        ]
    return {"class": _qualified(owner)} | {name: _value(getattr(choice, name)) for name in names}


def _value(value: Any) -> Any:
    if isinstance(value, Enum):
        return f"{_qualified(type(value))}.{value.name}"
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):  # Python has no longdouble.
        return _value(value.item())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return _dtype(value)
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Tensor):
        elements = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return {
            "dtype": _dtype(value.dtype),
            "shape": list(value.shape),
            "elements": hashlib.sha256(elements).hexdigest(),
        }
    if isinstance(value, np.ndarray):
        return _value(value.tolist()) if value.dtype.hasobject else _value(torch.as_tensor(value))
    if isinstance(value, list | tuple):
        return [_value(part) for part in value]
    if isinstance(value, set | frozenset):
        return sorted((_value(part) for part in value), key=_text)
    if isinstance(value, dict):
        return {str(name): _value(part) for name, part in value.items()}
    if hasattr(value, "__qualname__"):
        return _qualified(value)
    if is_dataclass(value) or getattr(value, "__dict__", None):
        return _choice(value)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _qualified(named: Any) -> str:
    return f"{named.__module__.removeprefix('hybridmem.')}.{named.__qualname__}"


def _dtype(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype)


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def check_signature(path: str, about: dict[str, Any], spec: MemorySpec, page_tokens: int, rules: TailRules) -> None:
    """Raise FormatError unless the signature in a file is that of a memory with this spec and these options."""
    theirs, ours = about.get("signature"), signature_of(spec, page_tokens, rules)
    if not isinstance(theirs, dict):
        raise FormatError(f"{path} lacks the signature of its memory; save it again")
    found = None if _text(theirs) == _text(ours) else _difference(theirs, ours)
    if found is None:
        return
    where, their_value, our_value = found
    if where in ours and where != "layers":
        remedy = (
            "load it with that model's memory_spec"
            if where == "vocab_size"
            else f"make a memory with {where} like that"
        )
    else:
        where = f"other layers, policies or storages: {where}"
        remedy = "load it with that model's memory_spec, policies and storages"
    what = f"{where}={_short(their_value)}, not {_short(our_value)} as here"
    raise MismatchError(f"{path} was saved from a memory of {about.get('model')} with {what}; {remedy}")


def check_weights(path: str, about: dict[str, Any], spec: MemorySpec) -> None:
    """Raise MismatchError if a file says that it was computed with other weights. None means that it does not say."""
    theirs, ours = about.get("weights"), spec.weights
    if theirs is None or ours is None or theirs == ours:
        return
    (their_bits, _, their_digest), (our_bits, _, our_digest) = str(theirs).partition(":"), ours.partition(":")
    if their_digest == our_digest:
        raise MismatchError(
            f"{path} was computed by these weights in {their_bits}, not in {our_bits} as here, so its rows are others; "
            f"load the model in {their_bits}, or feed the tokens again"
        )
    raise MismatchError(
        f"{path} was computed by other weights ({_short(theirs)}) than those of {spec.model} ({ours}): by another "
        "checkpoint of the same shapes; load the model that saved it, or feed the tokens again"
    )


def _difference(theirs: Any, ours: Any, where: str = "") -> tuple[str, Any, Any] | None:
    """Find the first entry that differs. Return its place and both values, or None."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        pairs = [
            (f"{where}.{name}" if where else name, theirs.get(name), ours.get(name))
            for name in [*ours, *sorted(theirs.keys() - ours.keys())]
        ]
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        pairs = [(f"{where}[{i}]", *pair) for i, pair in enumerate(zip(theirs, ours, strict=True))]
    else:
        return None if _text(theirs) == _text(ours) else (where, theirs, ours)
    return next((found for name, a, b in pairs if (found := _difference(a, b, name)) is not None), None)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
