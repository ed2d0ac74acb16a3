"""A model without a chat template continues texts, at the paths that `serve` names at its start."""

from __future__ import annotations

from typing import Any

from hybridmem.chat.commands.serving import CHATTING, CONTINUING
from hybridmem.chat.prompts import load_tokenizer
from hybridmem.models import EMBEDDED, LanguageModel
from tests.chat.servers import MODEL, running

MESSAGES = [{"role": "user", "content": "My cat"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "My cat", "max_tokens": 2},
    "/completion": {"prompt": "My cat", "n_predict": 2},
    "/v1/embeddings": {"input": "My cat", "pooling": "mean"},
    "/v1/score": {"prompt": "My cat", "choices": [" is", " was"]},
    "/v1/rerank": {"query": "cat", "documents": ["My cat", "My dog"]},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "My cat"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/api/chat": {"messages": MESSAGES, "stream": False},
}
GENERATE = {"model": MODEL, "prompt": "My cat", "stream": False, "options": {"num_predict": 2}}


def test_paths_that_are_named_work_and_others_say_what_does(embedded: LanguageModel) -> None:
    tokenizer = load_tokenizer(EMBEDDED)
    tokenizer.chat_template = None
    with running(embedded, tokenizer) as server:
        for path in CONTINUING:
            answer = server.call("POST", path, BODIES[path] | {"model": MODEL})
            assert answer.status == 200, (path, answer.body)
        assert server.call("POST", "/api/generate", GENERATE | {"raw": True}).status == 200
        for path in CHATTING:
            answer = server.call("POST", path, BODIES[path] | {"model": MODEL})
            assert answer.status == 400 and b"has no chat template" in answer.body, (path, answer.body)
        assert server.call("POST", "/api/generate", GENERATE).status == 400
