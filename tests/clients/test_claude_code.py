"""Asks Claude Code, as npm installs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import CLAUDE_CODE  # type: ignore[import-not-found]
from scripts import (  # type: ignore[import-not-found]
    OTHER_WORDS,
    ScriptedServer,
    cancel,
    loop,
    restart,
    run,
    small_server,
    steps,
)

PACKAGE, VERSION = CLAUDE_CODE.name, CLAUDE_CODE.version
claude = CLAUDE_CODE.command


@pytest.fixture
def env(scripted: ScriptedServer, tmp_path: Path) -> dict[str, str]:
    return dict(CLAUDE_CODE.configure(scripted, tmp_path))


def test_a_loop(scripted: ScriptedServer, tmp_path: Path, env: dict[str, str]) -> None:
    """a loop with two tools, of whose prompts only new tokens are computed."""
    steps_of_bash = claude(steps("Bash", "command"), "--allowedTools", "Bash")
    loop((steps_of_bash, claude(OTHER_WORDS)), tmp_path, env, scripted)


def test_cancel(scripted: ScriptedServer, tmp_path: Path, env: dict[str, str]) -> None:
    """a reply that is cancelled."""
    cancel(claude("[[ON one and two and ]]"), tmp_path, env, scripted)


def test_restart(scripted: ScriptedServer, tmp_path: Path, env: dict[str, str]) -> None:
    """a restart of the server in the middle of a session."""
    more = claude("And now? [[SAY Two.]]", "--continue")
    restart((claude("Hello. [[SAY One.]]"), more), tmp_path, env, scripted)


def test_overflow(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> None:
    """a prompt that is too long, which it knows as such."""
    command = claude("Hello.")
    with small_server(tmp_path_factory.mktemp("small")) as server:
        with pytest.raises(AssertionError, match="Prompt is too long"):
            run(command, tmp_path, env | {"ANTHROPIC_BASE_URL": server.url})
