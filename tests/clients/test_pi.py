"""pi, as npm installs it, works with this server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripts import OTHER_WORDS, ScriptedServer, cancel, program, restart, run, steps, version_of  # type: ignore[import-not-found]

PACKAGE, VERSION = "pi", version_of("@mariozechner/pi-coding-agent")
_OFFLINE = {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1"}


@pytest.fixture
def pi(scripted: ScriptedServer, tmp_path: Path) -> list[str]:
    configure(tmp_path, scripted)
    return [str(program("pi")), "--provider", "ours", "--model", "embedded", "-p"]


def configure(home: Path, server: ScriptedServer) -> None:
    model = {"id": "embedded", "contextWindow": 131_072, "maxTokens": 8192}
    ours = {"baseUrl": f"{server.url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
    (home / ".pi" / "agent").mkdir(parents=True)
    (home / ".pi" / "agent" / "models.json").write_text(json.dumps({"providers": {"ours": ours}}))


def test_a_loop(scripted: ScriptedServer, pi: list[str], tmp_path: Path) -> None:
    """a loop with two tools, of whose prompts only new tokens are computed."""
    n_before = len(scripted.requests())
    env = {"HOME": str(tmp_path), **_OFFLINE}
    assert run([*pi, steps("bash", "command")], tmp_path, env).strip() == "All is done."
    loop = scripted.requests()[n_before:]
    assert len(loop) == 3 and all(each["prompt_tokens"] - each["cached_tokens"] < 500 for each in loop[-2:])
    # Another session with other words computes nearly nothing again. The first one's words are longer than the rollback
    # window, so a checkpoint of up to 512 tokens before them counts.
    run([*pi, OTHER_WORDS], tmp_path, env)
    last = scripted.requests()[-1]
    assert last["prompt_tokens"] - last["cached_tokens"] <= 0.03 * last["prompt_tokens"]


def test_cancel(scripted: ScriptedServer, pi: list[str], tmp_path: Path) -> None:
    """a reply that is cancelled."""
    cancel([*pi, "[[ON one and two and ]]"], tmp_path, {"HOME": str(tmp_path), **_OFFLINE}, scripted)


def test_restart(scripted: ScriptedServer, pi: list[str], tmp_path: Path) -> None:
    """a restart of the server in the middle of a session."""
    env = {"HOME": str(tmp_path), **_OFFLINE}
    commands = [*pi, "Hello. [[SAY One.]]"], [*pi, "--continue", "And now? [[SAY Two.]]"]
    restart(commands, tmp_path, env, scripted)
