"""The server refuses half-sent and malformed requests, too many connections, and pages of other sites."""

from __future__ import annotations

import asyncio
import json
import logging
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import openai
import pytest

from hybridmem.chat.prompts import Tokenizer
from hybridmem.chat.server import ServerOptions, guard, incoming
from hybridmem.chat.server.access import Access
from hybridmem.chat.server.connections import MOST_CHUNKS, Seldom
from hybridmem.chat.server.errors import ApiError
from hybridmem.memory import SpecError
from hybridmem.models import LanguageModel
from tests.chat.servers import MODEL, PATIENCE_SECONDS, Answer, Gated, Running, running, wait_until
from tests.operation.simulated_time import SimulatedLoop, simulate

HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
BODY = json.dumps({"model": MODEL, "prompt": "My", "max_tokens": 1}).encode()


@pytest.fixture(scope="module")
def shared(embedded: LanguageModel, tokenizer: Tokenizer) -> Iterator[Running]:
    with running(embedded, tokenizer, ServerOptions(max_requests=2, max_body_bytes=1 << 16)) as server:
        yield server


def connect(server: Running, sent: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    """Connect, and send these bytes unless the server refuses them first."""
    place = ("127.0.0.1", server.port)
    connection = socket.create_connection(place, timeout=PATIENCE_SECONDS, source_address=(source, 0))
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(sent)
    return connection


def read_all(connection: socket.socket) -> bytes:
    """Return what comes until the server closes the connection."""
    received = b""
    try:
        while piece := connection.recv(1 << 16):
            received += piece
    except ConnectionResetError:
        pass
    return received


def send(server: Running, sent: bytes) -> Answer:
    """Return the one answer to these bytes. The connection is then closed."""
    with connect(server, sent) as connection:
        received = read_all(connection)
    assert received.count(b"HTTP/1.1 ") == 1, received
    head, _, body = received.partition(b"\r\n\r\n")
    start, *lines = head.decode().split("\r\n")
    fields: Any = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    return Answer(int(start.split()[1]), fields, body)


def post(*fields: str, body: bytes = BODY, path: str = "/v1/completions", version: str = "1.1") -> bytes:
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", "Content-Type: application/json", *fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


# The tests below are about where a request ends.

CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = f"Content-Length: {len(BODY)}"


@pytest.mark.parametrize(
    "sent",
    [
        post(LENGTH, "Transfer-Encoding: chunked", body=CHUNKED),
        post("Content-Length: 0", "Transfer-Encoding: chunked", body=CHUNKED),
        post("Transfer-Encoding: chunked", LENGTH, body=CHUNKED),
        post(LENGTH, LENGTH),
        post(LENGTH, "Content-Length: 0"),
        post(f"{LENGTH}, {len(BODY)}"),
        post(f"Content-Length: +{len(BODY)}"),
        post("Content-Length: 1_0"),
        post("Content-Length: 0x10"),
        post("Content-Length: -1"),
        post("Content-Length:"),
        post("Content-Length: " + "9" * 30),
        post("Content-Length: ٣"),
        post("Content-Length : 10"),
        post("Content-Length\t: 10"),
        post("Transfer-Encoding: chunked, identity", body=CHUNKED),
        post("Transfer-Encoding: identity", body=b""),
        post("Transfer-Encoding: chunked", "Transfer-Encoding: chunked", body=CHUNKED),
        post("Transfer-Encoding: xchunked", body=CHUNKED),
        post("Transfer-Encoding:\r\n chunked", body=CHUNKED),
        post("Transfer-Encoding: chunked\r\n\t", body=CHUNKED),
        post("Transfer-Encoding: \x0bchunked", body=CHUNKED),
        post("Transfer-Encoding: chunked", body=CHUNKED, version="1.0"),
        post("X: y\nTransfer-Encoding: chunked", body=CHUNKED),
        post("X: y\rTransfer-Encoding: chunked", body=CHUNKED),
        post("X: y\0"),
        post("X y"),
        post(LENGTH).replace(b"Host", b" Host"),
        post(LENGTH, "Host: other"),
        post(LENGTH).replace(b"Host: localhost\r\n", b""),
        post(LENGTH).replace(b"\r\n", b"\n"),
        post("Transfer-Encoding: chunked", body=b"zz\r\n" + BODY),
        post("Transfer-Encoding: chunked", body=b"-1\r\n" + BODY),
        post("Transfer-Encoding: chunked", body=b"1\na\n0\n\n"),
        post("Transfer-Encoding: chunked", body=b"1\r\nab\r\n0\r\n\r\n"),
        b"\r\n\r\n",
        b"nonsense\r\n\r\n",
        b"GET  /health HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03\r\n\r\n",
    ],
)  # fmt: skip
def test_a_request_without_a_certain_end_is_the_connections_last(shared: Running, sent: bytes) -> None:
    answer = send(shared, sent + HEALTH)
    assert (answer.status, answer.headers["connection"]) == (400, "close")
    assert answer.error["type"] == "invalid_request_error" and answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(("version", "status"), [("2.0", 505), ("0.9", 505), ("1.2", 505)])
def test_other_versions_are_refused(shared: Running, version: str, status: int) -> None:
    assert send(shared, post(LENGTH, version=version)).status == status


@pytest.mark.parametrize("fields", [[LENGTH], ["Transfer-Encoding: Chunked"]])
def test_what_follows_a_request_unasked_is_not_answered(shared: Running, fields: list[str]) -> None:
    """Such bytes come in one packet with the request, or while its answer is on its way."""
    body = BODY if fields == [LENGTH] else CHUNKED
    answer = send(shared, post(*fields, body=body) + HEALTH)
    assert answer.status == 200 and answer.json["usage"]["completion_tokens"] == 1


def test_what_follows_while_an_answer_is_made_is_not_answered(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    model = Gated(embedded)
    with running(model, tokenizer) as server:
        model.is_open = False
        with connect(server, post(LENGTH)) as connection:
            wait_until(lambda: server.engine.load.total == 1)
            for _ in range(3):
                connection.sendall(HEALTH)
            model.open()
            assert read_all(connection).count(b"HTTP/1.1") == 1


def test_requests_one_after_another_share_a_connection(shared: Running) -> None:
    connection = shared.connect()
    for _ in range(3):
        for method, path, body in (
            ("POST", "/v1/completions", BODY),
            ("GET", "/health", None),
            ("POST", "/nowhere", b"{}"),
        ):
            connection.request(
                method, path, body, {"Content-Type": "application/json", "Upgrade": "h2c", "Connection": "Upgrade"}
            )
            response = connection.getresponse()
            assert response.status == (404 if path == "/nowhere" else 200) and response.read()
            assert not response.will_close
    connection.close()


def test_of_many_that_come_together_each_is_answered_and_the_lost_are_forgotten(
    embedded: LanguageModel, tokenizer: Tokenizer
) -> None:
    """Requests begin one after the other.

    Their bodies come with the head, after it, or never.
    """
    request = post(LENGTH, "Connection: close")
    with running(embedded, tokenizer, ServerOptions(max_requests=64)) as server, ExitStack() as stack:
        together = [stack.enter_context(connect(server, request[:-1])) for _ in range(30)]
        with suppress(BrokenPipeError, ConnectionResetError):
            for connection in together:
                connection.sendall(request[-1:] if connection in together[::3] else b"")
        for _ in range(30):
            connect(server, request).close()
        others = [stack.enter_context(connect(server, request)) for _ in range(30)]
        assert [read_all(connection)[:12] for connection in [*together[::3], *others]] == [b"HTTP/1.1 200"] * 40
        assert server.call("GET", "/health").status == 200


def test_a_head_may_come_in_pieces(shared: Running) -> None:
    with connect(shared) as connection:
        for byte in HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"):
            connection.sendall(bytes([byte]))
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_a_body_in_very_many_chunks_is_refused(shared: Running) -> None:
    """Each chunk would cost the event loop as much as a request."""
    n_chunks = len(BODY)
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"
    assert (
        n_chunks < MOST_CHUNKS
        and send(shared, post("Transfer-Encoding: chunked", "Connection: close", body=body)).status == 200
    )
    assert send(shared, post("Transfer-Encoding: chunked", body=b"1\r\n \r\n" * (MOST_CHUNKS + 1))).status == 400


# The tests below are about what is given back and logged.


def test_nothing_is_given_back_whole(shared: Running) -> None:
    long = "x" * 10_000
    answers = [
        shared.call("GET", f"/{long}"),
        shared.call(long.upper(), "/health"),
        shared.call("GET", f"/v1/models/{long}"),
        shared.call("POST", "/v1/completions", {"model": long, "prompt": "a"}),
        shared.call("POST", "/v1/completions", {"model": MODEL, "prompt": "a", long: 1}),
        shared.call("POST", "/v1/chat/completions", {"model": MODEL, "messages": [{long: 1}]}),
        shared.call("POST", "/v1/chat/completions", {"model": MODEL, "messages": [{"role": long, "content": long}]}),
        shared.call("POST", "/v1/completions", {"model": MODEL, "prompt": "a"}, {"Content-Type": long}),
        shared.call("GET", "/v1/models", headers={"Host": long}),
        shared.call("GET", "/v1/models", headers={"Origin": long}),
    ]
    for answer in answers:
        assert answer.status in (400, 403, 404, 405, 415) and len(answer.body) < 1500, answer.error["message"][:200]


def test_a_long_head_is_refused(shared: Running) -> None:
    for sent in (b"GET /" + b"x" * 70_000, b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n"):
        answer = send(shared, sent)
        assert answer.status == 431 and len(answer.body) < 500
    assert send(shared, b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 200 + b"\r\n").status == 431


def test_malformed_requests_do_not_fill_the_log(shared: Running, caplog: pytest.LogCaptureFixture) -> None:
    n_before = shared.metric('refused_connections_total{code="malformed_http"}')
    for _ in range(20):
        assert send(shared, b"nonsense\r\n\r\n").status == 400
        send(
            shared,
            b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n",
        )
    assert len(caplog.records) <= 1
    assert shared.metric('refused_connections_total{code="malformed_http"}') == n_before + 20


def test_a_message_is_written_seldom_and_with_its_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("hybridmem.chat.server.connections.time.monotonic", lambda: now)
    log = logging.getLogger("tests.seldom")
    log.addFilter(seldom := Seldom(60))
    for now in (0.0, 1.0, 59.0, 61.0, 62.0, 122.0):
        log.warning("one")
        log.warning("other at %g", now)
    log.removeFilter(seldom)
    ones = [record.getMessage() for record in caplog.records if "one" in record.msg]
    assert ones == ["one", *[f"one (and {n} times more since this was last written)" for n in (2, 1)]]
    assert len(caplog.records) == 6


# The tests below are about clients that send slowly, or not at all.


def test_a_head_has_its_time(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    """The limit holds for the first head of a connection and for later ones.

    Bytes that come all the time do not extend it.
    """
    with running(embedded, tokenizer, ServerOptions(head_seconds=0.1)) as server:
        for begun in (b"", b"G", HEALTH[:-2]):
            assert send(server, begun).status == 408
        with connect(server) as connection:
            with suppress(OSError):
                while not select.select([connection], [], [], 0.01)[0]:
                    connection.sendall(b"x")
        wait_until(lambda: len(server.server.connections) == 0)
    with running(embedded, tokenizer, ServerOptions(head_seconds=PATIENCE_SECONDS)) as server:
        with connect(server, HEALTH) as connection:
            assert connection.recv(12) == b"HTTP/1.1 200"
            server.server.connections.options = replace(server.service.options, head_seconds=0.1)
            connection.sendall(b"GET")
            assert b"request_timeout" in read_all(connection)


def test_a_body_must_keep_coming(
    embedded: LanguageModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incoming, "_PATIENCE_SECONDS", 0.1)
    with running(embedded, tokenizer, ServerOptions(body_bytes_per_second=1000)) as server:
        assert send(server, post("Content-Length: 1000", body=b"{")).status == 408


@pytest.mark.parametrize(("pause", "is_late"), [(0.06, False), (0.08, True)])
def test_a_body_that_keeps_coming_has_longer(pause: float, is_late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is simulated. A body has 0.1 s at first, and another 0.1 s for each hundred bytes."""
    monkeypatch.setattr(incoming, "_PATIENCE_SECONDS", 0.1)
    pieces = [b" " * 50] * 3

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause)
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    async def read(loop: SimulatedLoop) -> None:
        body = incoming.Incoming(receive, incoming.Turnstile(guard.Places(1)))
        if is_late:
            with pytest.raises(TimeoutError):
                await body.read(ServerOptions(body_bytes_per_second=1000))
            assert loop.time() == pytest.approx(0.15)
        else:
            assert await body.read(ServerOptions(body_bytes_per_second=1000)) == b" " * 150
            assert loop.time() == pytest.approx(0.18)

    simulate(read)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/nowhere"])
@pytest.mark.parametrize("n_sent", [0, 1])
def test_half_sent_bodies_keep_nobody_out(shared: Running, path: str, n_sent: int) -> None:
    with ExitStack() as held:
        for _ in range(8):
            held.enter_context(connect(shared, post("Content-Length: 100", body=b"{"[:n_sent], path=path)))
        for _ in range(3):
            assert shared.call("POST", "/v1/completions", BODY).status == 200


def test_a_body_without_the_key_is_not_waited_for(
    embedded: LanguageModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "_DRAIN_SECONDS", 0.05)
    with running(embedded, tokenizer, ServerOptions(api_key="secret")) as server:
        assert send(server, post("Content-Length: 100", body=b"{")).status == 401
        assert (
            send(server, post("Content-Length: 100", "Authorization: Bearer secret", body=b"{", path="/nowhere")).status
            == 404
        )


# The tests below count connections.


def test_half_open_connections_give_way(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    options = ServerOptions(max_connections=6, max_peer_connections=4, head_seconds=PATIENCE_SECONDS)
    with running(embedded, tokenizer, options) as server, ExitStack() as held:
        oldest, *_ = [held.enter_context(connect(server, b"GET /", f"127.0.0.{i % 5 + 2}")) for i in range(20)]
        assert b"too_many_connections" in read_all(oldest)
        wait_until(lambda: len(server.server.server_state.connections) <= 6)
        for _ in range(8):
            assert server.chat().status == 200
        other = held.enter_context(connect(server, b"GET /", "127.0.0.9"))
        for _ in range(20):
            held.enter_context(connect(server, b"GET /", "127.0.0.8"))
        wait_until(lambda: server.metric('refused_connections_total{code="too_many_connections"}') >= 28)
        other.sendall(HEALTH[5:])
        assert other.recv(1 << 16).startswith(b"HTTP/1.1 200")  # A connection of another client stays open.
        assert len(server.server.connections) <= 6


def test_connections_that_are_being_answered_do_not_give_way(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    model = Gated(embedded)
    with running(model, tokenizer, ServerOptions(max_peer_connections=2)) as server:
        model.is_open = False
        busy = [connect(server, post(LENGTH, "Connection: close")) for _ in range(2)]
        wait_until(lambda: server.engine.load.total == 2)
        assert send(server, HEALTH).status == 503
        model.open()
        for connection in busy:
            assert read_all(connection).startswith(b"HTTP/1.1 200")
            connection.close()
        wait_until(lambda: len(server.server.connections) == 0)
        assert server.call("GET", "/health").status == 200


def test_half_sent_requests_do_not_hold_up_the_end(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    with running(embedded, tokenizer) as server:
        held = [connect(server, sent) for sent in (b"GET", post("Content-Length: 100", body=b"{"))]
        # The server has received a head.
        wait_until(lambda: any(one.cycle for one in list(server.server.server_state.connections)))
        wait_until(lambda: len(server.server.connections) == 2)
        server.server.should_exit = True
        assert [b"server_unavailable" in read_all(connection) for connection in held] == [False, True]
        for connection in held:
            connection.close()


# The tests below are about pages of other sites.


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "127.9.9.9", "[::1]", "[::1]:80", "a.localhost."],
)
def test_loopbacks_names_may_be_used(host: str) -> None:
    Access(ServerOptions()).check("GET", "/v1/models", {b"host": host.encode()})


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "", ":80", "8.8.8.8", "[::2]", "local\xff"],
)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_a_name_that_somebody_pointed_here_is_refused(host: str, method: str) -> None:
    with pytest.raises(ApiError, match="--allowed-host") as found:
        Access(ServerOptions()).check(method, "/v1/completions", {b"host": host.encode("latin-1")})
    assert found.value.status == 403


def test_rebinding_and_drive_by_requests_are_refused(shared: Running) -> None:
    """Requests are as browsers send them.

    Some name a host of the page's own, and others are of a kind that needs no permission.
    """
    head = "Host: 127.0.0.1\r\nConnection: close\r\n"
    rebound = f"Host: evil.example:{shared.port}\r\nConnection: close\r\n"
    sent = f"Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY
    n_before = shared.metric('requests_total{code="200",path="/v1/completions"}')
    as_form = f"POST /v1/completions HTTP/1.1\r\n{head}Content-Type: text/plain\r\n".encode() + sent
    as_page = (
        f"POST /v1/completions HTTP/1.1\r\n{head}Origin: https://evil.example\r\n"
        "Content-Type: application/json\r\n".encode()
        + sent
    )
    as_null = as_page.replace(b"https://evil.example", b"null")
    rebinding = f"POST /v1/completions HTTP/1.1\r\n{rebound}Content-Type: application/json\r\n".encode() + sent
    preflight = (
        f"OPTIONS /v1/completions HTTP/1.1\r\n{head}Origin: https://evil.example\r\nAccess-Control-Request-Method: "
        "POST\r\n\r\n"
    ).encode()
    for request, status in ((as_form, 415), (as_page, 403), (as_null, 403), (rebinding, 403), (preflight, 403)):
        answer = send(shared, request)
        assert answer.status == status and answer.error["code"] in (
            "unsupported_media_type",
            "origin_not_allowed",
            "host_not_allowed",
        )
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert send(shared, f"GET /v1/models HTTP/1.1\r\n{rebound}\r\n".encode()).status == 403
    assert shared.metric('requests_total{code="200",path="/v1/completions"}') == n_before


def test_pages_that_are_allowed_may_ask_and_read(embedded: LanguageModel, tokenizer: Tokenizer) -> None:
    page, names = (
        "https://good.example",
        {f"access-control-{name}" for name in ("allow-origin", "allow-methods", "allow-headers", "expose-headers")},
    )
    options = ServerOptions(api_key="secret", allowed_origins=(page,), allowed_hosts=("model.example",))
    with running(embedded, tokenizer, options) as server:
        asks = {
            "Origin": page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,x-stainless-os",
        }
        answer = server.call("OPTIONS", "/v1/completions", None, asks | {"Authorization": ""})
        assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (204, page)
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-os" and names <= set(
            map(str.lower, answer.headers)
        )
        for headers, status in (
            (asks, 200),
            ({}, 200),
            (asks | {"Authorization": ""}, 401),
            (asks | {"Host": "model.example:443"}, 200),
        ):
            answer = server.call("POST", "/v1/completions", BODY, headers)
            assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (status, headers.get("Origin"))
            assert answer.headers["Vary"] == "Origin"
        for headers in (
            {"Origin": "https://evil.example"},
            {"Host": "evil.example"},
            {"Origin": f"{page}.evil.example"},
        ):
            answer = server.call("POST", "/v1/completions", BODY, headers)
            assert answer.status == 403 and answer.headers["Access-Control-Allow-Origin"] is None
            assert server.call("OPTIONS", "/v1/completions", None, asks | headers).status == 403
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
            assert client.completions.create(model=MODEL, prompt="My", max_tokens=1).usage is not None


def test_a_key_is_enough_where_no_names_are_given() -> None:
    access = Access(ServerOptions(api_key="secret"))
    headers = {b"host": b"model.example", b"origin": b"https://page.example", b"authorization": b"Bearer secret"}
    access.check("POST", "/v1/completions", headers)
    assert access.headers_for(headers) == []
    with pytest.raises(ApiError, match="API key"):
        access.check(
            "OPTIONS", "/v1/completions", headers | {b"access-control-request-method": b"POST", b"authorization": b""}
        )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("allowed_hosts", "http://a"),
        ("allowed_hosts", "a:80"),
        ("allowed_origins", "a.example"),
        ("allowed_origins", "https://a/"),
    ],
)
def test_names_that_cannot_match_are_refused(name: str, value: str) -> None:
    with pytest.raises(SpecError, match="allowed"):
        ServerOptions(**{name: (value,)})  # type: ignore[arg-type]
