"""Starts the server with prescribed replies, and programs of other projects that npm installs.

    npm install --prefix .node-clients @anthropic-ai/claude-code @openai/codex opencode-ai @qwen-code/qwen-code \\
        @mariozechner/pi-coding-agent ai @ai-sdk/openai-compatible openai zod

`NODE_CLIENTS` names another folder. Programs that are not there are skipped by name.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
NODE = Path(os.environ.get("NODE_CLIENTS", ROOT / ".node-clients"))
_SECONDS = 300
_SECONDS_TO_CANCEL = 60
OTHER_WORDS = "My dog is called Rex, and I have a horse as well."
"""A session that asks for nothing, and whose prompt begins like every other one."""


def environment() -> dict[str, str]:
    """Return the environment of a server. The server refuses variables that name no option of it."""
    return {name: value for name, value in os.environ.items() if name != "HYBRID_MEMORY_PYTHON"}


def program(name: str) -> Path:
    """Return the program of this name. The test is skipped if it is not installed."""
    path = NODE / "node_modules" / ".bin" / name
    if not path.exists():
        pytest.skip(f"{name} is not in {NODE}: see tests/clients/scripts.py")
    return path


def version_of(package: str) -> str:
    path = NODE / "node_modules" / package / "package.json"
    return str(json.loads(path.read_text())["version"]) if path.exists() else ""


LOOKS = (
    "Do it. "
    + " ".join(f'[[CALL {{"name": "look", "arguments": {{"where": "{where}"}}}}]]' for where in ("here", "there"))
    + " [[SAY All is done.]]"
)
"""A user's message after which the tool "look" is called twice, and then something is said."""
GO_ON = "Go on. [[ON one and two and ]]"
"""A user's message after which something is said without an end."""
TOO_LONG = "cat " * 200_000
"""A user's message that is longer than any context."""
LONG = "a cat and a dog " * 500
"""A user's message of some 2,500 tokens."""


def steps(tool: str, argument: str, **more: object) -> str:
    """Return a user's message after which two tools are called, and then something is said."""
    commands = [{argument: f"echo {word}-$((40 + 2))", **more} for word in ("one", "two")]
    calls = [{"name": tool, "arguments": arguments} for arguments in commands]
    return "Do it. " + " ".join(f"[[CALL {json.dumps(call)}]]" for call in calls) + " [[SAY All is done.]]"


@dataclass
class ScriptedServer:
    """Runs the server of `scripted.py`, which may be stopped and started again at the same port.

    Attributes:
        folder: holds the model, the log, and the prefixes that outlive a restart.
    """

    folder: Path
    port: int = 0
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if not self.port:
            with socket.create_server(("127.0.0.1", 0)) as taken:
                self.port = taken.getsockname()[1]
        python = os.environ.get("HYBRID_MEMORY_PYTHON", str(ROOT / ".venv" / "bin" / "python"))
        command = [python, str(Path(__file__).parent / "scripted.py"), str(self.folder / "model"), *self.options]
        command += ["--port", str(self.port), "--budget", "1GiB", "--alias", "claude-*", "--alias", "embedded"]
        command += ["--access-log", "json", "--prefixes", str(self.folder / "prefixes"), "--prefix-bytes", "1GiB"]
        log = self.folder / "log.txt"
        with log.open("w") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=environment())
        end = time.monotonic() + _SECONDS
        while "answers at" not in log.read_text():
            assert self.process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait(_SECONDS)

    def restart(self) -> None:
        self.stop()
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def requests(self) -> list[dict[str, int]]:
        """Return the requests so far that had a prompt, by the access log: their tokens, and those that were cached."""
        lines = (self.folder / "log.txt").read_text().split("\n")
        found = [json.loads(line) for line in lines if line.startswith("{") and "prompt_tokens" in line]
        return [{name: each[name] for name in ("status", "prompt_tokens", "cached_tokens")} for each in found]

    def n_refused(self) -> int:
        """Return the number of requests so far that were errors of the client."""
        return (self.folder / "log.txt").read_text().count('"status":400')

    def prompts(self) -> list[list[int]]:
        """Return the tokens of all prompts so far whose replies have begun."""
        written = self.folder / "model" / "prompts.jsonl"
        return [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []

    def wait_until_idle(self) -> None:
        """Wait until no generation is in progress. A reply to `GO_ON` goes on for longer than this waits."""
        end = time.monotonic() + _SECONDS_TO_CANCEL
        while self._n_generations():
            assert time.monotonic() < end, "a generation goes on"
            time.sleep(0.1)

    def wait_until_busy(self) -> None:
        end = time.monotonic() + _SECONDS
        while not self._n_generations():
            assert time.monotonic() < end, "no generation has begun"
            time.sleep(0.1)

    def _n_generations(self) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            found = re.findall(r"^hybrid_memory_generations\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert len(found) == 3
        return sum(map(float, found))


def run(command: list[str], folder: Path, env: dict[str, str]) -> str:
    """Return what a program prints. It must not fail."""
    done = subprocess.run(
        command, cwd=folder, env=os.environ | env | {"PWD": str(folder)}, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_script(name: str, package: str, server: ScriptedServer) -> str:
    """Return what a script for Node prints, which imports packages of `NODE`.

    The script gets the server's URL, `LOOKS` as `TEXT`, and `CONTROL`, an URL at which /restart restarts the server and
    /idle waits until no generation is in progress.
    """
    node = shutil.which("node")
    if node is None or not version_of(package):
        pytest.skip(f"node or {package} is not there: see tests/clients/scripts.py")
    source = (Path(__file__).parent / name).read_text()

    class Control(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            {"/restart": server.restart, "/idle": server.wait_until_idle}[self.path]()
            self.send_response(204)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Control) as control:
        threading.Thread(target=control.serve_forever).start()
        env = {"URL": f"{server.url}/v1", "TEXT": LOOKS, "CONTROL": f"http://127.0.0.1:{control.server_port}"}
        try:
            return run([node, "--input-type=module", "-e", source], NODE, env)
        finally:
            control.shutdown()


def cancel_task(asking: Coroutine[Any, Any, object], server: ScriptedServer) -> None:
    """Cancel a task of asyncio while the server writes the reply that it waits for. Then no generation is left."""

    async def run_and_cancel() -> None:
        task = asyncio.create_task(asking)
        await asyncio.to_thread(server.wait_until_busy)
        assert task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    server.wait_until_idle()
    asyncio.run(run_and_cancel())
    server.wait_until_idle()


def cancel(command: list[str], folder: Path, env: dict[str, str], server: ScriptedServer) -> None:
    """Start a program, and end it while the server writes its reply. Then no generation of it is left."""
    server.wait_until_idle()
    with subprocess.Popen(
        command, cwd=folder, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    ) as begun:  # fmt: skip
        server.wait_until_busy()
        time.sleep(1)
        os.killpg(begun.pid, signal.SIGKILL)  # Codex is a program that starts another one.
    server.wait_until_idle()


def loop(commands: tuple[list[str], list[str]], folder: Path, env: dict[str, str], server: ScriptedServer) -> None:
    """Run a session in which tools are called, and one with other words. Only the new tokens of prompts are computed.

    Args:
        commands: the agent with the script of `steps`, and the agent with a text that asks for nothing.
    """
    n_before = len(server.requests())
    assert run(commands[0], folder, env).strip() == "All is done."
    requests = server.requests()[n_before:]
    assert len(requests) >= 3 and all(each["prompt_tokens"] - each["cached_tokens"] < 500 for each in requests[-2:])
    run(commands[1], folder, env)
    last = server.requests()[-1]
    assert last["prompt_tokens"] - last["cached_tokens"] <= 0.02 * last["prompt_tokens"]


def restart(commands: tuple[list[str], list[str]], folder: Path, env: dict[str, str], server: ScriptedServer) -> None:
    """Continue a session after a restart of the server, which then computes nearly nothing again.

    Args:
        commands: the agent that is to reply "One.", and the same session that is to reply "Two.".
    """
    assert run(commands[0], folder, env).strip().endswith("One.")
    server.restart()
    assert run(commands[1], folder, env).strip().endswith("Two.")
    again = max(server.requests(), key=lambda each: each["prompt_tokens"])
    assert again["cached_tokens"] > 0.98 * again["prompt_tokens"]


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[ScriptedServer]:
    """Serve inside a `with` block, with options of the server. The server has seen no prompts before."""
    server = ScriptedServer(folder, options=options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def small_server(folder: Path) -> AbstractContextManager[ScriptedServer]:
    """Serve contexts of 4,096 tokens, into which no prompt of an agent fits."""
    return serving(folder, "--max-tokens", "4096")
