"""Puts an app on a port, and stops it."""

from __future__ import annotations

import gc
import ipaddress
import socket
from collections.abc import Callable
from functools import partial

import uvicorn
from starlette.applications import Starlette

from hybridmem.chat.server.access_log import start_log
from hybridmem.chat.server.connections import Connection, Connections
from hybridmem.chat.server.service import Service
from hybridmem.memory import SpecError
from hybridmem.models.loading.freed_memory import give_back_freed_memory

_EXTRA_GRACE_SECONDS = 5
"""When the grace period ends, responses in progress get this many further seconds. Then connections are cut."""
_BACKLOG = 256
_GARBAGE = 700, 3, 3000
"""The thresholds of Python's garbage collector. Nobody is answered while it searches. A search among a few thousand
young objects takes one to eight milliseconds. A search among all objects takes 50, and comes only after six million new
ones. Requests leave no garbage that it would have to find.
"""


def bind(host: str, port: int, *, has_key: bool) -> socket.socket:
    """Open a listening socket.

    Args:
        port: 0 takes a free one.
        has_key: whether clients must show a key. Without a key, only this machine may connect.
    Raises:
        SpecError: a host that others can reach, without a key; a host that this machine does not have; or a port that
            is not free.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        if not has_key and not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise SpecError(
                f"host={host!r} can be reached from other machines, and there is no API key; set HYBRID_MEMORY_API_KEY "
                "(or --api-key), or listen on 127.0.0.1"
            )
        listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        # Connections inherit this option (no delay), which asyncio does not set for them. Without it, an event is held
        # back until the client has acknowledged the previous one, which takes 40 ms if the client sends no data.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except (OSError, OverflowError) as error:
        raise SpecError(f"cannot listen on host={host!r}, port={port}: {error}; choose another") from error


class Server(uvicorn.Server):
    """Runs uvicorn, and tells the service when to stop. Replies in progress may still end within the grace period."""

    def __init__(self, app: Starlette) -> None:
        service = app.state.service
        assert isinstance(service, Service)
        self._service = service
        self.connections = Connections(service.options, service.metrics)
        super().__init__(
            uvicorn.Config(
                app,
                http=partial(Connection, self.connections),  # type: ignore[arg-type]  # it is only called
                ssl_certfile=service.options.ssl_certfile,
                ssl_keyfile=service.options.ssl_keyfile,
                proxy_headers=False,  # Nothing here uses the client address that a proxy names.
                log_level="warning",
                access_log=False,
                server_header=False,
                ws="none",
                lifespan="on",
                timeout_graceful_shutdown=int(service.options.grace_seconds) + _EXTRA_GRACE_SECONDS,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.close()
        await super().shutdown(sockets)


def run(app: Starlette, listener: socket.socket, on_listening: Callable[[str], None]) -> None:
    """Serve until a signal says to stop.

    Args:
        on_listening: is called with the URL.
    """
    gc.collect()
    give_back_freed_memory()
    gc.freeze()  # A garbage collection of the imported libraries' objects would delay all requests by half a second.
    gc.set_threshold(*_GARBAGE)
    options = app.state.service.options
    start_log(options.access_log)
    on_listening(url_of(listener, has_tls=options.ssl_certfile is not None))
    Server(app).run([listener])


def url_of(listener: socket.socket, *, has_tls: bool = False) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "https" if has_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
