"""Holds the limits of a server: sizes, numbers, times, and who may connect."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.server.access_log import FORMS, Form
from hybridmem.chat.server.keys import Key, Keys, check_key
from hybridmem.memory import SpecError
from hybridmem.memory.blocks import read_count

MOST_CHOICES = 16
"""A request may ask for this many replies, which is its prompts times `n`."""

_HOST = re.compile(r"[^\s/:@,]+|\[[0-9a-fA-F:.]+\]")
_PICTURE_HOST = re.compile(rf"(?:{_HOST.pattern})(?::[0-9]{{1,5}})?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/,]+|null")


@dataclass(frozen=True)
class ServerOptions:
    """Holds the limits of a server.

    Attributes:
        alias: further names by which clients may call the model, such as "gpt-5" or "claude-*".
        api_key: the key that clients must send as `Authorization: Bearer KEY`. None: they need no key.
        keys: the keys of several clients, each with its own limits, as `Key` or as tables of the configuration file.
        access_log: the form of the log, which has a line for each request on standard error: "off", "text" or "json".
        ssl_certfile, ssl_keyfile: PEM files. The first holds the certificate, followed by the certificates that sign
            it; the second holds its key.
        allowed_hosts: names, without port, that a request's Host may have in addition to those of loopback. If none are
            given, a request with a key may name any host.
        allowed_origins: the origins of web pages that may send requests and read the responses, such as
            "https://example.com". "*" stands for all. If none are given, any page may send requests with a key, but no
            page may read the responses.
        parse_special: whether messages may contain special tokens, so that clients can write turns. Prompts of
            /v1/completions always may.
        isolate: whether requests share cached prefixes only with those that have the same `prompt_cache_key`, `user`
            and `Authorization`. Otherwise, the API key and `cache_salt` decide.
        max_body_bytes: the most bytes of a request's body.
        max_tokens: the most tokens of a prompt and its reply together. None: as many as the model's config and the
            memory's budget allow.
        default_tokens: the most tokens of a chat's reply if the request names no number. None: as many as fit beside
            the prompt.
        max_requests: how many requests are answered at once. Others are told to come back later.
        max_connections: how many connections may be open. When one more comes, the one that has waited longest for its
            client's bytes is closed.
        max_peer_connections: how many of these connections may come from one address.
        head_seconds: a request's head must arrive within this time.
        body_seconds: a body must arrive within this time.
        body_bytes_per_second: the least average rate of a body, not counting its first 5 seconds.
        stall_seconds: a client that takes no bytes for this long counts as gone.
        grace_seconds: how long replies may go on when the server is told to stop.
        pooling: how texts are embedded, "last" or "mean". None: requests must name it.
        sampling: the values of options that a request leaves out. None: those in the checkpoint's
            generation_config.json, or else a temperature of 1.
        save: a function that saves the prefix cache. It is called when the engine has stopped.
        save_seconds: the interval at which `save` is also called while the server runs. None: it is called only at the
            end.
        sessions: the folder that keeps stored sessions across restarts. None: they end with the server.
        session_bytes: the most bytes of the texts and token ids of all sessions. Beyond that, the sessions used longest
            ago are deleted.
        warm: a file with one request on each line. The prompts of these requests are computed at the start and kept.
        slot_save_path: the folder in which clients of llama.cpp's server save the prefixes of slots. None: they cannot.
        trees: whether chats and messages are stored too, as trees of their agents' steps.
        picture_hosts: hosts from which the server fetches pictures that requests name by URL, such as "example.com" or
            "example.com:8443". All other pictures must be data URLs: otherwise a client could make the server send
            requests to any address that it can reach.
        max_pictures: the most pictures of a request.
        max_picture_bytes: the most bytes of a picture's file. max_picture_pixels: the most pixels that it may have,
            which is checked by the file's header before the picture is decoded.
        session_days: a session that nobody has used for so many days is deleted. Sessions with a pinned node stay.
    Raises:
        SpecError: a wrong value. The message names the option and the value.
    """

    alias: tuple[str, ...] = ()
    api_key: str | None = None
    keys: tuple[Key, ...] = ()
    access_log: Form = "off"
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    parse_special: bool = False
    isolate: bool = False
    max_body_bytes: int = 1 << 20
    max_tokens: int | None = None
    default_tokens: int | None = None
    max_requests: int = 256
    max_connections: int = 768
    max_peer_connections: int = 384
    head_seconds: float = 10.0
    body_seconds: float = 30.0
    body_bytes_per_second: int = 1024
    stall_seconds: float = 60.0
    grace_seconds: float = 10.0
    pooling: Literal["last", "mean"] | None = None
    sampling: Sampling | None = None
    save: Callable[[], None] | None = None
    save_seconds: float | None = None
    sessions: str | None = None
    session_bytes: int = 1 << 30
    session_days: float = 30.0
    trees: bool = False
    warm: str | None = None
    slot_save_path: str | None = None
    picture_hosts: tuple[str, ...] = ()
    max_pictures: int = 16
    max_picture_bytes: int = 20 << 20
    max_picture_pixels: int = 48_000_000

    def __post_init__(self) -> None:
        if self.api_key is not None:
            check_key(self.api_key, "the API key")
        object.__setattr__(self, "keys", tuple(map(Key.read, self.keys)))
        Keys(self.all_keys)
        if self.access_log not in FORMS:
            raise SpecError(f"access_log={self.access_log!r}; give one of {', '.join(FORMS)}")
        check_certificate(self.ssl_certfile, self.ssl_keyfile)
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise SpecError(f"allowed host {host!r}; give a name without scheme and port, such as example.com")
        for host in self.picture_hosts:
            if not _PICTURE_HOST.fullmatch(host):
                raise SpecError(f"picture host {host!r}; give a name without scheme, such as example.com")
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise SpecError(f"allowed origin {origin!r}; give scheme and name, such as https://example.com, or *")
        least = {
            "max_body_bytes": 1,
            "max_tokens": 2,
            "default_tokens": 1,
            "max_requests": 1,
            "max_connections": 1,
            "max_peer_connections": 1,
            "body_bytes_per_second": 1,
            "session_bytes": 1,
            "max_pictures": 1,
            "max_picture_bytes": 1,
            "max_picture_pixels": 1,
        }
        for name, n in least.items():
            value = getattr(self, name)
            if value is None and name in ("max_tokens", "default_tokens"):
                continue
            read_count(name, value, n)
        for name in ("head_seconds", "body_seconds", "stall_seconds", "grace_seconds"):
            if not getattr(self, name) >= 0:
                raise SpecError(f"{name}={getattr(self, name)!r}; give seconds, 0 or more")
        if not self.session_days > 0:
            raise SpecError(f"session_days={self.session_days!r}; give days above 0")
        if self.save_seconds is not None and not self.save_seconds > 0:
            raise SpecError(f"save_seconds={self.save_seconds!r}; give seconds above 0, or None")

    @property
    def all_keys(self) -> tuple[Key, ...]:
        """Return all keys that clients may send. If there are none, clients need no key."""
        own = () if self.api_key is None else (Key("api-key", self.api_key),)
        return (*own, *self.keys)


def check_certificate(certfile: str | None, keyfile: str | None) -> None:
    """Raise SpecError if TLS cannot use the files of a certificate."""
    if certfile is None and keyfile is None:
        return
    if certfile is None or keyfile is None:
        raise SpecError("TLS needs both --ssl-certfile and --ssl-keyfile")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certfile, keyfile)
    except (OSError, ssl.SSLError) as error:
        raise SpecError(f"the certificate {certfile} with the key {keyfile} cannot be used: {error}") from None
