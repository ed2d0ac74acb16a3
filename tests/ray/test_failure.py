"""The tests show what clients see when a replica dies, and when they send a request again."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable

from openai import OpenAI, UnprocessableEntityError

from tests.ray.fleets import (
    PATIENCE_SECONDS,
    ask,
    client_of,
    get,
    replica_processes,
    replicas_of,
    say,
    wait_for,
)

LONG = {"model": "embedded", "max_tokens": 400, "min_tokens": 400, "temperature": 1.0, "seed": 7, "stream": True}


def test_a_stream_goes_on_though_its_replica_is_killed_and_nothing_else_is_lost(url: str) -> None:
    """Both replicas are killed. A replica that starts in their place sends the rest, word for word."""
    messages = [say("My dog is called Rex, my cat is called Zoe, and my bird is called Nemo.")]
    text, route, _ = ask(url, messages, **{"x-session-id": "killed"})
    messages += [{"role": "assistant", "content": text}, say("What is my dog called?")]
    right, _, _ = ask(url, messages)
    held = replicas_of(url)
    whole = stream(url, lambda: None)
    before = replica_processes()  # These are looked up now, because that takes longer than a reply may last.

    def kill() -> None:
        for process in before:
            process.kill()

    assert stream(url, kill) == whole and len(set(whole)) > 20
    assert "hybrid_memory_gateway_continued_total 1.0" in get(f"{url}/metrics")
    again, route, _ = ask(url, messages, **{"x-session-id": "killed"})
    assert again == right
    assert route["replica"] not in held and route["fetched_tokens"] > 16
    wait_for(lambda: len({*replica_processes()} - {*before}) == 2)
    assert len(replicas_of(url)) == 2


def stream(url: str, in_the_middle: Callable[[], None]) -> str:
    """Return the text of a long reply, and do something when its first words have come."""
    body = json.dumps({**LONG, "prompt": "Tell me a long story about a dog called Rex." * 30}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as response:
        first = response.readline()
        assert first.startswith(b"data: {")
        in_the_middle()
        lines = [first, *response]
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert lines[-2] == b"data: [DONE]\n" and len({event["id"] for event in events}) == 1
    return "".join(event["choices"][0]["text"] for event in events)


def test_a_stored_response_is_found_by_any_replica(url: str) -> None:
    first, second = replicas_of(url)
    client = client_of(url)
    headers = [{"x-hybrid-memory-replica": name} for name in (first, second)]
    said = client.responses.create(model="embedded", input="My cat is called Zoe.", extra_headers=headers[0])
    more = client.responses.create(
        model="embedded", input="What is my cat called?", previous_response_id=said.id, temperature=0,
        extra_headers=headers[1],
    )  # fmt: skip
    assert "Zoe" in more.output_text


def test_a_key_gets_one_reply_however_often_it_is_sent(url: str) -> None:
    def create(client: OpenAI, text: str, stream: bool = False) -> object:
        return client.chat.completions.create(
            model="embedded", messages=[say(text)], temperature=1.0, stream=stream,
            extra_headers={"Idempotency-Key": "key 1" if not stream else "key 2"},
        )  # fmt: skip

    client = client_of(url)
    first, second = create(client, "My cat is called Zoe."), create(client, "My cat is called Zoe.")
    assert first.id == second.id and first == second
    streams = [list(create(client, "My cat is called Zoe.", stream=True)) for _ in range(2)]
    assert streams[0] == streams[1] and len(streams[0]) > 2
    assert create(client_of(url, "another key"), "My cat is called Zoe.").id != first.id
    try:
        create(client, "My cat is called Ada.")
    except UnprocessableEntityError as error:
        assert error.code == "idempotency_key_reused"
    else:
        raise AssertionError("another body under the same key")
