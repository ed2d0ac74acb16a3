"""The API of llama.cpp's server gives the replies of /v1/completions in its own form, whole and as a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from hybridmem.chat.engine.blank_drafts import BlankDrafter
from hybridmem.chat.engine.drafting import Speculation
from hybridmem.chat.prompts import Tokenizer, load_tokenizer
from hybridmem.chat.server import ServerOptions
from hybridmem.memory import HybridMemory
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import EMBEDDED, LanguageModel, load_model
from tests.chat.servers import MODEL, Answer, Running, running

PROMPT = "<|bos|><|user|>My cat is called Zoe.<|end|><|assistant|>"
NOTED = "Okay, noted."


def complete(server: Running, **body: Any) -> Answer:
    return server.call("POST", "/completion", {"prompt": PROMPT, "temperature": 0} | body)


def test_a_completion_whole_and_as_a_stream(plain_server: Running, tokenizer: Tokenizer) -> None:
    whole = complete(plain_server, n_predict=20, n_probs=2).json
    assert (whole["content"], whole["stop_type"], whole["stop"], whole["prompt"]) == (NOTED, "eos", True, PROMPT)
    assert whole["tokens"] == tokenizer.encode(NOTED, add_special_tokens=False)
    assert whole["tokens_predicted"] == len(whole["tokens"]) + 1 and whole["tokens_evaluated"] == 10
    first = whole["completion_probabilities"][0]
    assert first["id"] == whole["tokens"][0] == first["top_logprobs"][0]["id"] and len(first["top_logprobs"]) == 2
    events = [json.loads(event) for event in complete(plain_server, n_predict=20, stream=True).events]
    *pieces, last = events
    assert "".join(event["content"] for event in pieces) == NOTED and last["stop_type"] == "eos"
    assert [token for event in pieces for token in event["tokens"]] == whole["tokens"]
    assert not any(event["stop"] for event in pieces) and last["content"] == ""
    for end in (whole, last):
        assert end["timings"]["prompt_n"] + end["timings"]["cache_n"] == 10 and end["timings"]["predicted_n"] == 5


@pytest.mark.parametrize(
    ("asked", "kind", "word", "content"),
    [
        ({"n_predict": 2}, "limit", "", "Okay,"),
        ({"stop": ["noted"]}, "word", "noted", "Okay, "),
        ({"n_predict": -1}, "eos", "", NOTED),
        ({"n_predict": 0}, "limit", "", ""),
        ({"grammar": 'root ::= "<" [a-c] ">"'}, "eos", "", None),
    ],
)
def test_why_a_completion_ended(
    plain_server: Running, asked: dict[str, Any], kind: str, word: str, content: str | None
) -> None:
    found = complete(plain_server, **asked).json
    assert (found["stop_type"], found["stopping_word"]) == (kind, word)
    assert found["content"] == content if content is not None else found["content"][1] in "abc"


def test_sampling_has_the_names_of_chats(plain_server: Running) -> None:
    drawn = {"temperature": 1.5, "seed": 5, "top_k": 9, "repeat_penalty": 1.2, "logit_bias": [[7, -1.0]]}
    body = drawn | {"model": MODEL, "max_tokens": 8, "prompt": PROMPT, "logit_bias": {"7": -1}}
    expected = plain_server.call("POST", "/v1/completions", body).json["choices"][0]["text"]
    answer = complete(plain_server, n_predict=8, cache_prompt=True, id_slot=3, samplers=["top_k"], **drawn)
    assert answer.status == 200, answer.body
    found = answer.json
    assert found["content"] == expected


def test_what_clients_ask_before_they_begin(plain_server: Running, tokenizer: Tokenizer) -> None:
    props = plain_server.call("GET", "/props").json
    assert props["default_generation_settings"]["n_ctx"] == plain_server.service.context_tokens
    assert props["chat_template"] == tokenizer.chat_template and props["eos_token"] == tokenizer.eos_token
    messages = [{"role": "user", "content": "My cat is called Zoe."}]
    assert plain_server.call("POST", "/apply-template", {"messages": messages}).json == {"prompt": PROMPT}
    assert plain_server.call("GET", "/slots").json == []


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/completion", {"prompt": ["a", "b"]}, 400, "prompt"),
        ("/completion", {}, 400, "prompt"),
        ("/completion", {"prompt": "a", "mirostat": 2}, 400, "mirostat"),
        ("/completion", {"prompt": "a", "model": "other"}, 404, "other"),
        ("/slots/0", {"filename": "a"}, 400, "action"),
        ("/slots/0?action=save", {"filename": "a"}, 501, "--slot-save-path"),
        ("/slots/7?action=erase", {}, 404, "'id_slot': 7"),
        ("/embedding", {"content": "a"}, 400, "--pooling"),
        ("/embedding", {"content": "a", "embd_normalize": -1}, 400, "embd_normalize"),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, 501, "gaps"),
        ("/apply-template", {"messages": []}, 400, "messages"),
    ],
)
def test_what_is_refused_is_named(
    plain_server: Running, path: str, body: dict[str, Any], status: int, word: str
) -> None:
    answer = plain_server.call("POST", path, body)
    assert answer.status == status and word in answer.error["message"]


def test_gaps_are_filled_where_the_vocabulary_has_marks_for_them(embedded: LanguageModel) -> None:
    texts = load_tokenizer(EMBEDDED)
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    # The vocabulary has no place left, so three of its words become marks.
    for mark, token in zip(marks, (900, 901, 902), strict=True):
        texts = renamed(texts, token, mark)
    with running(embedded, texts) as server:
        asked = {"input_prefix": "My cat is", "input_suffix": " Zoe.", "prompt": " called", "n_predict": 1}
        answer = server.call("POST", "/infill", asked)
        parts = [texts.encode(text, add_special_tokens=False) for text in ("My cat is", " Zoe.", " called")]
        wanted = [900, *parts[0], 901, *parts[1], 902, *parts[2]]
        with server.engine.lock:
            owner = server.service.owners.of_prefixes(lambda _: None, Nobody())
            assert [mark.length for mark in server.prefixes.checkpoints_of(wanted, owner)] == [len(wanted)]
        assert answer.json["tokens_evaluated"] == len(wanted)


class Nobody:
    cache_salt = prompt_cache_key = user = None


def renamed(texts: Tokenizer, token: int, name: str) -> Tokenizer:
    """Return a tokenizer in whose vocabulary a token is a special one of another name."""
    told = json.loads(texts.backend_tokenizer.to_str())
    vocabulary = told["model"]["vocab"]
    old = next(word for word, i in vocabulary.items() if i == token)
    del vocabulary[old]
    told["model"]["merges"] = [
        merge for merge in told["model"].get("merges", []) if old not in ("".join(merge), *merge)
    ]
    vocabulary[name] = token
    changed = type(texts.backend_tokenizer).from_str(json.dumps(told))
    changed.add_special_tokens([AddedToken(name, special=True)])
    special = {"bos_token": texts.bos_token, "eos_token": texts.eos_token}
    return PreTrainedTokenizerFast(tokenizer_object=changed, chat_template=texts.chat_template, **special)


def test_slots_are_saved_erased_and_restored(embedded: LanguageModel, tokenizer: Tokenizer, tmp_path: Path) -> None:
    options = ServerOptions(slot_save_path=str(tmp_path), isolate=True)
    long = "<|bos|><|user|>" + "My cat is called Zoe. " * 20 + "<|end|><|assistant|>"

    def change(server: Running, action: str, name: str = "a.bin", **body: Any) -> Answer:
        return server.call("POST", f"/slots/3?action={action}", {"filename": name} | body)

    with running(embedded, tokenizer, options) as server:
        first = complete(server, prompt=long, n_predict=4, id_slot=3).json
        assert first["id_slot"] == 3 and first["timings"]["cache_n"] == 0
        saved = change(server, "save").json
        assert saved["n_saved"] >= first["tokens_evaluated"] and saved["filename"] == "a.bin"
        for name in ("../a", "", "a/b", ".a"):
            assert "filename" in change(server, "save", name).error["message"]
        assert change(server, "save", user="another").status == 404
        assert change(server, "restore", user="another").status == 400, "files of others are not found"
        assert change(server, "erase").json == {"id_slot": 3, "n_erased": saved["n_saved"]}
        assert complete(server, prompt=long, n_predict=4).json["timings"]["cache_n"] == 0
    with running(embedded, tokenizer, options) as server:  # This is a new server, as after a restart.
        restored = change(server, "restore").json
        assert (restored["n_restored"], restored["n_read"]) == (saved["n_saved"], saved["n_written"])
        again = complete(server, prompt=long, n_predict=4).json
        assert again["content"] == first["content"] and again["timings"]["cache_n"] == first["tokens_evaluated"] - 1
        assert change(server, "restore", "missing.bin").status == 400


def test_a_slot_takes_along_what_a_draft_head_remembers(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model: Any = load_model("embedded", draft_head=True)
    known = list[bool]()
    for action in ("save", "restore"):
        own = HybridMemory(model.draft_head.memory_spec, "8MiB")
        drafter = BlankDrafter(model, model.draft_head, own, prefixes=PrefixCache(own))
        options, speculation = ServerOptions(slot_save_path=str(tmp_path)), Speculation(adapts=False, drafter=drafter)
        with running(model, tokenizer, options, speculation=speculation) as server:
            if action == "save":
                complete(server, prompt="<|bos|><|user|>My cat is called Zoe.<|end|>" * 3, n_predict=4, id_slot=3)
            body = {"filename": "a.bin"}
            assert server.call("POST", f"/slots/3?action={action}", body).status == 200
            (prefix, *_) = sorted(server.prefixes.resumable(), key=lambda each: -each.n_tokens)
            texts = server.engine.drafted_texts
            assert texts is not None
            known.append(texts.hold(prefix.checkpoint.tokens, prefix.owner))
            texts.prefixes.clear()
    assert known == [True, True]


def test_each_event_may_have_the_times_so_far(plain_server: Running) -> None:
    events = complete(plain_server, n_predict=20, stream=True, timings_per_token=True).events
    timings = [json.loads(event)["timings"] for event in events]
    counts = [each["predicted_n"] for each in timings]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    assert [each["predicted_ms"] for each in timings] == sorted(each["predicted_ms"] for each in timings)


def test_embeddings_are_those_of_openais_clients(plain_server: Running) -> None:
    asked = {"model": MODEL, "input": ["a cat", "a dog"], "pooling": "mean"}
    wanted = [each["embedding"] for each in plain_server.call("POST", "/v1/embeddings", asked).json["data"]]
    found = plain_server.call("POST", "/embedding", {"content": ["a cat", "a dog"], "pooling": "mean"}).json
    assert found == [{"index": i, "embedding": [vector]} for i, vector in enumerate(wanted)]
