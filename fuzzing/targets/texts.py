"""Feeds untrusted texts: chat templates, heads of requests, and texts with holes."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from fuzzing.mutation import damage_bytes
from hybridmem.chat.prompts import encode_chat, encode_turn, load_tokenizer
from hybridmem.chat.server.heads import check_head, find_head_end
from hybridmem.chat.session.template_syntax import parse

_MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]


class ChatTemplate:
    """Renders chats by hostile templates, which must end, use little memory, and reach nothing outside."""

    _parts = (
        "{{ bos_token }}", "{% for message in messages %}", "{% endfor %}", "{{ message.content }}",
        "{{ message['role'] }}", "{% if add_generation_prompt %}", "{% endif %}", "{% set x = 1 %}", "{{ x }}",
        "{{ messages | tojson }}", "{{ raise_exception('x') }}", "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__ }}",
        "{{ strftime_now('%Y') }}", "{% macro m(a) %}{{ a }}{% endmacro %}", "{{ m('x') }}", "{{ 'x' * 1000 }}",
        "{{ messages[0].content.__globals__ }}", "{{ range(99) | list }}", "{% generation %}", "{% endgeneration %}",
        "{{ self }}", "{{ joiner('x') }}", "{{ lipsum(1) }}", "{{ namespace(a=1) }}", "{% include 'x' %}",
        "{% import '/etc/passwd' as p %}", "{{ 10 ** 10 }}", "{{ '%s' | format(1) }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% break %}", "{{ none.x }}", "{{ messages | map(attribute='content') | join }}", "{#", "#}", "{%", "%}",
    )  # fmt: skip

    def __init__(self, folder: Path) -> None:
        self._tokenizer: Any = load_tokenizer("embedded")
        self._seed = self._tokenizer.chat_template.encode()

    def draw(self, random: Random) -> bytes:
        if random.random() < 0.5:
            return damage_bytes(self._seed, random)
        return "".join(random.choice(self._parts) for _ in range(random.randrange(1, 12))).encode()

    def read(self, data: bytes) -> None:
        self._tokenizer.chat_template = data.decode(errors="replace")
        encode_chat(self._tokenizer, _MESSAGES)
        encode_turn(self._tokenizer, _MESSAGES[:2], "c")


class RequestHead:
    """Parses damaged heads of requests."""

    _seeds = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 12\r\nOrigin: null\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: [::1]:80\r\nTransfer-Encoding: chunked\r\n\r\n",
    )

    def __init__(self, folder: Path) -> None:
        pass

    def draw(self, random: Random) -> bytes:
        return damage_bytes(random.choice(self._seeds), random)

    def read(self, data: bytes) -> None:
        end = find_head_end(bytearray(data), 0)
        if end is not None:
            check_head(data[:end])


class HoledText:
    """Parses damaged texts with holes."""

    _seeds = (
        "Q: {question}\nA: {answer:max_tokens=20,stop='\\n'}\nConfidence: {score:choices=['low','high']}",
        "{{braces}} {a} {b:sampling=None} {a}",
    )

    def __init__(self, folder: Path) -> None:
        pass

    def draw(self, random: Random) -> bytes:
        return damage_bytes(random.choice(self._seeds).encode(), random)

    def read(self, data: bytes) -> None:
        list(parse(data.decode(errors="replace")))
