"""HTTP requests say how tokens are chosen and when a reply ends."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybridmem.chat.prompts import Tokenizer
from hybridmem.models import LanguageModel
from tests.chat.servers import MODEL, Gated, Running, running

NOTED = "Okay, noted."


def test_log_probabilities_are_those_of_the_tokens_of_the_reply(plain_server: Running, tokenizer: Any) -> None:
    found = plain_server.choice(logprobs=True, top_logprobs=3)
    entries = found["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == found["message"]["content"] == NOTED
    for entry in entries:
        assert bytes(entry["bytes"]).decode() == entry["token"] and len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"])  # The reply is greedy.
        assert -10 < entry["logprob"] <= 0
    assert plain_server.choice()["logprobs"] is None


def test_a_stream_has_the_same_log_probabilities(plain_server: Running) -> None:

    whole = plain_server.choice(logprobs=True)["logprobs"]["content"]
    *events, done = plain_server.chat(stream=True, logprobs=True).events
    chunks = [json.loads(event)["choices"][0] for event in events]
    streamed = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    assert done == "[DONE]" and [e["token"] for e in streamed] == [e["token"] for e in whole]


def test_log_probabilities_of_a_completion_say_where_tokens_begin(plain_server: Running) -> None:
    asked = {"model": MODEL, "prompt": "My cat", "temperature": 0, "max_tokens": 4, "logprobs": 2, "echo": True}
    found = plain_server.call("POST", "/v1/completions", asked).json["choices"][0]
    told = found["logprobs"]
    for token, at in zip(told["tokens"], told["text_offset"], strict=True):
        assert found["text"][at : at + len(token)] == token
    assert told["tokens"][:2] == ["My", " cat"] and len(told["tokens"]) == 6 and told["top_logprobs"][0] is None
    assert all(2 <= len(top) <= 3 for top in told["top_logprobs"][1:])


def test_bias_penalties_and_ends_have_their_effect(plain_server: Running, tokenizer: Any) -> None:
    okay, noted, end = (tokenizer.encode(text)[0] for text in ("Okay", " noted", "<|end|>"))
    assert plain_server.choice(logit_bias={str(okay): -100})["message"]["content"] != NOTED
    cut = plain_server.choice(stop_token_ids=[noted])
    assert (cut["message"]["content"], cut["finish_reason"]) == ("Okay,", "stop")
    long = plain_server.choice(ignore_eos=True, max_tokens=12)
    assert long["finish_reason"] == "length" and long["message"]["content"].startswith(NOTED)
    assert plain_server.chat(min_tokens=9, max_tokens=20).json["usage"]["completion_tokens"] >= 9
    repeated = plain_server.choice(logit_bias={str(okay): 50, str(end): -100}, max_tokens=6)["message"]["content"]
    assert repeated == "Okay" * 6
    varied = plain_server.choice(logit_bias={str(okay): 2}, presence_penalty=2, frequency_penalty=2, max_tokens=6)
    assert varied["message"]["content"].count("Okay") < 6


def test_a_deadline_cuts_a_reply(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    """By the test's clock, a step takes 0.01 s."""
    model = Gated(embedded)
    with running(model, tokenizer, clock=lambda: model.n_begun / 100) as server:
        found = server.chat(ignore_eos=True, max_tokens=3000, deadline_seconds=0.3).json
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"].startswith(NOTED)
    assert found["usage"]["completion_tokens"] == 30


def test_a_reply_outside_of_the_models_world_ends(plain_server: Running) -> None:
    for text in ("What is the capital of France?", "def f(x): return x+1", "a" * 300):
        assert plain_server.choice(text=text)["finish_reason"] == "stop"
        assert plain_server.choice(text=text, temperature=1, seed=1)["finish_reason"] == "stop"
