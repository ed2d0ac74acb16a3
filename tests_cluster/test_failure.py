"""What clients see when a replica dies, and when they send a request again."""

from __future__ import annotations

import json
import urllib.request

from openai import OpenAI, UnprocessableEntityError

from tests_cluster.fleets import ask, client_of, replica_processes, replicas_of, say, wait_for

LONG = {"model": "embedded", "max_tokens": 400, "min_tokens": 400, "temperature": 0, "stream": True}


def test_a_killed_replica_costs_the_stream_it_was_in_and_nothing_else(url: str) -> None:
    """The reply is asked for again, and is word for word what it would have been."""
    messages = [say("My dog is called Rex, my cat is called Zoe, and my bird is called Nemo.")]
    text, route, _ = ask(url, messages, **{"x-session-id": "killed"})
    messages += [{"role": "assistant", "content": text}, say("What is my dog called?")]
    right, _, _ = ask(url, messages)
    held = replicas_of(url)
    body = json.dumps({**LONG, "prompt": "Tell me a long story about a dog called Rex." * 30}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json", "x-hybrid-memory-replica": held[0]}
    )
    n_before = {process.pid for process in replica_processes()}
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.readline().startswith(b"data: {")
        for process in replica_processes():  # of two, the one that answers and the other one
            process.kill()
        rest = response.read().decode()
    assert '"code": "replica_lost"' in rest or '"code":"replica_lost"' in rest
    again, route, _ = ask(url, messages, **{"x-session-id": "killed"})
    assert again == right
    assert route["replica"] not in held and route["fetched_tokens"] > 16
    wait_for(lambda: len({process.pid for process in replica_processes()} - n_before) == 2, 60)
    assert len(replicas_of(url)) == 2


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
