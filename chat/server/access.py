"""Decides whether a request is accepted, from its head, before its body is read."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from hybridmem.chat.server.errors import ApiError, clip
from hybridmem.chat.server.keys import Keys, Use
from hybridmem.chat.server.options import ServerOptions
from hybridmem.chat.server.page_files import is_page

Headers = Mapping[bytes, bytes]
_OPEN_TO_ALL = "/health"


class Access:
    """Holds the rules for hosts, origins and keys.

    A web page can make its visitor's browser send requests to this machine. The page may use a host name of its own
    that points to this machine (DNS rebinding), or send requests whose responses it cannot read. A key prevents both.
    Without a key, hosts and origins are checked.
    """

    def __init__(self, options: ServerOptions) -> None:
        self._keys = Keys(options.all_keys)
        self._hosts = frozenset(name.lower().strip("[]") for name in options.allowed_hosts)
        self._origins = frozenset(origin.lower() for origin in options.allowed_origins)
        self._checks_hosts = not self._keys or bool(self._hosts)
        self._checks_origins = not self._keys or bool(self._origins)

    def check(self, method: str, path: str, headers: Headers) -> Use | None:
        """Accept a request, and return the usage counter of its key. Raises ApiError 401 or 403."""
        if path == _OPEN_TO_ALL:
            return None
        host, origin = headers.get(b"host"), headers.get(b"origin")
        self._check_host(host)
        if origin is not None and self._checks_origins and not (self.allows_origin(origin) or _is_own(origin, host)):
            message = f"Pages of {clip(_text(origin))!r} may not ask here; allow them with --allowed-origin."
            raise ApiError(403, message, code="origin_not_allowed")
        if self.is_preflight(method, headers) or is_page(path):
            return None
        return self._find_key(headers)

    def allows_origin(self, origin: bytes) -> bool:
        return "*" in self._origins or _text(origin).lower() in self._origins

    def headers_for(self, headers: Headers) -> list[tuple[bytes, bytes]]:
        """Return the headers by which only an allowed page may read the response."""
        origin = headers.get(b"origin")
        if origin is not None and self.allows_origin(origin):
            shown = (b"access-control-expose-headers", b"x-request-id, retry-after")
            return [(b"access-control-allow-origin", origin), shown, (b"vary", b"Origin")]
        return [(b"vary", b"Origin")] if self._origins else []

    def is_preflight(self, method: str, headers: Headers) -> bool:
        """Return whether this is a preflight: a browser asks, for an allowed page, what the page may send.

        It never has a key.
        """
        asks = method == "OPTIONS" and b"access-control-request-method" in headers
        return asks and self.allows_origin(headers.get(b"origin", b""))

    def _check_host(self, host: bytes | None) -> None:
        if host is None or not self._checks_hosts:  # HTTP/1.0 may leave the host out, but no browser does.
            return
        name = _name_of(_text(host))
        if name not in self._hosts and not _is_loopback(name):
            message = f"This server is not {clip(name)!r}; if it is to be, allow that name with --allowed-host."
            raise ApiError(403, message, code="host_not_allowed")

    def _find_key(self, headers: Headers) -> Use | None:
        """Return the usage counter of the key in `Authorization`, or in `x-api-key`, which Anthropic's clients send."""
        if not self._keys:
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        wanted = {"WWW-Authenticate": "Bearer"}
        if scheme.lower() != b"bearer" or not key:
            key = headers.get(b"x-api-key", b"")
        if not key:
            message = "This server wants an API key; send it as 'Authorization: Bearer KEY', or as 'x-api-key: KEY'."
            raise ApiError(401, message, code="missing_api_key", headers=wanted)
        use = self._keys.find(key.strip())
        if use is None:
            raise ApiError(401, "This is not the server's API key.", code="invalid_api_key", headers=wanted)
        return use


def preflight_headers(headers: Headers) -> dict[str, str]:
    """Return the headers of the response to a preflight. The page may send every header that it asks for."""
    return {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": _text(headers.get(b"access-control-request-headers", b"")),
        "Access-Control-Max-Age": "600",
    }


def _name_of(host: str) -> str:
    """Return the name in a Host header, without port, brackets and a final dot."""
    name, _, port = host.rpartition(":")
    if not name or not port.isdigit():
        name = host.removesuffix(":")
    return name.strip("[]").removesuffix(".").lower()


def _is_own(origin: bytes, host: bytes | None) -> bool:
    """Return whether an origin is the server's own page, which has the checked host and the port of the request."""
    scheme, _, rest = origin.partition(b"://")
    return scheme in (b"http", b"https") and host is not None and rest.lower() == host.lower()


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def _text(header: bytes) -> str:
    return header.decode("latin-1")
