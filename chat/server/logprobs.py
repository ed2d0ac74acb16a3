"""Writes log probabilities in the form that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybridmem.chat.sampling.logprobs import Chosen
from hybridmem.chat.sampling.token_bytes import TokenBytes

_LEAST = -9999.0
"""Replaces minus infinity, which JSON lacks."""


def chat_logprobs(tokens: TokenBytes, chosen: Sequence[Chosen]) -> dict[str, Any] | None:
    """Return the `logprobs` of a choice in a chat completion. None: the client did not ask for any."""
    content = [
        _entry(tokens, c.token_id, c.logprob) | {"top_logprobs": [_entry(tokens, *pair) for pair in c.top]}
        for c in chosen
        if c.logprob is not None
    ]
    return {"content": content, "refusal": None} if content else None


def completion_logprobs(tokens: TokenBytes, chosen: Sequence[Chosen], start: int) -> dict[str, Any] | None:
    """Return the `logprobs` of a choice in a completion. `start` counts the characters of text before these tokens."""
    if not chosen:
        return None
    texts = [_text(tokens.of(c.token_id)) for c in chosen]
    offsets = [start + sum(map(len, texts[:i])) for i in range(len(texts))]
    top = [{_text(tokens.of(i)): _finite(value) for i, value in c.top} for c in chosen]
    return {
        "tokens": texts,
        "token_logprobs": [_finite(c.logprob) for c in chosen],
        "top_logprobs": top if any(top) else None,
        "text_offset": offsets,
    }


def _entry(tokens: TokenBytes, token_id: int, logprob: float | None) -> dict[str, Any]:
    raw = tokens.of(token_id)
    return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _finite(logprob: float | None) -> float:
    return max(_LEAST, _LEAST if logprob is None else logprob)
