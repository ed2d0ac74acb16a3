"""Writes log probabilities in the form that OpenAI's clients read."""

from __future__ import annotations

from codecs import getincrementaldecoder
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


def completion_logprobs(
    tokens: TokenBytes, chosen: Sequence[Chosen], text: str, start: int = 0
) -> dict[str, Any] | None:
    """Return the `logprobs` of a choice in a completion. The first token of a prompt has none, which is null.

    Args:
        text: the text for which these tokens stand. start: the number of characters before it.
    """
    if not chosen:
        return None
    raws = [tokens.of(c.token_id) for c in chosen]
    top = [_top_of(tokens, c) for c in chosen]
    return {
        "tokens": list(map(_text, raws)),
        "token_logprobs": [None if c.logprob is None else _finite(c.logprob) for c in chosen],
        "top_logprobs": top if any(top) else None,
        "text_offset": [start + at for at in _offsets(raws, text)],
    }


def prompt_logprobs(tokens: TokenBytes, token_ids: Sequence[int], chosen: Sequence[Chosen]) -> list[Any] | None:
    """Return vLLM's `prompt_logprobs`: for each token of the prompt, the token itself and the likeliest tokens, by
    their ids."""
    if not chosen:
        return None
    return [None] * (len(token_ids) - len(chosen)) + [_ranked(tokens, c) for c in chosen]


def _ranked(tokens: TokenBytes, chosen: Chosen) -> dict[str, Any]:
    pairs = {i: (value, rank) for rank, (i, value) in enumerate(chosen.top, 1)}
    pairs.setdefault(chosen.token_id, (chosen.logprob or 0.0, getattr(chosen, "rank", 0)))
    return {
        str(i): {"logprob": _finite(value), "rank": rank, "decoded_token": _text(tokens.of(i))}
        for i, (value, rank) in pairs.items()
    }


def _top_of(tokens: TokenBytes, chosen: Chosen) -> dict[str, float] | None:
    """Return the likeliest tokens and the token itself, by their texts.

    If several have the same text, keep the likeliest.
    """
    if not chosen.top:
        return None
    top = dict[str, float]()
    for i, value in (*chosen.top, (chosen.token_id, chosen.logprob)):
        top.setdefault(_text(tokens.of(i)), _finite(value))
    return top


def _offsets(raws: Sequence[bytes], text: str) -> list[int]:
    """Return the place of each token in a text, in characters.

    If several tokens make up one character, all of them have the place of that character. Tokens that are not in the
    text, such as the one that begins a sequence, have no length.
    """
    decoder, offsets, at = getincrementaldecoder("utf-8")("replace"), list[int](), 0
    for raw in raws:
        offsets.append(at)
        new = decoder.decode(raw)
        # The text may lack the leading space of the token of its first word.
        shown = next((words for words in (new, new.lstrip(" ")) if text.startswith(words, at)), "")
        at += len(shown)
    return offsets


def _entry(tokens: TokenBytes, token_id: int, logprob: float | None) -> dict[str, Any]:
    raw = tokens.of(token_id)
    return {"token": _text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def token_text(tokens: TokenBytes, token_id: int) -> str:
    """Return the text of a token. A part of a character is shown as a replacement character."""
    return _text(tokens.of(token_id))


def _finite(logprob: float | None) -> float:
    return max(_LEAST, _LEAST if logprob is None else logprob)
