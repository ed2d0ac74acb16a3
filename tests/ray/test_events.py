"""Events in vLLM's format name the blocks after which a prompt can continue, and no others."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from hybridmem.cluster.events.publisher import EventOptions, EventPublisher
from hybridmem.memory import HybridMemory
from hybridmem.memory.prefix import PrefixCache
from hybridmem.memory.prefix.digests import Resumable
from hybridmem.models import LanguageModel, load_model
from tests.ray.fleets import free_port

BLOCK = 32
LOCK = threading.Lock()
"""Of the cache, which the publisher's thread reads."""


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return load_model("embedded")


@pytest.fixture
def cache(model: LanguageModel) -> Iterator[PrefixCache]:
    memory = HybridMemory(model.memory_spec, "16MiB", rollback_window=0)
    with PrefixCache(memory, grid_tokens=BLOCK) as cache:
        yield cache


@pytest.fixture
def publisher(cache: PrefixCache) -> Iterator[EventPublisher]:
    options = EventOptions("127.0.0.1", free_port(), "kv@a@embedded", BLOCK)

    def resumable() -> list[Resumable]:
        with LOCK:
            return cache.resumable()

    publisher = EventPublisher(options, resumable)
    yield publisher
    publisher.close()


def prefill(model: LanguageModel, cache: PrefixCache, tokens: list[int], owner: bytes | None = None) -> None:
    sequence, found = cache.open(tokens, owner)
    for end in [*cache.cuts(tokens, found.reused, owner=owner), len(tokens)]:
        cache.memory.run(model, {sequence: tokens[sequence.length : end]})
        cache.insert(sequence, owner)
    cache.memory.close(sequence)


def missed(publisher: EventPublisher, n_events: int) -> list[list[Any]]:
    """Ask for all batches until they have so many events, and return those."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.connect(publisher.replay_address)
        for _ in range(100):
            socket.send_multipart([b"", (0).to_bytes(8, "big")])
            batches = []
            while (message := socket.recv_multipart())[1] != (-1).to_bytes(8, "big", signed=True):
                batches.append(msgpack.unpackb(message[2]))
            found = [event for _, events, _ in batches for event in events]
            if len(found) >= n_events:
                return found
            time.sleep(0.1)
    raise AssertionError("no events came")


def test_blocks_are_stored_in_a_chain_and_removed(
    model: LanguageModel, cache: PrefixCache, publisher: EventPublisher
) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.connect(publisher.address)
        socket.subscribe(b"kv@")
        tokens = list(range(10, 10 + 3 * BLOCK + 7))
        with LOCK:
            prefill(model, cache, tokens)
        stored = missed(publisher, 3)
        assert [event[0] for event in stored] == ["BlockStored"] * 3
        assert [event[3] for event in stored] == [tokens[i : i + BLOCK] for i in range(0, 3 * BLOCK, BLOCK)]
        assert [event[2] for event in stored] == [None, stored[0][1][0], stored[1][1][0]]
        assert {event[4] for event in stored} == {BLOCK} and {event[6] for event in stored} == {"CPU"}
        with LOCK:
            cache.clear()
        removed = missed(publisher, 6)[3:]
        assert sorted(event[1] for event in removed) == sorted(event[1] for event in stored)
        token = 10
        while not socket.poll(2000):  # A subscriber gets the same, though it may miss the first events.
            token += 1
            with LOCK:
                prefill(model, cache, [token] * (BLOCK + 1))
        topic, number, payload = socket.recv_multipart()
        assert topic == b"kv@a@embedded" and len(number) == 8 and msgpack.unpackb(payload)[1]


def test_a_block_without_a_state_behind_it_ends_the_chain(
    model: LanguageModel, cache: PrefixCache, publisher: EventPublisher
) -> None:
    """Attention could continue after the second block, but the recurrent layers cannot."""
    tokens = list(range(10, 10 + 2 * BLOCK))
    sequence = cache.memory.open()
    for n_tokens in (BLOCK, 2 * BLOCK - 5, 2 * BLOCK + 4):
        with LOCK:
            cache.memory.run(model, {sequence: [*tokens, 3, 3, 3, 3][sequence.length : n_tokens]})
            cache.insert(sequence, b"me")
    (event,) = missed(publisher, 1)
    assert event[3] == tokens[:BLOCK] and event[8] == [[b"me".hex()]]
