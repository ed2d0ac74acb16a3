"""Publishes by ZMQ which prefixes a replica can resume, in the form of vLLM's KV events.

A message has three frames: the topic, the number of the batch (8 bytes, big-endian), and the batch in msgpack:
[seconds, [event, ...], rank], where an event is ["BlockStored", hashes, parent's hash, token ids, block's tokens, None,
medium, None, extra keys] or ["BlockRemoved", hashes, medium] or ["AllBlocksCleared"]. A subscriber that has missed
batches asks the second socket for all batches from a number on. The answer ends with the number -1. Format:
https://docs.vllm.ai/en/latest/examples/features/kv_events/ (vLLM 0.11).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgpack
import zmq

from hybridmem.cluster.events.blocks import Block, changes, resumable_blocks
from hybridmem.memory import SpecError
from hybridmem.memory.prefix import Resumable

PERIOD_SECONDS = 1.0
_MOST_KEPT = 10_000
_MOST_PORTS = 4096
_END = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True)
class EventOptions:
    """Holds where and how events are published.

    Attributes:
        port: the port for events. The port after it takes requests for missed events. If a port is in use, the next two
            are tried.
        topic: the first frame of each message.
        medium: the medium of checkpoints in the budget, "GPU" or "CPU".
    """

    host: str
    port: int
    topic: str
    block_tokens: int
    medium: str = "CPU"


class EventPublisher:
    """Publishes the changes of a prefix cache, in a thread.

    Args:
        prefixes: returns the prefixes that can be resumed now. Any thread may call it.
    Attributes:
        address: the address of the events. replay_address: the address of the socket for missed events.
    Raises SpecError if no port is free.
    """

    def __init__(self, options: EventOptions, prefixes: Callable[[], list[Resumable]]) -> None:
        self._options = options
        self._prefixes = prefixes
        self._blocks: dict[bytes, Block] = {}
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=_MOST_KEPT)
        self._n_batches = 0
        self._context = zmq.Context()
        self._events, self._replays = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        self.address, self.replay_address = self._bind()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Publish that no prefix can be resumed any more, and stop."""
        self._stopped.set()
        self._thread.join()
        self._send([["AllBlocksCleared"]])
        self._context.destroy(linger=200)

    def _bind(self) -> tuple[str, str]:
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        for port in range(self._options.port, min(65535, self._options.port + 2 * _MOST_PORTS), 2):
            addresses = f"tcp://{host}:{port}", f"tcp://{host}:{port + 1}"
            try:
                self._events.bind(addresses[0])
            except zmq.ZMQError:
                continue
            try:
                self._replays.bind(addresses[1])
            except zmq.ZMQError:
                self._events.unbind(addresses[0])
                continue
            return addresses
        raise SpecError(f"kv_events={self._options.port}: no port from there on is free on {host}; give another")

    def _run(self) -> None:
        next_look = 0.0
        while not self._stopped.is_set():
            if self._replays.poll(50):
                self._replay()
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + PERIOD_SECONDS

    def _look(self) -> None:
        now = resumable_blocks(self._prefixes(), self._options.block_tokens)
        gone, new = changes(self._blocks, now)
        self._blocks = now
        if events := [*map(self._removed, gone), *map(self._stored, new)]:
            self._send(events)

    def _stored(self, block: Block) -> list[Any]:
        parent = None if block.parent is None else _hash_of(block.parent)
        extra = None if block.owner is None else [[block.owner]]
        return [
            "BlockStored", [_hash_of(block.digest)], parent, list(block.token_ids), len(block.token_ids), None,
            self._medium(block), None, extra,
        ]  # fmt: skip

    def _removed(self, block: Block) -> list[Any]:
        return ["BlockRemoved", [_hash_of(block.digest)], self._medium(block)]

    def _medium(self, block: Block) -> str:
        return {"host": "CPU", "disk": "DISK"}.get(block.tier, self._options.medium)

    def _send(self, events: list[list[Any]]) -> None:
        payload = msgpack.packb([time.time(), events, None])
        number, self._n_batches = self._n_batches, self._n_batches + 1
        self._kept.append((number, payload))
        self._events.send_multipart([self._options.topic.encode(), number.to_bytes(8, "big"), payload])

    def _replay(self) -> None:
        client, *_, wanted = self._replays.recv_multipart()
        first = int.from_bytes(wanted, "big")
        with suppress(zmq.ZMQError):  # The subscriber has gone.
            for number, payload in self._kept:
                if number >= first:
                    self._replays.send_multipart([client, b"", number.to_bytes(8, "big"), payload])
            self._replays.send_multipart([client, b"", _END, b""])


def _hash_of(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "big")
