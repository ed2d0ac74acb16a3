"""Writes the tree of a prefix cache as entries of a folder or as text, and reads it from a folder."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

from hybridmem.memory.errors import FormatError, SpecError
from hybridmem.memory.interface import Sequence
from hybridmem.memory.prefix.radix_tree import Node
from hybridmem.memory.storage.folder_writing import Entry
from hybridmem.memory.views.text_tables import format_bytes

_PLACES = {"budget": "in the budget", "host": "in host memory", "disk": "in files"}


def entries_of(roots: dict[Hashable, Node]) -> Iterator[Entry]:
    """Generate the checkpoints of all owners, parents before children.

    Raises SpecError for an owner that files cannot hold. Equal trees give the same order, so a tree that is saved again
    finds its own blocks in the folder.
    """
    number = -1
    for owner, root in roots.items():
        label, nodes = as_label(owner), [(root, -1)]
        while nodes:
            node, above = nodes.pop()
            if node.mark is not None:
                number += 1
                yield Entry(node.mark, above, label)
                above = number
            nodes.extend((node.children[token], above) for token in sorted(node.children, reverse=True))


def tree_text(
    roots: dict[Hashable, Node], tier_of: Callable[[Sequence], str], held_bytes: Callable[[Sequence], int]
) -> str:
    """Return a line for each checkpoint, grouped by owner. Checkpoints that continue another one stand below it."""
    lines = list[str]()
    for owner, root in roots.items():
        lines += [] if owner is None else [f"of {owner!r:.80}"]
        nodes = [(root, 0)]
        while nodes:
            node, depth = nodes.pop()
            if node.mark is not None:
                size = f", {format_bytes(held_bytes(node.mark))}" if tier_of(node.mark) == "budget" else ""
                lines.append(f"{'  ' * depth}{node.depth:,} tokens{size}, {_PLACES[tier_of(node.mark)]}")
                depth += 1
            nodes.extend((child, depth) for child in reversed(node.children.values()))
    return "\n".join(lines)


def as_label(owner: Hashable) -> list[str | int | None]:
    """Return an owner as JSON values. Raises SpecError for an owner that files cannot hold."""
    if isinstance(owner, bytes):
        return ["bytes", owner.hex()]
    if owner is None or (isinstance(owner, str | int) and not isinstance(owner, bool)):
        return [type(owner).__name__, owner]
    raise SpecError(f"owner {owner!r:.80} cannot be written to a file; use None, a text, bytes or an integer")


def as_owner(label: list[str | int | None]) -> Hashable:
    """Return the owner from which `as_label` made this label. Raises FormatError."""
    try:
        kind, value = label
        return bytes.fromhex(str(value)) if kind == "bytes" else value
    except (TypeError, ValueError) as error:
        raise FormatError(f"{label!r:.80} is no owner of prefixes; save the cache again") from error
