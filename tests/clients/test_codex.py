"""Codex, as npm installs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import (  # type: ignore[import-not-found]
    OTHER_WORDS,
    ScriptedServer,
    cancel,
    loop,
    program,
    restart,
    run,
    small_server,
    steps,
    version_of,
)

PACKAGE, VERSION = "Codex", version_of("@openai/codex")
CONFIG = """
model = "embedded"
model_provider = "ours"
approval_policy = "never"
[model_providers.ours]
name = "ours"
base_url = "{url}/v1"
wire_api = "responses"
[analytics]
enabled = false
"""
_ALONE = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")

Ask = Callable[..., list[str]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def env(scripted: ScriptedServer, home: Path) -> dict[str, str]:
    return configured(home / "codex", scripted)


def configured(folder: Path, server: ScriptedServer) -> dict[str, str]:
    folder.mkdir()
    (folder / "config.toml").write_text(CONFIG.format(url=server.url))
    return {"CODEX_HOME": str(folder)}


@pytest.fixture
def codex() -> Ask:
    path = str(program("codex"))
    return lambda *words: [path, "exec", *_ALONE, *words]


def test_a_loop(scripted: ScriptedServer, codex: Ask, home: Path, env: dict[str, str]) -> None:
    """a loop with two tools, of whose prompts only new tokens are computed."""
    loop((codex(steps("exec_command", "cmd")), codex(OTHER_WORDS)), home, env, scripted)


def test_cancel(scripted: ScriptedServer, codex: Ask, home: Path, env: dict[str, str]) -> None:
    """a reply that is cancelled."""
    cancel(codex("[[ON one and two and ]]"), home, env, scripted)


def test_restart(scripted: ScriptedServer, codex: Ask, home: Path, env: dict[str, str]) -> None:
    """a restart of the server in the middle of a session."""
    more = codex("resume", "--last", "And now? [[SAY Two.]]")
    restart((codex("Hello. [[SAY One.]]"), more), home, env, scripted)


def test_overflow(codex: Ask, home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """a prompt that is too long, which it knows as such."""
    with small_server(tmp_path_factory.mktemp("small")) as server:
        with pytest.raises(AssertionError, match="ran out of room in the model's context window"):
            run(codex("Hello."), home, configured(home / "small", server))
