"""Continues a stream of /v1/responses on another replica, as `cluster.serving.continuing` does for other streams.

Both replicas draw equal ids (`chat.server.sessions.responses.REPLY_SEED`), so their events name the same items. Only
the places where a text is cut into pieces may differ, and therefore the sequence numbers of events.
"""

from __future__ import annotations

import json
from typing import Any

from hybridmem.cluster.serving.parts import AnotherReplyError, Name, PartSoFar

_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


class ResponsesSoFar:
    """Records the events of a stream of /v1/responses, and returns the unsent part of a second such stream."""

    def __init__(self) -> None:
        self._is_first = True
        self._n_sent = 0
        self._created_at: Any = None
        self._parts: dict[Name, PartSoFar] = {}
        self._seen: set[Name] = set()

    def begin_again(self) -> None:
        """Treat the next events as those of another stream of the same response."""
        self._is_first = False
        for part in self._parts.values():
            part.at = 0

    def is_end(self, event: dict[str, Any]) -> bool:
        """Return True for the last event of a stream."""
        return event["type"] in _ENDS

    def rest_of(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """Return the unsent part of an event, or None if all of it was sent. Raises AnotherReplyError."""
        if self._is_first:
            self._created_at = event.get("response", {}).get("created_at", self._created_at)
        if not self._is_news(event):
            return None
        number, self._n_sent = self._n_sent, self._n_sent + 1
        if self._is_first:
            return event
        if "response" in event:
            event["response"]["created_at"] = self._created_at
        return event | {"sequence_number": number}

    def _is_news(self, event: dict[str, Any]) -> bool:
        """Remove the sent parts from an event. Return whether anything is left."""
        kind, about = event["type"], (event.get("item_id"), event.get("output_index"), event.get("content_index"))
        of_text = kind.rpartition(".")[0]
        if kind.endswith(".delta"):
            event["delta"] = self._parts.setdefault((of_text, *about), PartSoFar()).rest_of(event["delta"])
            return bool(event["delta"])
        if kind in _ENDS:
            return True
        if "prompt_progress" in event:
            return self._is_first
        part = self._parts.get((of_text, *about))
        if kind.endswith(".done") and part is not None and part.at < part.n_told:
            raise AnotherReplyError("a text ends before what has been sent")
        name = (kind, *about, json.dumps(event.get("item", {}).get("id")))
        is_new = name not in self._seen
        self._seen.add(name)
        return is_new
