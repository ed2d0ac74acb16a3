"""Requests of every dialect may have pictures. The tests check what is read, shared and refused."""

from __future__ import annotations

import base64
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from hybridmem.chat.server import ServerOptions
from hybridmem.chat.server.pictures import Sight, mark_part
from hybridmem.chat.special_tokens.marks import names_in
from hybridmem.models import LanguageModel, load_model
from hybridmem.models.vision.pictures import pictures_of
from tests.chat.servers import MODEL, Answer, Running, running
from tests.models.seeing import as_png, draw_picture, write_qwen3_5
from tests.speaker import tokenizer_of_speaker

WIDE = as_png(draw_picture(1, 72, 40))
N_ROWS = 45
"""Of this picture: 10 × 18 patches, of which 2 × 2 make a row."""
KEYS = ("alice-key-0123456789", "bob-key-0123456789")


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def asked(*parts: dict[str, Any], **options: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What is this?"}]
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 3, **options}


BASE: dict[str, Any] = {"model": MODEL, "max_output_tokens": 3, "temperature": 0}
SHOW = BASE | {
    "input": [
        {
            "role": "user",
            "content": [
                {"type": "input_image", "image_url": data_url(WIDE)},
                {"type": "input_text", "text": "What is this?"},
            ],
        }
    ]
}
"""A request of /v1/responses with a picture."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder, n = tmp_path_factory.mktemp("seeing"), len(tokenizer_of_speaker())
    write_qwen3_5(folder, placeholder=n, vocab_size=n + 4)
    return load_model(folder)


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """Return a host that has a picture at /cat.png, and redirects /away to it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_away = self.path == "/away"
            self.send_response(302 if is_away else 200)
            if is_away:
                self.send_header("Location", "/cat.png")
            self.end_headers()
            if not is_away:
                self.wfile.write(WIDE)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def server(model: LanguageModel, host: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    options = ServerOptions(
        keys=tuple({"name": key.partition("-")[0], "key": key} for key in KEYS),  # type: ignore[arg-type]
        picture_hosts=(host,), max_pictures=2, max_picture_pixels=10_000, max_picture_bytes=100_000,
    )  # fmt: skip
    with running(model, tokenizer_of_speaker(), options, stop_ids=()) as server:
        yield server


def post(server: Running, body: dict[str, Any], path: str = "/v1/chat/completions", key: str = KEYS[0]) -> Answer:
    return server.call("POST", path, body, {"Authorization": f"Bearer {key}"})


def usage_of(answer: Answer) -> tuple[int, int]:
    """Return the tokens of a prompt, and how many of them were reused."""
    assert answer.status == 200, answer.body
    usage = answer.json["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def test_users_share_a_picture_where_their_keys_allow(server: Running, model: LanguageModel) -> None:
    server.forget()
    before = pictures_of(model).n_computed
    other = as_png(draw_picture(9, 72, 40))
    n_prompt, _ = usage_of(post(server, asked(image(data_url(WIDE)))))
    without, _ = usage_of(post(server, asked()))
    assert n_prompt == without + N_ROWS + 2
    n_again, n_shared = usage_of(post(server, asked(image(data_url(WIDE), detail="high"), n=2, temperature=1)))
    assert n_again == n_prompt and n_shared > N_ROWS
    assert usage_of(post(server, asked(image(data_url(WIDE))), key=KEYS[1]))[1] < N_ROWS
    assert usage_of(post(server, asked(image(data_url(other)))))[1] < N_ROWS
    assert pictures_of(model).n_computed <= before + 2


def test_dialects_make_the_same_prompt(server: Running) -> None:
    server.forget()
    n_prompt, _ = usage_of(post(server, asked(image(data_url(WIDE)))))
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(WIDE).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is this?"}]
    claude = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": content}]}
    answer = post(server, claude, "/v1/messages")
    assert answer.status == 200, answer.body
    usage = answer.json["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n_prompt
    assert usage["cache_read_input_tokens"] > N_ROWS
    counted = post(server, claude, "/v1/messages/count_tokens").json["input_tokens"]
    ollama = {"role": "user", "content": "What is this?", "images": [base64.b64encode(WIDE).decode()]}
    answer = post(
        server, {"model": MODEL, "messages": [ollama], "stream": False, "options": {"num_predict": 3}}, "/api/chat"
    )
    assert answer.json["prompt_eval_count"] == n_prompt == counted


def test_stored_responses_go_on_behind_a_picture(server: Running, model: LanguageModel) -> None:
    server.forget()
    before = pictures_of(model).n_computed
    first = post(server, SHOW, "/v1/responses").json
    more = BASE | {"input": "And now?", "previous_response_id": first["id"]}
    second = post(server, more, "/v1/responses")
    assert second.status == 200, second.body
    details = second.json["usage"]["input_tokens_details"]
    assert details["cached_tokens"] > N_ROWS and "continues from" in second.json["hybrid_memory"]["history"]
    server.forget()
    again = post(server, more, "/v1/responses")  # Its prompt is computed again from the stored picture.
    assert again.json["output"][0]["content"] == second.json["output"][0]["content"]
    items = server.call(
        "GET", f"/v1/responses/{second.json['id']}/input_items", headers={"Authorization": f"Bearer {KEYS[0]}"}
    )
    assert any(part.get("image_url") == data_url(WIDE) for item in items.json["data"] for part in item["content"])
    assert pictures_of(model).n_computed <= before + 1


def test_pictures_come_from_named_hosts_alone(server: Running, host: str) -> None:
    server.forget()
    assert usage_of(post(server, asked(image(data_url(WIDE)))))[1] == 0
    assert usage_of(post(server, asked(image(f"http://{host}/cat.png"))))[1] > N_ROWS
    name, port = host.split(":")
    for url, why in (
        (f"http://localhost:{port}/cat.png", "fetches no pictures"),
        (f"http://{name}/cat.png", "fetches no pictures"),
        (f"http://user@{host}/cat.png", "fetches no pictures"),
        (f"http://{host}/away", "answered 302"),
        ("http://169.254.169.254/latest/meta-data", "fetches no pictures"),
        ("http://[::1/cat.png", "cannot be read"),
        ("file:///etc/passwd", "is a data URL"),
        ("ftp://example.com/cat.png", "is a data URL"),
    ):
        answer = post(server, asked(image(url)))
        assert answer.status == 400 and why in answer.error["message"], (url, answer.body)


def _bomb() -> bytes:
    """Return a PNG of a few hundred bytes whose header says 60,000 × 60,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


def test_what_is_no_picture_or_too_large_is_refused(server: Running, model: LanguageModel) -> None:
    before = pictures_of(model).n_computed
    large = as_png(draw_picture(3, 101, 100))
    for part, why in (
        (image(data_url(_bomb())), "picture"),
        (image(data_url(large)), "at most 10,000 are read"),
        (image(data_url(b"\0" * 100_001)), "100,001 bytes; at most 100,000"),
        (image(data_url(WIDE[:200])), "damaged"),
        (image(data_url(b"<svg/>", "image/svg+xml")), "no picture that can be read"),
        (image("data:text/html;base64,aGk="), "begins with 'data:image/"),
        (image("data:image/png;base64,@@@"), "no base64"),
        (image(data_url(WIDE), detail="most"), "'detail'"),
        ({"type": "image_url", "image_url": {}}, "string as its URL"),
    ):
        answer = post(server, asked(part))
        assert answer.status == 400 and why in answer.error["message"], (why, answer.body)
    three = [image(data_url(as_png(draw_picture(seed)))) for seed in range(3)]
    assert "2 are possible" in post(server, asked(*three)).error["message"]
    scored = post(server, asked(image(data_url(WIDE)), prompt_logprobs=0))
    assert scored.error["param"] == "prompt_logprobs"
    assert pictures_of(model).n_computed <= before + 1


def test_a_mark_in_a_text_names_no_picture_of_others(server: Running) -> None:
    usage_of(post(server, asked(image(data_url(WIDE)))))
    forged = {"type": "text", "text": f"\U0010fffe{'0' * 64}\U0010fffe"}
    answer = post(server, asked(forged))
    assert answer.status == 400 and "not with it" in answer.error["message"]


def test_a_model_that_reads_text_alone_says_so(plain_server: Running) -> None:
    answer = plain_server.call("POST", "/v1/chat/completions", asked(image(data_url(WIDE))))
    assert answer.status == 400 and "takes no pictures" in answer.error["message"]
    content = [{"type": "input_image", "image_url": data_url(WIDE)}]
    body = {"model": MODEL, "input": [{"role": "user", "content": content}]}
    assert plain_server.call("POST", "/v1/responses", body).status == 400


def test_little_detail_is_a_smaller_picture(model: LanguageModel) -> None:
    large = as_png(draw_picture(3, 1200, 40))
    with Sight(pictures_of(model), ServerOptions()).collecting() as sources:
        marks = [mark_part(image(data_url(large), detail=detail)) for detail in ("high", "auto", "low")]
    seen = Sight(pictures_of(model), ServerOptions()).read(sources, tokenizer_of_speaker(), param="messages")
    whole, small = (seen.pictures[name].digest for name in names_in("".join(marks[1:])))
    assert marks[0] == marks[1] and whole != small
    assert small == pictures_of(model).read(draw_picture(3, 1200, 40).resize((512, 17), reducing_gap=2.0)).digest


def test_a_host_is_named_without_scheme() -> None:
    with pytest.raises(ValueError, match="picture host"):
        ServerOptions(picture_hosts=("https://example.com/",))


def test_a_session_in_a_folder_keeps_its_pictures(model: LanguageModel, tmp_path: Path) -> None:
    options = ServerOptions(sessions=str(tmp_path))
    with running(model, tokenizer_of_speaker(), options, stop_ids=()) as server:
        first = post(server, SHOW, "/v1/responses").json
    with running(model, tokenizer_of_speaker(), options, stop_ids=()) as server:
        more = BASE | {"input": "And now?", "previous_response_id": first["id"]}
        answer = post(server, more, "/v1/responses")
        assert answer.status == 200 and answer.json["usage"]["input_tokens"] > N_ROWS
