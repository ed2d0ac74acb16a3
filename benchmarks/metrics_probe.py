"""Reads /metrics of a server again and again, in a process that does nothing else, and says how long each reading took.

A client that sends load has a loop of its own in which a reading would wait as well. So this file, as a program, reads
beside it and writes the seconds of each reading as a line.
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
    """Holds the seconds of each reading, and the share of processor time that the host of this machine took meanwhile.
    That is NaN where the system does not say.
    """

    seconds: list[float] = field(default_factory=list)
    stolen: float = math.nan


@contextmanager
def probing(url: str) -> Iterator[Readings]:
    """Read /metrics of a server in another process while the block runs; the readings are complete after it."""
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
    """Return what all processors have done since the start, in ticks; nothing but on Linux."""
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
