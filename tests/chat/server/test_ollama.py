"""Ollama's API gives the replies of chats in its own form, whole and line by line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hybridmem.chat.engine.engine import Generation
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.sampling.token_bytes import TokenBytes
from hybridmem.chat.server.ollama.format import OllamaFormat
from hybridmem.chat.server.ollama.schema import read_chat, read_generate
from hybridmem.chat.server.replies import Piece
from hybridmem.chat.tools.families import HERMES, Habits
from hybridmem.chat.tools.reading import ReplyReader
from tests.chat.servers import MODEL, Answer, Running

NOTED = "Okay, noted."
CAT = [{"role": "user", "content": "My cat is called Zoe."}]
GREEDY = {"options": {"temperature": 0, "num_ctx": 4096, "num_predict": -1}}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
USAGE: dict[str, Any] = {
    "prompt_tokens": 12,
    "completion_tokens": 3,
    "hybrid_memory": {"queue_seconds": 0.5, "prefill_seconds": 1.5, "decode_seconds": 2.0},
}


def post(server: Running, path: str, **body: Any) -> Answer:
    return server.call("POST", path, {"model": MODEL, **GREEDY} | body)


def lines_of(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status == 200 and answer.headers["Content-Type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.body.decode().splitlines()]


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_reply_whole_and_line_by_line(plain_server: Running, path: str) -> None:
    asked = {"messages": CAT} if path == "/api/chat" else {"prompt": CAT[0]["content"]}
    text = (lambda told: told["message"]["content"]) if path == "/api/chat" else (lambda told: told["response"])
    whole = post(plain_server, path, stream=False, **asked).json
    *lines, last = lines_of(post(plain_server, path, **asked))
    assert text(whole) == "".join(map(text, lines)) == NOTED and text(last) == ""
    for end in (whole, last):
        assert (end["done"], end["done_reason"], end["model"]) == (True, "stop", MODEL)
        assert end["eval_count"] == 5 and end["prompt_eval_count"] == 10 and end["total_duration"] > 0
    assert not any(line["done"] for line in lines)
    cut = post(plain_server, path, stream=False, **asked, options={"temperature": 0, "num_predict": 2}).json
    assert (text(cut), cut["done_reason"]) == ("Okay,", "length")


def test_a_raw_prompt_is_continued_as_it_is(plain_server: Running) -> None:
    prompt = "<|bos|><|user|>My cat is called Zoe.<|end|><|assistant|>Okay,"
    found = post(plain_server, "/api/generate", prompt=prompt, raw=True, stream=False).json
    assert found["response"] == " noted."
    lines = lines_of(post(plain_server, "/api/generate", prompt=prompt, raw=True))
    assert "".join(line["response"] for line in lines) == " noted."


@pytest.mark.parametrize("n_pieces", [1, 5, 40])
def test_thoughts_and_calls_line_by_line(tokenizer: Tokenizer, n_pieces: int) -> None:
    calls = "".join(
        f"<tool_call>\n{json.dumps({'name': 'look', 'arguments': {'far': far}})}\n</tool_call>\n"
        for far in (True, False)
    )
    text = f"<think>\nHm.\n</think>\n\nLet me look.{calls}"
    habits = Habits(HERMES, thinks=True, shows_special=False, template="", special=frozenset())
    form = OllamaFormat(MODEL, True, TokenBytes(tokenizer), lambda: ReplyReader(habits, (), HERMES))
    generation = Generation(0, 12, 0.0, text=text, finish_reason="stop")
    stream = form.begin()
    for i in range(n_pieces):
        part = text[len(text) * i // n_pieces : len(text) * (i + 1) // n_pieces]
        stream += form.add(Piece(0, part, generation, is_last=i == n_pieces - 1, heard_at=0.0), lambda: USAGE)
    lines = [json.loads(line) for line in (stream + form.end(lambda: USAGE)).splitlines()]
    messages = [line["message"] for line in lines]
    whole = form.whole([generation], USAGE)
    assert "".join(m["content"] for m in messages) == whole["message"]["content"] == "Let me look."
    assert "".join(m.get("thinking", "") for m in messages).strip() == whole["message"]["thinking"].strip() == "Hm."
    told = [call for m in messages for call in m.get("tool_calls", ())]
    assert told == whole["message"]["tool_calls"]
    assert [call["function"]["arguments"]["far"] for call in told] == [True, False]
    names = ("total_duration", "prompt_eval_duration", "eval_duration", "prompt_eval_count", "eval_count")
    assert [lines[-1][name] for name in names] == [4e9, 1.5e9, 2e9, 12, 3]


def test_fields_mean_the_same_as_in_chats() -> None:
    call = {"function": {"name": "look", "arguments": {"far": True}}}
    messages = [
        *CAT,
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call, call]},
        {"role": "tool", "content": "a", "tool_name": "look"},
        {"role": "tool", "content": "b", "tool_name": "look"},
    ]
    body = {
        "model": f"{MODEL}:latest", "messages": messages, "tools": [TOOL], "think": False, "format": "json",
        "keep_alive": "5m", "logprobs": True, "top_logprobs": 2,
        "options": {"temperature": 0.5, "repeat_penalty": 1.1, "stop": ["x"], "num_predict": 7, "seed": 3, "top_k": 4},
    }  # fmt: skip
    asked = read_chat(json.dumps(body).encode()).as_chat()
    told = [message.as_template_knows() for message in asked.messages]
    ids = [call["id"] for call in told[1]["tool_calls"]]
    assert len(set(ids)) == 2 and [message["tool_call_id"] for message in told[2:]] == ids
    assert told[1]["reasoning_content"] == "Hm." and told[1]["tool_calls"][0]["function"]["arguments"] == {"far": True}
    assert (asked.model, asked.wanted_tokens, asked.stop, asked.n_logprobs) == (MODEL, 7, ("x",), 2)
    sampling = asked.sampling(0)
    assert (sampling.temperature, sampling.repetition_penalty, sampling.top_k, sampling.seed) == (0.5, 1.1, 4, 3)
    assert asked.shape is not None and asked.told_options("enable_thinking") == {"enable_thinking": False}
    generate = {"model": MODEL, "prompt": "a", "system": "b", "format": {"type": "object"}, "think": "low"}
    chat = read_generate(json.dumps(generate).encode()).as_chat()
    assert [(message.role, message.content) for message in chat.messages] == [("system", "b"), ("user", "a")]
    assert chat.shape is not None and chat.effort == "low"


def test_a_required_form_and_log_probabilities(plain_server: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    found = post(plain_server, "/api/chat", messages=CAT, format=schema, stream=False, logprobs=True).json
    assert json.loads(found["message"]["content"])["a"] in (1, 2)
    assert all(entry["logprob"] <= 0 for entry in found["logprobs"])


def test_what_clients_ask_about_models(plain_server: Running) -> None:
    for path in ("/api/tags", "/api/ps"):
        assert [model["name"] for model in plain_server.call("GET", path).json["models"]] == [MODEL]
    shown = plain_server.call("POST", "/api/show", {"model": f"{MODEL}:latest"}).json
    assert shown["model_info"]["jamba.context_length"] == plain_server.service.context_tokens
    assert shown["capabilities"] == ["completion"] and "version" in plain_server.call("GET", "/api/version").json
    assert post(plain_server, "/api/chat").json["done_reason"] == "load"
    assert post(plain_server, "/api/generate").json["done_reason"] == "load"


@pytest.mark.parametrize(
    ("path", "change", "status", "word"),
    [
        ("/api/chat", {"model": "other", "messages": CAT}, 404, "other"),
        ("/api/show", {"model": "other"}, 404, "other"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, 400, "images"),
        ("/api/generate", {"prompt": "a", "context": [1, 2]}, 400, "context"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/api/chat", {"messages": CAT, "options": {"mirostat": 2}}, 400, "mirostat"),
        ("/api/chat", {"messages": CAT, "format": "xml"}, 400, "format"),
        ("/api/chat", {"messages": CAT, "wings": 2}, 400, "wings"),
        ("/api/pull", {}, 404, "/api/pull"),
    ],
)
def test_what_is_refused_is_named(
    plain_server: Running, path: str, change: dict[str, Any], status: int, word: str
) -> None:
    options = {} if path in ("/api/show", "/api/pull") else GREEDY
    answer = plain_server.call("POST", path, {"model": MODEL, **options} | change)
    assert answer.status == status and answer.json.keys() == {"error"} and word in answer.json["error"]
