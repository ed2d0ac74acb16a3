"""In each dialect, streams send something while their prompt is computed.

An error of the first step is still a status.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import replies, streams
from hybridmem.models import LanguageModel
from tests.chat.servers import MODEL, Gated, running

CAT = "My cat is called Zoe."
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": CAT}]}
WAITING = [
    pytest.param("/v1/chat/completions", CHAT, [b": "] * 3, id="chat"),
    pytest.param("/v1/completions", {"prompt": "My cat is"}, [b": "] * 3, id="completion"),
    pytest.param("/v1/messages", CHAT, [b"event: message_start", *[b"event: ping"] * 2], id="message"),
    pytest.param(
        "/v1/responses",
        {"input": CAT},
        [b"event: response.created", *[b"event: response.in_progress"] * 3],
        id="response",
    ),
]


@pytest.mark.parametrize(("path", "body", "expected"), WAITING)
def test_a_stream_speaks_before_its_first_token(
    embedded: LanguageModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str,
    body: dict[str, Any], expected: list[bytes],
) -> None:  # fmt: skip
    monkeypatch.setattr(streams, "STATUS_SECONDS", 0.01)
    monkeypatch.setattr(replies, "WAITING_SECONDS", 0.01)
    model = Gated(embedded)
    with running(model, tokenizer) as server:
        model.is_open = False
        connection = server.connect()
        sent = json.dumps({"model": MODEL, "stream": True, "temperature": 0} | body)
        connection.request("POST", path, sent, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200 and response.getheader("Content-Type", "").startswith("text/event-stream")
        events = list[bytes]()
        while len(events) < len(expected):
            line = response.readline()
            if line.startswith((b"event: ", b": ")):
                events.append(line)
        assert all(line.startswith(begin) for line, begin in zip(events, expected, strict=True))
        model.open()
        rest = response.read().decode()
        connection.close()
        whole = [json.loads(line[6:]) for line in rest.split("\n") if line.startswith("data: {")]
        assert "".join(map(text_of, whole)).strip()


def text_of(event: dict[str, Any]) -> str:
    """Return the text in an event of any of the dialects."""
    if "choices" in event:
        return "".join(choice.get("text", choice.get("delta", {}).get("content") or "") for choice in event["choices"])
    delta = event.get("delta", "")
    return str(delta.get("text", "")) if isinstance(delta, dict) else str(delta)
