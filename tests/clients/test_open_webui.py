"""Asks Open WebUI by its own API, which asks the server as its page does.

It brings a browser's page, databases and models of its own, some gigabytes, so it runs where the variable `OPEN_WEBUI`
names its program.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scripts import LOOKS, ScriptedServer  # type: ignore[import-not-found]

OPEN_WEBUI = os.environ.get("OPEN_WEBUI", "")


def _version() -> str:
    if not OPEN_WEBUI:
        return ""
    (about,) = Path(OPEN_WEBUI).parents[1].glob("lib/*/site-packages/open_webui-*")
    return about.name.split("-")[1].removesuffix(".dist")


PACKAGE, VERSION = "Open WebUI", _version()
pytestmark = pytest.mark.skipif(not OPEN_WEBUI, reason="OPEN_WEBUI names no program")
_SECONDS = 240
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]},
    },
}

Ask = Callable[..., str]


@pytest.fixture
def ask(scripted: ScriptedServer, tmp_path: Path) -> Iterator[Ask]:
    """Start Open WebUI for one user who needs no password, and return a function that asks it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    env = {
        "DATA_DIR": str(tmp_path), "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "a", "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URL": f"{scripted.url}/v1", "OPENAI_API_KEY": "none", "OFFLINE_MODE": "True",
        "RAG_EMBEDDING_ENGINE": "openai", "ENABLE_VERSION_UPDATE_CHECK": "False", "HOME": str(tmp_path),
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}

    def send(path: str, body: dict[str, Any] | None = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            return str(answer.read().decode())

    with (tmp_path / "log.txt").open("w") as out:
        command = [OPEN_WEBUI, "serve", "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | env, stdout=out, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + _SECONDS
            while True:
                assert process.poll() is None and time.monotonic() < end, (tmp_path / "log.txt").read_text()[-3000:]
                try:
                    send("/health")
                    break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(0.5)
            token = json.loads(send("/api/v1/auths/signin", {"email": "", "password": ""}))["token"]
            headers["Authorization"] = f"Bearer {token}"
            yield send
        finally:
            process.terminate()
            process.wait(_SECONDS)


def test_open_webui(ask: Ask) -> None:
    """models; chats, whole and as a stream; a loop with two tools."""
    assert "embedded" in [model["id"] for model in json.loads(ask("/api/models"))["data"]]
    said = {"model": "embedded", "messages": [{"role": "user", "content": "Hello. [[SAY One and two.]]"}]}
    path = "/api/chat/completions"
    assert json.loads(ask(path, said | {"stream": False}))["choices"][0]["message"]["content"] == "One and two."
    lines = [line for line in ask(path, said | {"stream": True}).split("\n") if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == "One and two."
    messages, looked = [{"role": "user", "content": LOOKS}], []
    while True:
        asked = {"model": "embedded", "messages": messages, "tools": [_TOOL], "stream": False}
        message = json.loads(ask(path, asked))["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            break
        for call in message["tool_calls"]:
            looked.append(json.loads(call["function"]["arguments"])["where"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a dog"})
    assert message["content"] == "All is done." and looked == ["here", "there"]
