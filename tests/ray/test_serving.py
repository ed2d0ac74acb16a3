"""A fleet answers OpenAI's clients as one server does, and says why it routed a request to a replica."""

from __future__ import annotations

from tests.ray.fleets import RESUMES, client_of, say


def test_a_stream_comes_piece_by_piece_and_says_where_from(url: str) -> None:
    client = client_of(url)
    options = {"model": "embedded", "messages": [say("I read a book about a lamp today.")], "temperature": 0}
    with client.chat.completions.with_streaming_response.create(
        stream=True, stream_options={"include_usage": True}, **options
    ) as response:
        route = response.headers["x-hybrid-memory-route"]
        events = [line for line in response.iter_lines() if line.startswith("data: {")]
    assert route.startswith("load; resumable=0/") and len(events) > 4 and '"route":{"reason":"load"' in events[-1]


def test_the_next_turn_goes_to_the_replica_that_can_resume_it(url: str) -> None:
    client, messages = client_of(url), [say("My dog is called Rex, and he is three years old. He likes to run.")]
    routes = []
    for _ in range(3):
        raw = client.chat.completions.with_raw_response.create(model="embedded", messages=messages, temperature=0)
        reply = raw.parse()
        routes.append(reply.usage.model_extra["hybrid_memory"]["route"])
        messages += [{"role": "assistant", "content": reply.choices[0].message.content}, say("What is my dog called?")]
    assert len({route["replica"] for route in routes}) == 1
    assert {route["reason"] for route in routes[1:]} <= RESUMES
    assert reply.usage.prompt_tokens_details.cached_tokens >= routes[-1]["resumable_tokens"] > 16


def test_other_owners_prefixes_do_not_route(url: str) -> None:
    """This fleet asks for no keys, so only salts tell owners apart."""
    messages = [say("The secret of this chat is long enough that a router would want to resume it somewhere.")]
    for salt in ("one salt", "another salt"):
        raw = client_of(url).chat.completions.with_raw_response.create(
            model="embedded", messages=messages, extra_body={"cache_salt": salt}
        )
        assert "; resumable=0/" in raw.headers["x-hybrid-memory-route"]
