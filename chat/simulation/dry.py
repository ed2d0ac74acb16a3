"""Replaces the model in a dry run, by a model that computes nothing, scripted replies, and token ids for texts."""

from __future__ import annotations

import math
import random
import zlib
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor

from hybridmem.chat.engine.choose import Choice, Plan
from hybridmem.chat.engine.requests import Generation
from hybridmem.chat.prompts import Message, Tokenizer, encode_turn
from hybridmem.chat.sampling.logprobs import Chosen
from hybridmem.chat.simulation.workload import Event
from hybridmem.memory import FormatError, MemorySpec, Step

_MEAN_REPLY_TOKENS = 40
"""The mean length in tokens of made-up replies in a dry run."""
_POOL_TOKENS = 1 << 16


class Script:
    """Holds scripted replies, from which an engine chooses its tokens in a dry run.

    Args:
        stop_id: the token that ends each reply.
    """

    def __init__(self, stop_id: int) -> None:
        self._stop_id = stop_id
        self._replies: dict[Generation, list[int]] = {}

    def expect(self, generation: Generation, reply: list[int]) -> None:
        """Set the reply of a generation, from the next step on."""
        self._replies[generation] = reply

    def forget(self, generation: Generation) -> None:
        self._replies.pop(generation, None)

    def choose(self, logits: Tensor, plan: Plan) -> list[Choice]:
        """Choose the next scripted tokens. Pass this to `Engine(choose=...)`."""
        return [Chosen(self._next(job.generation)) if job.wants_choice(n_tokens) else None for job, n_tokens in plan]

    def _next(self, generation: Generation) -> int:
        reply, n_chosen = self._replies[generation], len(generation.token_ids)
        return reply[n_chosen] if n_chosen < len(reply) else self._stop_id


class NoModel:
    """Replaces a model of this spec, and computes nothing."""

    def __init__(self, memory_spec: MemorySpec) -> None:
        self.memory_spec = memory_spec

    def __call__(self, step: Step) -> Tensor:
        return torch.empty(0)


class Words:
    """Makes the token ids of users' messages and, in a dry run, of replies.

    In a dry run, only the number of tokens matters. So a message is encoded once, and later conversations look its ids
    up by its text.

    Args:
        tokenizer: encodes texts. None: users can only say made-up tokens.
        stop_ids: ids that made-up tokens never have.
        is_dry: whether to remember encodings, as above.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, stop_ids: tuple[int, ...], seed: int, *, is_dry: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._is_dry = is_dry
        self._known: dict[tuple[object, ...], list[int]] = {}
        ids = np.random.default_rng(seed).integers(0, vocab_size, _POOL_TOKENS)
        fine = next(i for i in range(vocab_size) if i not in stop_ids)
        self._pool: list[int] = np.where(np.isin(ids, stop_ids), fine, ids).tolist()

    def opening(self, arrival: Event) -> list[int]:
        """Return the tokens with which every conversation with this opening begins."""
        if not arrival.opening:
            return []
        if arrival.n_tokens is not None:
            return self._make_up(repr(arrival.opening), arrival.n_tokens)
        key = ("opening", arrival.opening)
        if key not in self._known:
            a, b = (self._encode_first(arrival, text) for text in ("a", "b"))
            n_common = next(
                (i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b))
            )
            self._known[key] = a[:n_common]
        return self._known[key]

    def first(self, arrival: Event, event: Event) -> list[int]:
        """Return the tokens of a user's first message, after the opening."""
        if event.text is None:
            return self.opening(arrival) + self._made_up_of(event)
        return self._remembered(
            ("first", arrival.opening, event.text), lambda: self._encode_first(arrival, str(event.text))
        )

    def later(self, messages: list[Message], event: Event) -> list[int]:
        """Return the tokens that another message adds to a conversation. Raises FormatError as `encode_turn`."""
        if event.text is None:
            return self._made_up_of(event)
        history = (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] if self._is_dry else messages
        )
        return self._remembered(
            ("later", event.text), lambda: encode_turn(self._some_tokenizer(), history, str(event.text))
        )

    def reply(self, event: Event) -> list[int]:
        """Return a dry run's reply, without its end. It is the right one if that is known, and made up otherwise."""
        if event.n_reply is None and event.reply is not None and self._tokenizer is not None:
            tokenizer, text = self._tokenizer, event.reply
            return self._remembered(("reply", text), lambda: list(tokenizer.encode(text, add_special_tokens=False)))
        n_tokens = event.n_reply
        if n_tokens is None:
            uniform = random.Random(f"{self._seed}/{event.user}/{event.at}").random()
            n_tokens = 1 + int(-math.log(1 - uniform) * _MEAN_REPLY_TOKENS)
        return self._make_up(f"reply to {event.user} at {event.at}", n_tokens)

    def _encode_first(self, arrival: Event, text: str) -> list[int]:
        messages = [
            *({"role": role, "content": content} for role, content in arrival.opening),
            {"role": "user", "content": text},
        ]
        try:
            return list(
                self._some_tokenizer().apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            )
        except TemplateError as error:
            raise FormatError(f"this chat template refuses the opening: {error}") from error

    def _made_up_of(self, event: Event) -> list[int]:
        return self._make_up(f"{event.user} at {event.at}", event.n_tokens or 1)

    def _make_up(self, what: str, n_tokens: int) -> list[int]:
        """Make up token ids. The same `what` always gets the same ids."""
        start = zlib.crc32(f"{self._seed} {what}".encode()) % _POOL_TOKENS
        n_rounds = (start + n_tokens) // _POOL_TOKENS + 1
        return (
            (self._pool * n_rounds)[start : start + n_tokens] if n_rounds > 1 else self._pool[start : start + n_tokens]
        )

    def _remembered(self, key: tuple[object, ...], encode: Any) -> list[int]:
        if not self._is_dry:
            return list(encode())
        if key not in self._known:
            self._known[key] = list(encode())
        return self._known[key]

    def _some_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None or not self._tokenizer.chat_template:
            raise FormatError(
                "this workload says texts, which needs a tokenizer with a chat template; make up messages instead "
                "(n_tokens)"
            )
        return self._tokenizer
