"""Plays users of a fleet over HTTP, and compares each reply with the reply of a single engine to the same messages."""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from hybridmem.chat.engine.engine import Engine
from hybridmem.chat.prompts import encode_chat, load_tokenizer
from hybridmem.chat.simulation.dialogues import make_dialogue
from hybridmem.memory import HybridMemory
from hybridmem.memory.prefix import PrefixCache
from hybridmem.models import EMBEDDED, load_model

MAX_TOKENS = 24
_MOST_TRIES = 60
Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Request:
    """Holds one request of a user, and the reply that a single engine gives to it."""

    session: str
    messages: Messages
    reply: str


@dataclass
class Outcome:
    """Counts what happened to all requests.

    Attributes:
        wrong: replies that differ from the right ones. failed: attempts that got no reply. lost: requests that never
            got a reply.
        prompt_tokens, reused_tokens: all tokens of prompts, and those of them that were reused instead of computed.
        first_seconds: for each reply, the seconds until its first piece, in the attempt that succeeded.
        moved: turns whose session was fetched from the store.
        in_flight: requests that wait for a reply now.
    """

    wrong: int = 0
    failed: int = 0
    lost: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    moved: int = 0
    first_seconds: list[float] = field(default_factory=list)
    in_flight: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


def write_scripts(n_users: int, n_turns: int, seed: int = 0) -> tuple[list[list[Request]], float]:
    """Return each user's requests, and the share of the prompts' tokens that a single engine reuses.

    A user goes on, or (one turn in seven) changes an earlier message, or (one in seven) branches off at an earlier
    message and returns to the first branch two turns later. The replies are those of one engine that serves all users
    one after the other.
    """
    model, tokenizer = load_model("embedded", progress=False), load_tokenizer(EMBEDDED)
    memory = HybridMemory(model.memory_spec, "1GiB")
    engine = Engine(model, memory, tokenizer, prefixes=PrefixCache(memory))
    scripts, n_tokens = [], 0
    for user in range(n_users):
        rng, history, kept = random.Random(f"{seed}/{user}"), list[dict[str, str]](), list[Messages]()
        requests = []
        for turn in make_dialogue(rng, n_turns, invented=0.5):
            roll = rng.random()
            if len(history) >= 4 and roll < 2 / 7:
                if roll < 1 / 7:
                    kept.append(history)
                history = history[: 2 * rng.randrange(1, len(history) // 2)]
            elif kept and rng.random() < 0.5:
                history = kept.pop()
            history = [*history, {"role": "user", "content": turn.user}]
            tokens = encode_chat(tokenizer, history)
            generation = engine.submit(tokens, max_tokens=MAX_TOKENS)
            engine.run()
            n_tokens += len(tokens)
            requests.append(Request(f"user {user}", history, generation.text))
            history = [*history, {"role": "assistant", "content": generation.text}]
        scripts.append(requests)
    return scripts, engine.stats.n_reused / n_tokens


def play(url: str, scripts: list[list[Request]], outcome: Outcome, n_at_once: int) -> None:
    """Let `n_at_once` users at a time send their requests. Each user sends one request after the other."""

    def run(requests: list[Request]) -> None:
        for request in requests:
            _send(url, request, outcome)

    with ThreadPoolExecutor(n_at_once) as users:
        list(users.map(run, scripts))


def _send(url: str, request: Request, outcome: Outcome) -> None:
    """Send a request until it is answered, always with the same idempotency key."""
    key = uuid4().hex
    for n_tried in range(_MOST_TRIES):
        with outcome.lock:
            outcome.in_flight += 1
        try:
            text, usage, seconds = _stream(url, request, key)
        except (OSError, ValueError):
            with outcome.lock:
                outcome.failed += 1
            time.sleep(min(2.0, 0.1 * 2**n_tried))
            continue
        finally:
            with outcome.lock:
                outcome.in_flight -= 1
        with outcome.lock:
            outcome.wrong += text != request.reply
            outcome.prompt_tokens += usage["prompt_tokens"]
            outcome.reused_tokens += usage["prompt_tokens_details"]["cached_tokens"]
            outcome.moved += usage["hybrid_memory"]["route"].get("fetched_tokens", 0) > 0
            outcome.first_seconds.append(seconds)
        return
    with outcome.lock:
        outcome.lost += 1


def _stream(url: str, request: Request, key: str) -> tuple[str, dict[str, Any], float]:
    """Return text, usage, and seconds to the first piece. Raises OSError or ValueError if the reply is incomplete."""
    body = {
        "model": "embedded", "messages": request.messages, "temperature": 0, "max_tokens": MAX_TOKENS, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    headers = {"Content-Type": "application/json", "x-session-id": request.session, "Idempotency-Key": key}
    started, first = time.perf_counter(), None
    text, usage = "", None
    sent = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(sent, timeout=60) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise ValueError(event["error"]["code"])
            first = first or time.perf_counter()
            text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            usage = event.get("usage") or usage
    if usage is None or first is None:
        raise ValueError("the stream ended early")
    return text, usage, first - started
