"""Asks Codex, as npm installs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import CODEX  # type: ignore[import-not-found]
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

PACKAGE, VERSION = CODEX.name, CODEX.version
codex = CODEX.command


@pytest.fixture
def env(scripted: ScriptedServer, tmp_path: Path) -> dict[str, str]:
    return dict(CODEX.configure(scripted, tmp_path))


def test_a_loop(scripted: ScriptedServer, tmp_path: Path, env: dict[str, str]) -> None:
    """a loop with two tools, of whose prompts only new tokens are computed."""
    loop((codex(steps("exec_command", "cmd")), codex(OTHER_WORDS)), tmp_path, env, scripted)


def test_cancel(scripted: ScriptedServer, tmp_path: Path, env: dict[str, str]) -> None:
    """a reply that is cancelled."""
    cancel(codex("[[ON one and two and ]]"), tmp_path, env, scripted)


def test_restart(scripted: ScriptedServer, tmp_path: Path, env: dict[str, str]) -> None:
    """a restart of the server in the middle of a session."""
    more = codex("resume", "--last", "And now? [[SAY Two.]]")
    restart((codex("Hello. [[SAY One.]]"), more), tmp_path, env, scripted)


def test_overflow(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """a prompt that is too long, which it knows as such."""
    command = codex("Hello.")
    with small_server(tmp_path_factory.mktemp("small")) as server:
        with pytest.raises(AssertionError, match="ran out of room in the model's context window"):
            run(command, tmp_path, CODEX.configure(server, tmp_path))
