"""Describes the trees in saved files: a sequence's checkpoints and forks, a chat's branches, or cached prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hybridmem.memory.blocks import EMPTY
from hybridmem.memory.storage import SavedFamily


@dataclass(frozen=True)
class Branch:
    """Describes one entry of a tree. In a list, it comes after the entry that it grew from.

    Attributes:
        depth: the number of edges from the root of the tree to this entry. The root has depth 0.
        n_tokens: its length in tokens. None if the file does not say.
        n_bytes: the bytes that no earlier entry shares. None if the file has no bytes of this entry.
    """

    what: str
    depth: int
    n_tokens: int | None
    n_bytes: int | None


def members_of(saved: SavedFamily) -> tuple[Branch, ...]:
    """Describe the sequence, the checkpoints and the forks of a file. Damaged ones are shown without bytes."""
    seen: dict[str, int] = {}
    found = []
    for member in saved.members:
        n_bytes = 0
        for pool, numbers in member.held.numbers.items():
            (blocks,) = saved.blocks[pool]
            new = np.unique(numbers[numbers >= seen.get(pool, 0)])
            seen[pool] = max(seen.get(pool, 0), int(numbers.max(initial=-1)) + 1)
            n_bytes += len(new) * blocks.shape[1]
        name = member.kind + (f" {member.name!r}" if member.name else "")
        found.append(Branch(name, int(member.kind != "sequence"), member.length, n_bytes))
    return (*found, *(Branch(f"{damaged}: damaged", 1, None, None) for damaged in saved.damaged))


def branches_of(about: dict[str, Any]) -> tuple[Branch, ...]:
    """Describe the sessions of a saved chat, each by its user's last message.

    Raises KeyError and the like if `about` is malformed.
    """
    sessions = [about, *about.get("branches", ())]
    depths: list[int] = []
    found = []
    for session in sessions:
        parent, own = session.get("parent"), [m for m in session["messages"] if m["role"] == "user"]
        depths.append(0 if parent is None or not 0 <= parent < len(depths) else 1 + depths[parent])
        said = f"{own[-1]['content']!s:.60}" if own else "(nothing said)"
        found.append(Branch(f"{len(session['messages'])} messages … {said}", depths[-1], None, None))
    return tuple(found)


def prefixes_in(folder: Path, about: dict[str, Any]) -> tuple[Branch, ...]:
    """Describe the checkpoints that a prefix cache has saved.

    Raises KeyError and the like if `about` is malformed.
    """
    tokens, at, depths = about.get("tokens", EMPTY), 0, list[int]()
    found = []
    for entry in about["entries"]:
        parent, n_tokens = int(entry["parent"]), int(entry["n_tokens"])
        n_new = n_tokens - (int(about["entries"][parent]["n_tokens"]) if parent >= 0 else 0)
        first = ", ".join(map(str, tokens[at : at + min(n_new, 4)].tolist()))
        at += n_new
        depths.append(0 if parent < 0 else 1 + depths[parent])
        path = None if entry["file"] is None else folder / Path(str(entry["file"])).name
        n_bytes = 0 if path is None else path.stat().st_size if path.exists() else None
        owner = "" if entry["label"][1] is None else f" of {entry['label'][1]!r}"
        gone = ": its file is gone" if n_bytes is None else ""
        found.append(Branch(f"tokens {first} …{owner}{gone}", depths[-1], n_tokens, n_bytes))
    return tuple(found)
