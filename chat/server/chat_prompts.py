"""Encodes the messages of a request, also in orders of roles that a chat template does not know.

Agents send several system messages, also between other turns, and several messages of a user after each other. Many
templates refuse that, or leave such messages out without a word. Then the messages are arranged so that all of them
reach the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, takewhile

from hybridmem.chat.prompts import Message, Tokenizer, encode_chat, render
from hybridmem.chat.special_tokens import special_tokens_of
from hybridmem.chat.tools.families import Thoughts
from hybridmem.memory import FormatError
from hybridmem.memory.sequences import plain_ids

_TAIL_TOKENS = 8
_THOUGHTS = Thoughts()
_JOINT = "\n\n"


def encode_messages(
    texts: Tokenizer, messages: list[Message], *, parse_special: bool = False, continues: bool = False,
    thoughts: Thoughts = _THOUGHTS,
) -> list[int]:  # fmt: skip
    """Return the token ids of a chat up to the beginning of the reply.

    Args:
        continues: whether the last message is the beginning of the reply, which goes on after its last character.
        thoughts: the texts around the model's thoughts.
    Raises:
        FormatError: as `encode_chat`, for the messages as they were given.
    """
    if continues:
        ids = encode_messages(texts, messages[:-1], parse_special=parse_special)
        return ids + _begin_reply(texts, ids, messages[-1], thoughts)
    if not _is_unusual(messages):
        return encode_chat(texts, messages, parse_special=parse_special)
    first: FormatError | None = None
    for arranged in _arrangements(messages):
        try:
            if _has_all_systems(texts, arranged):
                return encode_chat(texts, arranged, parse_special=parse_special)
        except FormatError as error:
            first = first or error
    if first is not None:
        raise first
    return encode_chat(texts, messages, parse_special=parse_special)


def _begin_reply(texts: Tokenizer, ids: list[int], message: Message, thoughts: Thoughts) -> list[int]:
    """Return the token ids of the beginning of a reply. Thoughts that the prompt has opened are closed before it."""
    special = special_tokens_of(texts, "assistant")
    tail = str(texts.decode(plain_ids(ids[-_TAIL_TOKENS:]), skip_special_tokens=False)).rstrip()
    if not tail.endswith(thoughts.begin.strip()):
        return special.encode_text(message["content"])
    thought = special.encode_text(str(message.get("reasoning_content") or ""))
    end = list(texts.encode(f"\n{thoughts.end.strip()}\n\n", add_special_tokens=False))
    return thought + end + special.encode_text(message["content"])


def _is_unusual(messages: list[Message]) -> bool:
    """Return whether there is a system message that is not the first, or two messages of a user after each other."""
    roles = [message["role"] for message in messages]
    return "system" in roles[1:] or any(pair == ("user", "user") for pair in pairwise(roles))


def _arrangements(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield the messages as they are, and then in arrangements that more and more templates accept."""
    yield messages
    opening = list(takewhile(lambda message: message["role"] == "system", messages))
    rest = messages[len(opening) :]
    joined = [{"role": "system", "content": _JOINT.join(message["content"] for message in opening)}] if opening else []
    yield [*joined, *rest]
    yield [*joined, *_with_users_joined(map(_as_user, rest))]
    yield _with_users_joined(map(_as_user, messages))


def _as_user(message: Message) -> Message:
    """Return a system message as a user's message that says who speaks."""
    if message["role"] != "system":
        return message
    return {"role": "user", "content": f"<system>\n{message['content']}\n</system>"}


def _with_users_joined(messages: Iterator[Message]) -> list[Message]:
    joined = list[Message]()
    for message in messages:
        if joined and message["role"] == joined[-1]["role"] == "user":
            joined[-1] = {**joined[-1], "content": joined[-1]["content"] + _JOINT + message["content"]}
        else:
            joined.append(message)
    return joined


def _has_all_systems(texts: Tokenizer, messages: list[Message]) -> bool:
    """Return whether the template writes every system message. Raises FormatError if it refuses the messages."""
    if [message["role"] for message in messages].count("system") < 2:
        return True
    text = render(texts, messages)
    return all(message["content"].strip() in text for message in messages if message["role"] == "system")
