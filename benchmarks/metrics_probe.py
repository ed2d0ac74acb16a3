"""Reads a server's /metrics again and again, in a process that does nothing else, and reports the time of each reading.

In the event loop of the client that sends the load, a reading would have to wait for the client. So this file is a
separate program, which prints the seconds of each reading on a line.
"""

from __future__ import annotations

import math
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"content-length: (\d+)")
_PAUSE_SECONDS = 0.1
_STOLEN = 7
"""The place of "steal" among the ticks of /proc/stat."""


@dataclass
class Readings:
    """Holds the seconds of each reading, and the share of processor time that the hypervisor took meanwhile.

    The share is NaN on systems that do not report it.
    """

    seconds: list[float] = field(default_factory=list)
    stolen: float = math.nan


@contextmanager
def probing(url: str) -> Iterator[Readings]:
    """Read a server's /metrics in another process inside a `with` block; the readings are complete after the block."""
    readings, before = Readings(), _jiffies()
    with subprocess.Popen([sys.executable, "-S", "-E", __file__, url], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield readings
        finally:
            process.terminate()
            assert process.stdout is not None
            readings.seconds = [float(line) for line in process.stdout.read().splitlines()]
            passed = [after - then for then, after in zip(before, _jiffies(), strict=True)]
            if sum(passed):
                readings.stolen = passed[_STOLEN] / sum(passed)


def _jiffies() -> list[int]:
    """Return how many ticks all processors have spent on each kind of work since boot; empty except on Linux."""
    try:
        return [int(ticks) for ticks in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1 : _STOLEN + 2]]
    except OSError:
        return []


def _probe(url: str) -> None:
    host, port = urlsplit(url).hostname, urlsplit(url).port
    with socket.create_connection((host, port)) as connection:
        while True:
            time.sleep(_PAUSE_SECONDS)
            started = time.perf_counter()
            connection.sendall(f"GET /metrics HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
            _read(connection)
            print(time.perf_counter() - started, flush=True)


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
