"""Encodes a history by the chat template, and keeps the tokens that the model chose for its replies.

A template renders a whole history as text, and the text is tokenised. But a model may have chosen other tokens for its
words than a tokenizer would: "O" and "kay" for "Okay". The memory holds the chosen tokens, and the prompt must match
them to reuse it. So wherever the rendered text shows a reply word for word, the prompt gets the tokens that were chosen
for it. The text, and so its meaning, is always what the template renders.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

from hybridmem.chat.prompts import Message, Span, Tokenizer, locate, render_guarded
from hybridmem.memory import BatchError

_WANTED = "give a list of messages such as {'role': 'user', 'content': 'Hello'}, or of Utterance('user', 'Hello')"

Encode = Callable[[int], list[int]]
"""Encodes so many characters of a segment, from its beginning on."""

_LEAST_CHECKPOINT_TOKENS = 16
"""Checkpoints lie at least this many tokens apart. A step of the model ends at each, so a nearer one costs more than it
saves.
"""
_MOST_CHECKPOINTS = 8
"""One call makes at most this many checkpoints, where the latest user messages begin. An edit returns to one of them.
"""


@dataclass(frozen=True)
class Utterance:
    """Holds a message.

    Attributes:
        role: "system", "user" or "assistant", if the chat template has that role.
        content: the text of the message.
        token_ids: the tokens that the model chose for a reply, without the one that ended it. Empty: the message was
            given as text.
    Raises:
        BatchError: a role or a content that is not a string.
    """

    role: str
    content: str
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.role, str):
            raise BatchError(f"role={self.role!r} of a message; give 'system', 'user' or 'assistant'")
        if not isinstance(self.content, str):
            raise BatchError(f"content={reprlib.repr(self.content)} of a message; give a string")


def read_messages(messages: Any) -> tuple[Utterance, ...]:
    """Read a history of `Utterance`s, or of OpenAI's messages such as {"role": "user", "content": "Hello"}.

    Raises BatchError.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
        raise BatchError(f"messages={reprlib.repr(messages)}; {_WANTED}")
    return tuple(message if isinstance(message, Utterance) else _read_message(message) for message in messages)


def _read_message(message: Any) -> Utterance:
    if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
        raise BatchError(f"{message!r} is no message; {_WANTED}")
    content = message["content"]
    if isinstance(content, list) and all(map(_is_text, content)):
        content = "".join(part["text"] for part in content)
    return Utterance(message["role"], content)


def _is_text(part: Any) -> bool:
    """Return whether a part of a content is {"type": "text", "text": ...}."""
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


@dataclass(frozen=True)
class _Segment:
    """Holds a part of the rendered text, from `start` on.

    It is either text that was tokenised by itself, or a reply with the tokens that the model chose.

    `first` is the index of its first token.

    `encode` is the function that tokenised the text. None: the tokens are a reply's.
    """

    start: int
    text: str
    first: int
    token_ids: list[int]
    encode: Encode | None


@dataclass(frozen=True)
class Rendering:
    """Holds a history as the template renders it.

    Attributes:
        token_ids: the tokens of the whole history.
        spans: where each message's content stands in the text. None if the template left the content out, or changed it
            so that its place is not certain.
    """

    token_ids: list[int]
    spans: tuple[Span | None, ...]
    segments: tuple[_Segment, ...]

    def position(self, character: int) -> int:
        """Count the tokens before this character that do not depend on the text after it."""
        for segment in self.segments:
            n = character - segment.start
            if n == len(segment.text):
                return segment.first + len(segment.token_ids)
            if n < len(segment.text):
                if segment.encode is None or n <= 0:
                    return segment.first
                return segment.first + common_tokens(segment.encode(n), segment.token_ids)
        return len(self.token_ids)


def encode_history(
    tokenizer: Tokenizer, messages: Seq[Utterance], *, awaits_reply: bool = True, parse_special: bool = False
) -> Rendering:  # fmt: skip
    """Encode a whole history. The opening of a reply follows it unless `awaits_reply` is false.

    Args:
        parse_special: whether messages may contain special tokens. Otherwise their names in messages are plain text.

    Raises FormatError as `encode_chat`.

    Cost: two renderings of the template, and one encoding by the tokenizer.
    """
    dicts = [_as_dict(m) for m in messages]
    rendered = render_guarded(tokenizer, dicts, awaits_reply=awaits_reply, parse_special=parse_special)
    text = rendered.text
    spans = locate(tokenizer, text, dicts, awaits_reply=awaits_reply)[0]
    segments: list[_Segment] = []
    at = n_tokens = 0

    def add(end: int, token_ids: Seq[int] | None = None) -> None:
        nonlocal at, n_tokens
        if end > at:
            start = at

            def encode(n: int) -> list[int]:
                return rendered.encode(tokenizer, start, start + n)

            ids = encode(end - at) if token_ids is None else list(token_ids)
            segments.append(_Segment(at, text[at:end], n_tokens, ids, encode if token_ids is None else None))
            at, n_tokens = end, n_tokens + len(ids)

    for message, span in zip(messages, spans, strict=True):
        if span is None:
            continue
        if message.token_ids and text[slice(*span)] == message.content == decode(tokenizer, message.token_ids):
            add(span[0])
            add(span[1], message.token_ids)
    add(len(text))
    return Rendering([i for segment in segments for i in segment.token_ids], tuple(spans), tuple(segments))


def decode(tokenizer: Tokenizer, token_ids: Seq[int]) -> str:
    """Return the text of a reply. Special tokens have no text."""
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=True))


def common_tokens(a: Seq[int], b: Seq[int]) -> int:
    """Count the leading tokens that both lists have in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _as_dict(message: Utterance) -> Message:
    return {"role": message.role, "content": message.content}


def choose_marks(prompt: Rendering, messages: Iterable[Utterance], n_kept: int) -> list[int]:
    """Return the positions, from `n_kept` on, at which the latest user messages begin.

    The engine itself leaves a checkpoint where each reply begins.
    """
    positions: list[int] = []
    users = [
        span
        for span, message in zip(prompt.spans, messages, strict=True)
        if message.role == "user" and span is not None
    ]
    for start, _ in reversed(users[-_MOST_CHECKPOINTS:]):
        position = prompt.position(start) - n_kept
        if position < _LEAST_CHECKPOINT_TOKENS:
            break
        positions.append(position)
    return positions[::-1]


def count_old(prompt: Rendering, n_heard: int) -> int:
    """Count the tokens of the prompt that belong to the first `n_heard` messages."""
    span = prompt.spans[n_heard - 1] if n_heard else None
    return 0 if span is None else prompt.position(span[1])
