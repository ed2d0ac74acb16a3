"""lm-eval and vLLM's clients ask for log probabilities of prompts over HTTP, and get those of transformers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from transformers import JambaForCausalLM

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.sampling.logprobs import Chosen
from hybridmem.chat.sampling.token_bytes import TokenBytes
from hybridmem.chat.server.logprobs import completion_logprobs
from hybridmem.chat.server.reranking import INSTRUCTION
from hybridmem.models import EMBEDDED
from tests.chat.servers import MODEL, Running

TEXTS = ["<|user|>My cat is called Zoe.<|end|><|assistant|>Okay, noted.", "What is", "My dog is called Rex and"]


def complete(server: Running, **asked: Any) -> dict[str, Any]:
    answer = server.call("POST", "/v1/completions", {"model": MODEL, "temperature": 0} | asked)
    assert answer.status == 200, answer.body
    return dict(answer.json)


@pytest.fixture(scope="module")
def logprobs_of() -> Any:
    model = JambaForCausalLM.from_pretrained(EMBEDDED)

    def compute(token_ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.tensor([token_ids])).logits[0].double().log_softmax(-1)

    return compute


def test_a_prompt_is_scored_as_transformers_scores_it(
    plain_server: Running, tokenizer: Tokenizer, logprobs_of: Any
) -> None:
    """lm-eval asks with token ids, echoed, with one alternative and one new token."""
    prompts = [tokenizer.encode(text) for text in TEXTS]
    assert int(logprobs_of(prompts[0])[-1].argmax()) == tokenizer.eos_token_id
    for _ in range(2):  # The second time, all prompts are in the cache.
        found = complete(plain_server, prompt=prompts, echo=True, logprobs=1, max_tokens=1, seed=1234)
        for choice, prompt in zip(found["choices"], prompts, strict=True):
            rows_SV, told = logprobs_of(prompt), choice["logprobs"]
            assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
            # lm-eval assumes that the last token is a new one. The server adds one, even if it is the token that ends
            # the reply.
            assert len(told["token_logprobs"]) == len(told["text_offset"]) == len(prompt) + 1
            expected = [float(rows_SV[i - 1, token]) for i, token in enumerate(prompt) if i]
            assert told["token_logprobs"][1 : len(prompt)] == pytest.approx(expected, abs=1e-4)
            highest = [max(top.values()) for top in told["top_logprobs"][1 : len(prompt)]]
            assert highest == pytest.approx(rows_SV[:-1].max(-1).values.tolist(), abs=1e-4)


def test_a_prompt_is_scored_without_a_reply(plain_server: Running) -> None:
    asked = {"prompt": TEXTS[:2], "echo": True, "logprobs": 0}
    found = complete(plain_server, max_tokens=0, **asked)
    assert found["usage"]["completion_tokens"] == 0
    for choice, text in zip(found["choices"], TEXTS, strict=False):
        assert (choice["text"], choice["finish_reason"]) == (text, "length")
        told = choice["logprobs"]
        assert told["top_logprobs"] is None and told["token_logprobs"][0] is None
        assert all(value <= 0 for value in told["token_logprobs"][1:])
        places = zip(told["tokens"], told["text_offset"], strict=True)
        assert all(text[at : at + len(token)] == token for token, at in places)
    parts = [json.loads(event)["choices"] for event in stream_of(plain_server, max_tokens=0, **asked)]
    streamed = [(choice["index"], choice["logprobs"]) for choices in parts for choice in choices if choice["logprobs"]]
    assert sorted(streamed, key=lambda pair: pair[0]) == [(i, c["logprobs"]) for i, c in enumerate(found["choices"])]


def stream_of(server: Running, **asked: Any) -> list[str]:
    body = {"model": MODEL, "temperature": 0, "stream": True} | asked
    *events, _ = server.call("POST", "/v1/completions", body).events
    return events


def test_prompts_are_scored_in_vllms_form(plain_server: Running, tokenizer: Tokenizer, logprobs_of: Any) -> None:
    prompt = tokenizer.encode(TEXTS[0])
    told = complete(plain_server, prompt=prompt, prompt_logprobs=2, max_tokens=1)["choices"][0]["prompt_logprobs"]
    assert told[0] is None and len(told) == len(prompt)
    rows_SV = logprobs_of(prompt)
    for i, each in enumerate(told[1:], 1):
        row_V = rows_SV[i - 1]
        assert each[str(prompt[i])]["logprob"] == pytest.approx(float(row_V[prompt[i]]), abs=1e-4)
        assert each[str(int(row_V.argmax()))]["rank"] == 1 and 2 <= len(each) <= 3
    chat = plain_server.chat(prompt_logprobs=0).json
    assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in plain_server.chat().json


class Words:
    """Is a tokenizer with these words.

    Words in brackets are bytes, as SentencePiece writes them.
    """

    def __init__(self, *names: str) -> None:
        self.names = names
        self.added_tokens_decoder = {0: object()}

    def get_vocab(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}


def test_a_character_of_several_tokens_counts_once() -> None:
    tokens = TokenBytes(Words("<s>", "▁Oh", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁é", "!"))
    told = completion_logprobs(tokens, [Chosen(i, -1.0) for i in range(8)], "Oh😀 é!", start=10)
    # The first token and the space of the first word are not in the text.
    assert told is not None and told["text_offset"] == [10, 10, 12, 12, 12, 12, 13, 15]


def test_the_likeliest_of_several_tokens_with_one_text_is_told() -> None:
    tokens = TokenBytes(Words("<s>", "<0x98>", "<0x80>", "▁a", "b"))
    chosen = Chosen(4, -3.0, top=((1, -0.5), (2, -1.0), (3, -1.5)))
    told = completion_logprobs(tokens, [chosen], "b")
    assert told is not None and told["top_logprobs"] == [{"\ufffd": -0.5, " a": -1.5, "b": -3.0}]


def test_choices_are_scored_behind_one_computation_of_their_prompt(
    plain_server: Running, tokenizer: Tokenizer, logprobs_of: Any
) -> None:
    plain_server.forget()
    told = "My cat is called Zoe. My dog is called Rex. " * 4
    question = f"<|user|>{told}What is my cat called?<|end|><|assistant|>"
    prompt = tokenizer.encode(question)
    choices = [f"Your cat is called {name}." for name in ("Rex", "Zoe", "Milo", "Zoe Zoe")]
    n_before = plain_server.engine.stats.n_fed
    found = plain_server.call("POST", "/v1/score", {"model": MODEL, "prompt": question, "choices": choices}).json
    n_choices = 0
    for choice, data in zip(choices, found["data"], strict=True):
        ids = tokenizer.encode(choice, add_special_tokens=False)
        rows_SV = logprobs_of([*prompt, *ids])[len(prompt) - 1 :]
        expected = [float(row[token]) for row, token in zip(rows_SV, ids, strict=False)]
        assert data["token_logprobs"] == pytest.approx(expected, abs=1e-4)
        assert data["score"] == pytest.approx(sum(expected), abs=1e-4)
        assert data["is_greedy"] == all(int(row.argmax()) == i for row, i in zip(rows_SV, ids, strict=False))
        assert "".join(data["tokens"]) == data["choice"] == choice
        n_choices += len(ids)
    assert found["best"] == 1 and found["data"][1]["is_greedy"]
    # Behind the last token of the prompt, each choice has its own first token.
    assert plain_server.engine.stats.n_fed - n_before <= len(prompt) + n_choices + len(choices)


def test_choices_of_messages_and_of_token_ids(plain_server: Running, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "My cat is called Zoe."}]
    choices: list[Any] = ["Okay, noted.", "Okay, <|end|>", tokenizer.encode("Okay", add_special_tokens=False)]
    found = plain_server.call("POST", "/v1/score", {"model": MODEL, "messages": messages, "choices": choices}).json
    assert found["best"] in (0, 2) and [len(data["tokens"]) > 1 for data in found["data"]] == [True, True, False]
    assert "<|end|>" not in found["data"][1]["tokens"]


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"choices": []}, "choices"),
        ({"choices": "a"}, "choices"),
        ({"choices": [5]}, "choices"),
        ({"choices": ["a"] * 257}, "choices"),
        ({"choices": [""]}, "choices"),
        ({"choices": [[10**6]]}, "choices"),
        ({"choices": ["a"], "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"choices": ["a"], "text_1": "a"}, "text_1"),
        ({"choices": ["cat " * 5000]}, "choices"),
    ],
)
def test_wrong_choices_are_named(plain_server: Running, change: dict[str, Any], param: str) -> None:
    answer = plain_server.call("POST", "/v1/score", {"model": MODEL, "prompt": "My cat"} | change)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_documents_are_ranked_by_how_well_the_query_follows_them(
    plain_server: Running, tokenizer: Tokenizer, logprobs_of: Any
) -> None:
    documents = ["My dog is called Rex.", {"text": "My cat is called Zoe."}, "My cat is called Milo."]
    asked = {"model": MODEL, "query": "My cat is called Zoe.", "documents": documents, "return_documents": True}
    found = plain_server.call("POST", "/v1/rerank", asked).json
    texts = [each["text"] if isinstance(each, dict) else each for each in documents]
    ids, expected = tokenizer.encode(asked["query"], add_special_tokens=False), []
    for text in texts:
        message = {"role": "user", "content": INSTRUCTION + text}
        prompt = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
        rows_SV = logprobs_of([*prompt, *ids])[len(prompt) - 1 :]
        expected.append(sum(float(row[token]) for row, token in zip(rows_SV, ids, strict=False)) / len(ids))
    order = sorted(range(3), key=lambda i: -expected[i])
    assert [result["index"] for result in found["results"]] == order
    scores = [result["relevance_score"] for result in found["results"]]
    assert [math.log(score) for score in scores] == pytest.approx([expected[i] for i in order], abs=1e-4)
    assert [result["document"]["text"] for result in found["results"]] == [texts[i] for i in order]
    n_before = plain_server.engine.stats.n_fed
    best = plain_server.call("POST", "/reranking", {"query": "What is it?", "documents": documents, "top_n": 1}).json
    assert len(best["results"]) == 1 and "document" not in best["results"][0]
    # The documents were computed before, so the second query computes only itself.
    assert plain_server.engine.stats.n_fed - n_before < 3 * 10


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"documents": []}, "documents"),
        ({"documents": [3]}, "documents"),
        ({"query": ""}, "query"),
        ({"top_n": 0}, "top_n"),
    ],
)
def test_wrong_rankings_are_refused_by_name(plain_server: Running, change: dict[str, Any], word: str) -> None:
    answer = plain_server.call("POST", "/rerank", {"query": "a", "documents": ["b"], **change})
    assert answer.status == 400 and word in answer.error["message"]
