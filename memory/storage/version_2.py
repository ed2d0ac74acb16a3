"""Saved sequences of format version 2, in which a digest of how specs print stood for a signature.

Their pools and layer memories had the names that they have here. Whoever renames one of these, or a field of a spec, keeps the old text in
this file; `tests/data` has files that say whether it is right.
"""

from __future__ import annotations

import hashlib
import re
from typing import Any

from memory.errors import FormatError
from memory.sequences.folding import TailRules
from memory.specs import MemorySpec, RecurrentSpec


def check_layout(path: str, about: dict[str, Any], spec: MemorySpec, page_tokens: int, rules: TailRules) -> None:
    """Raise FormatError unless a file with these contents suits a memory of this spec."""
    theirs = about.get("layout")
    if not isinstance(theirs, dict):
        raise FormatError(f"{path} does not say of what memory it is a part: it is a swapped-out one; give a file that memory.save wrote")
    for name, value in _layout(spec, page_tokens, rules).items():
        if theirs.get(name) != value:
            what = "other layers, policies or storages" if name == "layers" else f"{name}={theirs.get(name)!r}"
            remedy = "load it with that model's memory_spec" if name in ("layers", "vocab_size") else f"make a memory with {name} like that"
            raise FormatError(f"{path} was saved from a memory of {about.get('model')} with {what}, not {value!r} as here; {remedy}")


def _layout(spec: MemorySpec, page_tokens: int, rules: TailRules) -> dict[str, int | str]:
    layers = re.sub(r" at 0x[0-9a-f]+", "", repr(spec.layers))  # of a policy without a repr of its own
    if rules.defers:  # then tails hold what tokens did, of which a state's repr says nothing
        layers += repr([m.tail_parts(deferred=True) for _, m in spec.of_kind("recurrence") if isinstance(m, RecurrentSpec)])
    return {
        "vocab_size": spec.vocab_size, "dtype": str(spec.dtype), "page_tokens": page_tokens, "rollback_window": rules.rollback_window,
        "fold": rules.mode.value, "layers": hashlib.sha256(layers.encode()).hexdigest(),
    }  # fmt: skip
