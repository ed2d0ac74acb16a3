"""`usage` says with an extension why each token of a request was computed. Long prompts report their progress."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions
from hybridmem.chat.server.lengths import check_length
from hybridmem.models import LanguageModel
from tests.chat.servers import MODEL, Running, running

LONG = "My cat is called Zoe and my dog is called Rex. " * 12
LIMIT = 512


@pytest.fixture(scope="module")
def server(embedded: LanguageModel, tokenizer: Tokenizer) -> Iterator[Running]:
    with running(embedded, tokenizer, ServerOptions(max_tokens=LIMIT), step_tokens=40, max_running=8) as server:
        yield server


def usage_of(server: Running, text: str, **options: Any) -> dict[str, Any]:
    usage: dict[str, Any] = server.chat(text, **options).json["usage"]
    why = usage["hybrid_memory"]
    n_cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert why["reused_tokens"] == n_cached and why["computed_tokens"] == usage["prompt_tokens"] - n_cached
    assert all(why[f"{name}_seconds"] >= 0 for name in ("queue", "prefill", "decode")) and why["prefill_seconds"] > 0
    return usage


def test_a_request_says_what_was_reused_from_where_and_why(server: Running) -> None:
    server.forget()
    first = usage_of(server, LONG)["hybrid_memory"]
    assert (first["reused_tokens"], first["from"]) == (0, "nothing") and "seen before" in first["why"]
    again = usage_of(server, LONG)["hybrid_memory"]
    assert again["from"] == "window" and again["computed_tokens"] == 1 and "last token" in again["why"]
    other = usage_of(server, LONG[: len(LONG) // 2] + "What is my dog called?")["hybrid_memory"]
    assert other["from"] == "checkpoint" and 0 < other["replayed_tokens"] < other["computed_tokens"]
    assert "computed again" in other["why"]


def test_choices_of_one_prompt_count_it_once(server: Running) -> None:
    server.forget()
    usage = usage_of(server, "What is my cat called?", n=3, temperature=1, max_tokens=4)
    assert usage["completion_tokens"] <= 12 and usage["hybrid_memory"]["from"] == "nothing"


def test_each_chunk_may_count_what_there_is_so_far(server: Running) -> None:
    server.forget()
    told = {"include_usage": True, "continuous_usage_stats": True}
    *events, _ = server.chat(LONG, stream=True, return_progress=True, stream_options=told).events
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and 0 == counts[0] < counts[-1]


def test_progress_of_a_long_prompt(server: Running) -> None:
    def stream(**options: Any) -> list[dict[str, Any]]:
        events = server.chat(LONG, stream=True, stream_options={"include_usage": True}, **options).events
        return [json.loads(event) for event in events[:-1]]

    server.forget()
    assert all("prompt_progress" not in event for event in stream())
    server.forget()
    events = stream(return_progress=True)
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    n_prompt = events[-1]["usage"]["prompt_tokens"]
    done = [progress["processed"] for progress in told]
    assert len(told) >= 2 and done == sorted(done) and 0 < done[0] < done[-1] <= n_prompt
    assert {progress["total"] for progress in told} == {n_prompt}
    assert [event for event in events if "prompt_progress" in event] == events[: len(told)]
    again = [event["prompt_progress"] for event in stream(return_progress=True) if "prompt_progress" in event]
    assert all(progress["cache"] == n_prompt - 1 for progress in again)


def test_a_reply_that_may_be_longer_than_what_fits_is_cut(server: Running) -> None:
    """It ends when no tokens are left. Plain completions refuse such a request, as OpenAI's do."""
    assert server.chat(max_tokens=10 * LIMIT).json["choices"][0]["finish_reason"] == "stop"
    assert check_length(500, 100, 32, LIMIT, param="messages") == 12
    assert check_length(500, None, 32, LIMIT, param="messages") == 12
    assert check_length(LIMIT, 0, 32, LIMIT, param="prompt", is_cut=False) == 0
    body = {"model": MODEL, "prompt": "cat", "max_tokens": LIMIT}
    assert server.call("POST", "/v1/completions", body).error["code"] == "context_length_exceeded"


def test_a_prediction_is_accepted_where_it_is_right(server: Running) -> None:
    def details(content: Any) -> dict[str, int]:
        answer = server.chat(prediction={"type": "content", "content": content}).json
        assert answer["choices"][0]["message"]["content"] == "Okay, noted."
        counts: dict[str, int] = answer["usage"]["completion_tokens_details"]
        return counts

    right = details([{"type": "text", "text": "Okay, noted."}])
    assert right["accepted_prediction_tokens"] >= 2
    none = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0, "reasoning_tokens": 0}
    assert details("Nothing of it.") == none
    assert server.chat(prediction={"type": "content"}).error["param"] == "prediction.content"
