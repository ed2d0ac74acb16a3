"""Continues a stream of /v1/responses on another replica, as `cluster.serving.continuing` does for other streams.

Both replicas draw equal ids (`chat.server.sessions.responses.REPLY_SEED`), so their events name the same items. Only
the places where a text is cut into pieces may differ, and therefore the sequence numbers of events.
"""

from __future__ import annotations

import json
from typing import Any

from hybridmem.cluster.serving.parts import AnotherReplyError, StreamSoFar

_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


class ResponsesSoFar(StreamSoFar):
    """Records the events of a stream of /v1/responses."""

    def __init__(self) -> None:
        super().__init__()
        self._n_sent = 0
        self._created_at: Any = None

    def is_end(self, event: dict[str, Any]) -> bool:
        return event["type"] in _ENDS

    def rest_of(self, event: dict[str, Any]) -> dict[str, Any] | None:
        if self.is_first:
            self._created_at = event.get("response", {}).get("created_at", self._created_at)
        if not self._is_news(event):
            return None
        number, self._n_sent = self._n_sent, self._n_sent + 1
        if self.is_first:
            return event
        if "response" in event:
            event["response"]["created_at"] = self._created_at
        return event | {"sequence_number": number}

    def _is_news(self, event: dict[str, Any]) -> bool:
        """Remove the sent parts from an event. Return whether anything is left."""
        kind, about = event["type"], (event.get("item_id"), event.get("output_index"), event.get("content_index"))
        of_text = kind.rpartition(".")[0]
        if kind.endswith(".delta"):
            event["delta"] = self.rest_of_part((of_text, *about), event["delta"])
            return bool(event["delta"])
        if kind in _ENDS:
            return True
        if "prompt_progress" in event:
            return self.is_first
        part = self.parts.get((of_text, *about))
        if kind.endswith(".done") and part is not None and part.at < part.n_told:
            raise AnotherReplyError("a text ends before what has been sent")
        return self.is_unseen(kind, *about, json.dumps(event.get("item", {}).get("id")))
