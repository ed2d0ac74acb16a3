"""Copies the path to a node, with its token ids, into a new session."""

from __future__ import annotations

from dataclasses import replace

from hybridmem.chat.stored.nodes import Node, new_id


def copy_path(session_id: str, path: list[Node]) -> list[Node]:
    """Return copies of these nodes with new ids, each after its parent. No copy is pinned."""
    ids = {node.id: new_id(node.id.partition("_")[0]) for node in path}
    return [
        replace(
            node, id=ids[node.id], session=session_id, parent=ids.get(node.parent or ""), base=ids.get(node.base or ""),
            about=_renamed(node.about, ids), pinned_until=None,
        )
        for node in path
    ]  # fmt: skip


def _renamed(about: dict[str, object], ids: dict[str, str]) -> dict[str, object]:
    """Return the fields of a response, with the new id of the response that it continues."""
    before = about.get("previous_response_id")
    return about | {"previous_response_id": ids.get(before)} if isinstance(before, str) else about
