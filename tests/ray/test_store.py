"""At the end of each turn, sessions are in the store, and any replica can continue them."""

from __future__ import annotations

import time

from tests.ray.fleets import ask, get, health, replicas_of, say, wait_for
from tests.ray.stores import TestedStore, n_sequences


def test_a_session_goes_on_in_another_replica_with_the_same_words(url: str, store: TestedStore) -> None:
    first, second = replicas_of(url)
    messages = [say("My bird is called Nemo, my cat is called Zoe, and my dog is called Rex.")]
    n_before = n_sequences(store)
    text, route, _ = ask(url, messages, **{"x-session-id": "moves", "x-hybrid-memory-replica": first})
    assert (route["replica"], route["reason"]) == (first, "pinned")
    wait_for(lambda: n_sequences(store) > n_before)
    messages += [{"role": "assistant", "content": text}, say("What is my cat called?")]
    moved, route, n_reused = ask(url, messages, **{"x-session-id": "moves", "x-hybrid-memory-replica": second})
    assert route["replica"] == second and route["fetched_tokens"] == n_reused > 16
    stayed, _, _ = ask(url, messages, **{"x-hybrid-memory-replica": first})
    assert moved == stayed and "Zoe" in moved


def test_without_a_session_the_end_of_an_earlier_reply_is_found(url: str, store: TestedStore) -> None:
    first, second = replicas_of(url)
    messages = [say("My fish is called Bubbles, my cow is called Bella, and my horse is called Star.")]
    n_before = n_sequences(store)
    text, _, _ = ask(url, messages, **{"x-hybrid-memory-replica": second})
    wait_for(lambda: n_sequences(store) > n_before)
    messages += [{"role": "assistant", "content": text}, say("What is my cow called?")]
    _, route, n_reused = ask(url, messages, **{"x-hybrid-memory-replica": first})
    assert route["fetched_tokens"] == n_reused > 16


def test_a_store_that_is_down_is_said_and_replicas_serve_on(url: str, store: TestedStore) -> None:
    with store.down():
        text, _, _ = ask(url, [say("My cat is called Ada, and she likes to sleep on the warm roof.")])
        assert text
        wait_for(lambda: "down" in health(url)["store"])
        metrics = get(f"{url}/metrics")
        assert "hybrid_memory_store_up{" in metrics and 'hybrid_memory_store_events_total{event="failures"' in metrics
    wait_for(lambda: ask(url, [say(f"My dog is called Rex {time.time()}.")])[0] and _is_up(url))


def _is_up(url: str) -> bool:
    return all(health(url)["store"] == "ok" for _ in range(6))
