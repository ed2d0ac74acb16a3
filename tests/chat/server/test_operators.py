"""The tests show what operators use: keys with limits, request ids, the access log, TLS, tokens and embeddings."""

from __future__ import annotations

import base64
import json
import logging
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hybridmem.chat.commands.serving import make_engine
from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions, bind, make_app
from hybridmem.chat.server.access_log import log, read_request_id
from hybridmem.chat.server.embedding import find_pooling
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.keys import Key, Keys, Use, hash_key
from hybridmem.chat.server.listening import Server, url_of
from hybridmem.memory import HybridMemory, SpecError
from hybridmem.models import LanguageModel
from tests.chat.servers import MODEL, Running, running, wait_until

TLS = Path(__file__).parents[2] / "data" / "tls"
ADA, BOB = Key("ada", "ada's secret", max_requests=1), Key("bob", key_sha256=hash_key(b"bob's").hex())


@pytest.fixture(scope="module")
def server(embedded: LanguageModel, tokenizer: Tokenizer) -> Iterator[Running]:
    options = ServerOptions(keys=(ADA, BOB), access_log="json", max_tokens=512)
    with running(embedded, tokenizer, options) as server:
        server.headers["Authorization"] = "Bearer bob's"
        yield server


# The tests below are about keys.


def test_each_client_has_a_key_of_its_own(server: Running) -> None:
    for key, status in (("ada's secret", 200), ("bob's", 200), ("eve's", 401)):
        assert server.call("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"}).status == status


def test_a_key_is_answered_so_many_requests_at_once() -> None:
    use = Use(ADA)
    use.check()
    use.n_requests = 1
    with pytest.raises(ApiError, match="1 requests are being answered"):
        use.check()


def test_tokens_a_minute_are_refilled_and_may_leave_a_debt() -> None:
    now = 0.0
    use = Use(Key("a", "b", tokens_per_minute=600), clock=lambda: now)
    use.check()
    use.charge(650)
    with pytest.raises(ApiError, match="600 tokens a minute") as refused:
        use.check()
    assert refused.value.headers == {"Retry-After": "6"}
    now = 5.2
    use.check()
    now = 1000.0
    use.charge(599)
    use.check()


def test_a_key_over_its_tokens_gets_429(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    options = ServerOptions(keys=(Key("a", "b", tokens_per_minute=5),))
    with running(embedded, tokenizer, options) as server:
        server.headers["Authorization"] = "Bearer b"
        assert server.chat().status == 200
        answer = server.chat()
        assert (answer.status, answer.error["code"]) == (429, "rate_limit_exceeded") and answer.headers["Retry-After"]


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ({"key": "a"}, "has no name"),
        ({"name": "a"}, "key or key_sha256"),
        ({"name": "a", "key": "b", "limit": 1}, "'limit'"),
        ({"name": "a", "key": " b"}, "spaces"),
        ({"name": "a", "key_sha256": "b"}, "64"),
        ({"name": "a", "key": "b", "max_requests": 0}, "max_requests=0"),
        ({"name": "a", "key": "b", "tokens_per_minute": "many"}, "tokens_per_minute='many'"),
    ],
)
def test_tables_of_keys_are_refused_by_name(table: dict[str, object], word: str) -> None:
    with pytest.raises(SpecError, match=word):
        ServerOptions(keys=(table,))  # type: ignore[arg-type]


def test_two_clients_cannot_have_one_key() -> None:
    with pytest.raises(SpecError, match="the same"):
        Keys((Key("a", "b"), Key("c", "b")))
    assert "secret" not in repr(ADA)


# The tests below are about request ids and the access log.


def test_a_request_keeps_its_id_and_is_logged_once(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=log.name):
        answer = server.call("POST", "/v1/chat/completions", b"{", headers={"X-Request-Id": "mine-7"})
        assert answer.headers["x-request-id"] == "mine-7"
        answer = server.chat()
        wait_until(lambda: len(caplog.records) >= 2)
    first, second = (json.loads(record.getMessage()) for record in caplog.records)
    assert (first["status"], first["request_id"], first["key"]) == (400, "mine-7", "bob")
    assert second["request_id"] == answer.headers["x-request-id"] and second["path"].startswith("/v1")
    usage = answer.json["usage"]
    assert (second["prompt_tokens"], second["completion_tokens"]) == (
        usage["prompt_tokens"],
        usage["completion_tokens"],
    )


def test_an_id_that_could_not_be_written_is_replaced() -> None:
    for given in (b"", b"two words", b"a\nb", b"x" * 129, "ä".encode()):
        assert read_request_id({b"x-request-id": given}).startswith("req_")


# The tests below are about TLS.


def test_tls(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    options = ServerOptions(ssl_certfile=str(TLS / "cert.pem"), ssl_keyfile=str(TLS / "key.pem"))
    memory = HybridMemory(embedded.memory_spec, "16MiB")
    engine, options = make_engine(embedded, memory, tokenizer, None, None, options, print)
    app = make_app(engine, tokenizer, MODEL, options)
    with bind("127.0.0.1", 0, has_key=False) as listener:
        server = Server(app)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: app.state.service.is_open)
            url = url_of(listener, has_tls=True)
            trusted = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
            with urllib.request.urlopen(f"{url}/v1/models", context=trusted) as answer:
                assert url.startswith("https://") and json.load(answer)["data"][0]["id"] == MODEL
        finally:
            server.should_exit = True
            thread.join()


@pytest.mark.parametrize("files", [("cert.pem", None), (None, "key.pem"), ("cert.pem", "cert.pem"), ("no", "no")])
def test_files_that_make_no_certificate(files: tuple[str | None, str | None]) -> None:
    certificate, key = (None if name is None else str(TLS / name) for name in files)
    with pytest.raises(SpecError, match=r"TLS needs both|cannot be used"):
        ServerOptions(ssl_certfile=certificate, ssl_keyfile=key)


# The tests below are about tokens, embeddings and models.


def test_texts_and_tokens(server: Running, tokenizer: Tokenizer) -> None:
    text = "<|bos|>My cat is called Zoe."
    ids = tokenizer.encode(text)
    found = server.call("POST", "/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True}).json
    assert (found["tokens"], found["count"], found["max_model_len"]) == (ids, len(ids), 512)
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(ids)
    assert server.call("POST", "/detokenize", {"tokens": ids}).json == {"prompt": text, "content": text}
    llama = server.call("POST", "/tokenize", {"content": text, "with_pieces": True}).json["tokens"]
    assert [each["id"] for each in llama] == ids and "".join(each["piece"] for each in llama) == text
    assert server.call("POST", "/tokenize", {"content": text, "parse_special": False}).json["tokens"] != ids
    messages = [{"role": "user", "content": "My cat is called Zoe."}]
    count = server.call("POST", "/tokenize", {"messages": messages}).json["count"]
    assert count == server.chat("My cat is called Zoe.").json["usage"]["prompt_tokens"]
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, "model"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ):
        assert server.call("POST", path, body).error["param"] == param


def test_embeddings(server: Running) -> None:
    def embed(text: object, **options: object) -> list[list[float]]:
        body = {"model": MODEL, "input": text, "pooling": "mean", **options}
        answer = server.call("POST", "/v1/embeddings", body).json
        assert answer["usage"]["total_tokens"] > 0
        return [each["embedding"] for each in answer["data"]]

    long = "My cat is called Zoe. " * 60  # This prompt takes several chunks.
    cat, dog, again = (
        np.array(vector) for vector in embed(["My cat is called Zoe.", "What?", "My cat is called Zoe."])
    )
    assert cat.shape == (128,) and abs(np.linalg.norm(cat) - 1) < 1e-5 and np.allclose(cat, again, atol=1e-5)
    assert cat @ dog < 0.999 and len(embed(long)[0]) == 128
    last = np.array(embed("My cat is called Zoe.", pooling="last")[0])
    assert not np.allclose(last, cat, atol=1e-3)
    coded = embed("My cat is called Zoe.", encoding_format="base64")[0]
    assert np.allclose(np.frombuffer(base64.b64decode(str(coded)), "<f4"), cat, atol=1e-5)
    for change, param in (({"pooling": None}, "pooling"), ({"dimensions": 7}, "dimensions"), ({"input": ""}, "input")):
        body = {"model": MODEL, "input": "a", "pooling": "last", **change}
        assert server.call("POST", "/v1/embeddings", body).error["param"] == param
    assert len(embed(["a"] * 20, user="ada")) == 20
    server.settle()


def test_a_checkpoint_may_say_how_it_embeds(tmp_path: Path) -> None:
    assert find_pooling(tmp_path) is None is find_pooling(None)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    assert find_pooling(tmp_path) == "mean"


def test_a_model_says_what_it_takes(server: Running) -> None:
    model = server.call("GET", f"/v1/models/{MODEL}").json
    told = model["hybrid_memory"]
    assert model["max_model_len"] == 512 and told["dtype"] == "float32" and told["device"] == "cpu"
    assert 0 < told["context_bytes"] < told["budget_bytes"] == server.memory.budget_bytes
