"""Starts llama.cpp's server and ours with a GGUF file, and asks them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PATIENCE_SECONDS = 300.0
_OURS = "from hybridmem.chat.cli import main; main()"


@dataclass(frozen=True)
class Server:
    """Holds the address and the process of a running server.

    Attributes:
        ready_s: seconds from the start of its process until /health said that it is ready.
    """

    url: str
    pid: int
    ready_s: float

    def post(self, path: str, **body: Any) -> Any:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        return json.loads(urllib.request.urlopen(request, timeout=_PATIENCE_SECONDS).read())


def resident_mib(pid: int | str) -> float:
    """Return a process's resident memory in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


@contextmanager
def llama_server(
    programs: Path, model: Path, *, slots: int = 8, context: int = 32_768, keeps: str = "f16", n_threads: int = 1
) -> Iterator[Server]:
    """Run llama.cpp's server.

    Args:
        keeps: the type in which the server keeps keys and values.
        programs: the folder of llama-server.
        context: the number of tokens of all slots together.
    """
    options = {"-m": model, "-np": slots, "-t": n_threads, "-tb": n_threads, "-c": context, "-fa": "on"}
    options |= {"-ctk": keeps, "-ctv": keeps}
    words = [str(word) for option in options.items() for word in option]
    with _running([str(programs / "llama-server"), "--no-webui", *words], n_threads) as server:
        yield server


@contextmanager
def our_server(model: Path | str, *options: str, n_threads: int = 1) -> Iterator[Server]:
    """Run `hybrid-memory serve`."""
    command = [sys.executable, "-c", _OURS, "serve", "--model", str(model), "--threads", str(n_threads), *options]
    with _running(command, n_threads) as server:
        yield server


@contextmanager
def quantised(programs: Path, model: Path, kind: str) -> Iterator[Path]:
    """Convert a GGUF file to another type, such as "F32" or "Q4_0", by llama-quantize.

    The new file is removed when the `with` block ends.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / f"{model.stem}-{kind}.gguf"
        command = [str(programs / "llama-quantize"), "--allow-requantize", "--pure", str(model), str(target), kind, "1"]
        subprocess.run(command, check=True, capture_output=True)
        yield target


@contextmanager
def _running(command: list[str], n_threads: int) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, started = f"http://127.0.0.1:{port}", time.perf_counter()
    with subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": str(n_threads)},
    ) as process:  # fmt: skip
        try:
            while not _is_ready(url):
                if process.poll() is not None or time.perf_counter() - started > _PATIENCE_SECONDS:
                    raise RuntimeError(f"{command[0]} did not start; run it by hand to see why: {' '.join(command)}")
                time.sleep(0.01)
            yield Server(url, process.pid, time.perf_counter() - started)
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_ready(url: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{url}/health", timeout=5).status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
