"""Reads /metrics of a server again and again, in a process that does nothing else, and says how long each reading took.

A client that sends load has a loop of its own in which a reading would wait as well. So this file, as a program, reads
beside it and writes the seconds of each reading as a line, and how much later than asked for it was woken before it:
what this machine makes any process wait, whatever the server does.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"content-length: (\d+)")
_PAUSE_SECONDS = 0.1


@dataclass
class Readings:
    """Holds the seconds of each reading, and those that the reader was woken too late before it."""

    seconds: list[float] = field(default_factory=list)
    late_seconds: list[float] = field(default_factory=list)


@contextmanager
def probing(url: str) -> Iterator[Readings]:
    """Read /metrics meanwhile, in another process; afterwards all readings are there."""
    readings = Readings()
    with subprocess.Popen([sys.executable, "-S", "-E", __file__, url], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield readings
        finally:
            process.terminate()
            assert process.stdout is not None
            for line in process.stdout.read().splitlines():
                took, late = map(float, line.split())
                readings.seconds.append(took)
                readings.late_seconds.append(late)


def _probe(url: str) -> None:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    with socket.create_connection((host, port)) as connection:
        while True:
            asleep = time.perf_counter()
            time.sleep(_PAUSE_SECONDS)
            started = time.perf_counter()
            connection.sendall(f"GET /metrics HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
            _read(connection)
            print(time.perf_counter() - started, started - asleep - _PAUSE_SECONDS, flush=True)


def _read(connection: socket.socket) -> None:
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    n_left = int(_LENGTH.findall(head.lower())[0]) - len(body)
    while n_left > 0:
        n_left -= len(connection.recv(1 << 16))


if __name__ == "__main__":
    _probe(sys.argv[1])
