"""Holds a request on its way from the gateway to a replica."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

from hybridmem.chat.server.sessions.responses import REPLY_SEED

CHARGE = "hybrid_memory.charge"
"""The type of an additional message, beside those of ASGI. It says how many tokens to charge to a key."""


@dataclass(frozen=True)
class ForwardedRequest:
    """Holds an HTTP request whose body has been read, in values that can be pickled.

    Attributes:
        client: the host and port of the client, or those that a proxy in front of the gateway names.
        reply_seed: the seed of a response that may be stored. All replicas that answer the request draw equal ids from
            it.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    client: tuple[str, int] | None
    body: bytes
    reply_seed: str | None = None

    def scope(self) -> Scope:
        """Return the request as the scope of an ASGI app."""
        more = {} if self.reply_seed is None else {REPLY_SEED: self.reply_seed}
        return more | {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
            "method": self.method, "path": self.path, "raw_path": self.path.encode(), "query_string": self.query,
            "root_path": "", "headers": list(self.headers), "client": self.client, "server": None, "state": {},
        }  # fmt: skip

    def header(self, name: str) -> str | None:
        """Return the value of a header. If it was sent twice, return the last value."""
        found = [value for key, value in self.headers if key.lower() == name.encode()]
        return found[-1].decode("latin-1") if found else None

    @staticmethod
    def of(scope: Scope, body: bytes) -> ForwardedRequest:
        headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
        client = scope.get("client")
        return ForwardedRequest(
            scope["method"], scope["path"], scope.get("query_string", b""), headers,
            None if client is None else (str(client[0]), int(client[1])), body,
        )  # fmt: skip
