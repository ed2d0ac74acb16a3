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
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest
from scripts import GO_ON, LOOKS, TOO_LONG, ScriptedServer  # type: ignore[import-not-found]

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

Ask = Callable[..., HTTPResponse]
_CHATS = "/api/chat/completions"


@pytest.fixture(scope="module")
def ask(scripted: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    """Start Open WebUI for one user who needs no password, and return a function that asks it."""
    folder = tmp_path_factory.mktemp("open-webui")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    env = {
        "DATA_DIR": str(folder), "WEBUI_AUTH": "False", "WEBUI_SECRET_KEY": "a", "ENABLE_OLLAMA_API": "False",
        "OPENAI_API_BASE_URL": f"{scripted.url}/v1", "OPENAI_API_KEY": "none", "OFFLINE_MODE": "True",
        "RAG_EMBEDDING_ENGINE": "openai", "ENABLE_VERSION_UPDATE_CHECK": "False", "HOME": str(folder),
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}

    def send(path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=_SECONDS)
        return answer

    with (folder / "log.txt").open("w") as out:
        command = [OPEN_WEBUI, "serve", "--host", "127.0.0.1", "--port", str(port)]
        process = subprocess.Popen(command, cwd=folder, env=os.environ | env, stdout=out, stderr=subprocess.STDOUT)
        try:
            end = time.monotonic() + _SECONDS
            while True:
                assert process.poll() is None and time.monotonic() < end, (folder / "log.txt").read_text()[-3000:]
                try:
                    send("/health").close()
                    break
                except (urllib.error.URLError, ConnectionError):
                    time.sleep(0.5)
            token = _read(send("/api/v1/auths/signin", {"email": "", "password": ""}))["token"]
            headers["Authorization"] = f"Bearer {token}"
            yield send
        finally:
            process.terminate()
            process.wait(_SECONDS)


def test_chats(ask: Ask) -> None:
    """models; chats, whole and as a stream."""
    assert "embedded" in [model["id"] for model in _read(ask("/api/models"))["data"]]
    asked = [_user("Hello. [[SAY One and two.]]")]
    assert _chat(ask, asked)["content"] == "One and two."
    with ask(_CHATS, _body(asked, stream=True)) as answer:
        lines = [line.decode() for line in answer if line.startswith(b"data: {")]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
    pieces = [choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert "".join(pieces) == "One and two."


def test_a_loop(ask: Ask, look: Callable[[str], str], looked: list[str]) -> None:
    """a loop with two tools, with a restart of the server in the middle."""
    messages = [_user(LOOKS)]
    while (message := _chat(ask, messages, tools=[_TOOL])).get("tool_calls"):
        messages.append(message)
        for call in message["tool_calls"]:
            seen = look(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": seen})
    assert message["content"] == "All is done." and looked == ["here", "there"]


def test_cancel(ask: Ask, scripted: ScriptedServer) -> None:
    """a cancelled stream."""
    with ask(_CHATS, _body([_user(GO_ON)], stream=True)) as answer:
        answer.readline()
    scripted.wait_until_idle()


def test_overflow(ask: Ask) -> None:
    """a prompt that is too long."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        _chat(ask, [_user(TOO_LONG)])
    assert raised.value.code == 400 and "maximum context length" in raised.value.read().decode()


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _body(messages: list[dict[str, Any]], **more: object) -> dict[str, Any]:
    return {"model": "embedded", "messages": messages, "stream": False, **more}


def _chat(ask: Ask, messages: list[dict[str, Any]], **more: object) -> dict[str, Any]:
    """Return the message of a reply."""
    return dict(_read(ask(_CHATS, _body(messages, **more)))["choices"][0]["message"])


def _read(answer: HTTPResponse) -> Any:
    with answer:
        return json.load(answer)
