"""Starts servers in processes of their own, and stops them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PATIENCE_SECONDS = 600.0
_START = "from hybridmem.chat.cli import main; main()"
_SAID = re.compile(r"answers at (\S+?)(/v1)?[,\s]")


@contextmanager
def running(options: Sequence[str] = (), *, tree: Path | None = None) -> Iterator[str]:
    """Run `hybrid-memory serve` on a free port inside a `with` block, which gets the server's URL without a path.

    Args:
        tree: the folder of another version of this repository, whose server is started.
    Raises:
        RuntimeError: the server does not start.
    """
    command = [sys.executable, "-c", _START, "serve", "--port", "0", *options]
    env = {**os.environ, "PYTHONPATH": str(tree)} if tree is not None else None
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, cwd=tree, env=env, stderr=errors) as process,
    ):
        try:
            yield _wait(process, errors)
            process.send_signal(signal.SIGTERM)
            process.wait(_PATIENCE_SECONDS)
        finally:
            process.kill()


def _wait(process: subprocess.Popen[bytes], errors: Any) -> str:
    end = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < end and process.poll() is None:
        errors.seek(0)
        if found := _SAID.search(errors.read()):
            return found[1]
        time.sleep(0.05)
    errors.seek(0)
    raise RuntimeError(f"the server did not start: {errors.read()[-2000:]}")
