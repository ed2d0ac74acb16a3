"""`hybrid-memory serve` checks who may listen where and what is missing, and runs from its start to a signal."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import openai
import pytest
from typer.testing import CliRunner

from hybridmem.chat.cli import app
from hybridmem.chat.server import ServerOptions, bind
from hybridmem.memory import SpecError
from hybridmem.models import EMBEDDED


def assert_one_line_error(arguments: list[str], *words: str, **environment: str) -> None:
    result = CliRunner().invoke(app, ["serve", *arguments], env=environment)
    assert (result.exit_code, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith("error: ")
    for word in words:
        assert word in result.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_others_may_connect_only_with_a_key(host: str) -> None:
    assert_one_line_error(["--host", host, "--port", "0"], host, "HYBRID_MEMORY_API_KEY")
    with pytest.raises(SpecError, match="API key"):
        bind(host, 0, has_key=False)
    if host == "0.0.0.0":
        bind(host, 0, has_key=True).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
def test_this_machine_needs_no_key(host: str) -> None:
    with bind(host, 0, has_key=False) as listener:
        assert listener.getsockname()[1] > 0


def test_what_is_sent_waits_for_no_acknowledgement() -> None:
    """Otherwise each event of a stream would wait until the client acknowledges the one before.

    That takes 40 ms if the client has nothing to say.
    """
    with bind("127.0.0.1", 0, has_key=False) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("option", ["--prefixes", "--sessions", "--swap-dir"])
def test_a_file_is_no_folder(option: str, tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.touch()
    assert_one_line_error([option, str(place)], "is a file; give the path of a folder")


def test_what_cannot_be_listened_on_is_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert_one_line_error(["--port", str(other.getsockname()[1])], "port", "choose another")
    assert_one_line_error(["--host", "nowhere.invalid"], "nowhere.invalid")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--max-body", "much"], "--max-body='much'"),
        (["--budget", "1KiB"], "budget"),
        (["--api-key", " "], "API key"),
        (["--allowed-host", "http://a.example"], "http://a.example"),
        (["--allowed-origin", "https://a.example", "--allowed-origin", "a.example/"], "a.example/"),
        (["--step-tokens", "8", "--max-running", "8"], "step_tokens"),
        (["--model", "/nowhere/at/all"], "nowhere"),
    ],
)
def test_what_cannot_work_is_one_line(arguments: list[str], word: str) -> None:
    assert_one_line_error(["--port", "0", *arguments], word)


def test_the_key_may_be_in_the_environment() -> None:
    assert_one_line_error(
        ["--host", "0.0.0.0", "--port", "0", "--model", "/nowhere/at/all"], "nowhere", HYBRID_MEMORY_API_KEY="secret"
    )


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        "hybridmem.chat.commands.start.find_spec", lambda name: None if name == "uvicorn" else find_spec(name)
    )
    assert_one_line_error([], "uvicorn", "pip install", "hybridmem[server]")


@pytest.mark.parametrize(
    ("name", "value"),
    [("api_key", ""), ("max_body_bytes", 0), ("max_tokens", 1), ("max_requests", True), ("grace_seconds", -1)],
)
def test_options_that_cannot_work(name: str, value: object) -> None:
    with pytest.raises(SpecError, match="key" if name == "api_key" else name):
        ServerOptions(**{name: value})  # type: ignore[arg-type]


def test_a_model_without_a_chat_template_is_told_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that chats is not: its server says one line, where it listens."""
    bare = tmp_path / "bare"
    shutil.copytree(EMBEDDED, bare, ignore=shutil.ignore_patterns("chat_template.jinja", "draft_head"))
    monkeypatch.setattr("hybridmem.chat.server.run", lambda app, listener, announce: announce("http://there"))
    told = {}
    for model in ("embedded", str(bare)):
        result = CliRunner().invoke(app, ["serve", "--model", model, "--port", "0", "--budget", "8MiB"])
        assert result.exit_code == 0, result.output
        told[model] = result.stderr.splitlines()
    first, last = told[str(bare)]
    assert first.startswith("bare has no chat template, so it only continues texts: /v1/completions, ")
    assert last.startswith("bare answers at ") and [line[:20] for line in told["embedded"]] == ["embedded answers at "]


def test_from_start_to_signal(tmp_path: Path) -> None:
    """The real command runs.

    Its line on stderr says where it listens, it asks for the key, and SIGTERM ends it without an error.
    """
    program = [sys.executable, "-c", "from hybridmem.chat.cli import app; app()"]
    command = [
        *program,
        "serve",
        "--port",
        "0",
        "--budget",
        "32MiB",
        "--swap-dir",
        str(tmp_path / "swap"),
        "--host-budget",
        "1MiB",
        "--prefixes",
        str(tmp_path / "prefixes"),
    ]
    environment = os.environ | {"HYBRID_MEMORY_API_KEY": "secret", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        killer = threading.Timer(600, process.kill)
        killer.start()
        try:
            assert process.stderr is not None
            line = next(line for line in process.stderr if " answers at " in line)
            url = re.search(r"http://127\.0\.0\.1:\d+/v1", line)
            assert url is not None and line.startswith("embedded")
            with openai.OpenAI(base_url=url[0], api_key="secret", max_retries=0) as client:
                reply = client.chat.completions.create(
                    model="embedded", messages=[{"role": "user", "content": "My cat is called Zoe."}], temperature=0
                )
            assert reply.choices[0].message.content == "Okay, noted."
            with (
                openai.OpenAI(base_url=url[0], api_key="wrong", max_retries=0) as stranger,
                pytest.raises(openai.AuthenticationError),
            ):
                stranger.models.list()
            process.send_signal(signal.SIGTERM)
            assert "Traceback" not in process.stderr.read()
            assert process.wait() == -signal.SIGTERM
            assert (tmp_path / "prefixes" / "checkpoints.safetensors").exists()
        finally:
            killer.cancel()
            process.kill()
