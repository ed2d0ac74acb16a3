"""Claude Code, as npm installs it."""

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

PACKAGE, VERSION = "Claude Code", version_of("@anthropic-ai/claude-code")
_QUIET = ("DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC")

Ask = Callable[..., list[str]]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def env(scripted: ScriptedServer, home: Path) -> dict[str, str]:
    models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"), "embedded")
    keys = {"ANTHROPIC_BASE_URL": scripted.url, "ANTHROPIC_API_KEY": "none is needed", "HOME": str(home)}
    return models | keys | dict.fromkeys(_QUIET, "1")


@pytest.fixture
def claude() -> Ask:
    path = str(program("claude"))
    return lambda text, *options: [path, "-p", text, *options]


def test_a_loop(scripted: ScriptedServer, claude: Ask, home: Path, env: dict[str, str]) -> None:
    """a loop with two tools, of whose prompts only new tokens are computed."""
    steps_of_bash = claude(steps("Bash", "command"), "--allowedTools", "Bash")
    loop((steps_of_bash, claude(OTHER_WORDS)), home, env, scripted)


def test_cancel(scripted: ScriptedServer, claude: Ask, home: Path, env: dict[str, str]) -> None:
    """a reply that is cancelled."""
    cancel(claude("[[ON one and two and ]]"), home, env, scripted)


def test_restart(scripted: ScriptedServer, claude: Ask, home: Path, env: dict[str, str]) -> None:
    """a restart of the server in the middle of a session."""
    more = claude("And now? [[SAY Two.]]", "--continue")
    restart((claude("Hello. [[SAY One.]]"), more), home, env, scripted)


def test_overflow(claude: Ask, home: Path, tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> None:
    """a prompt that is too long, which it knows as such."""
    with small_server(tmp_path_factory.mktemp("small")) as server:
        with pytest.raises(AssertionError, match="Prompt is too long"):
            run(claude("Hello."), home, env | {"ANTHROPIC_BASE_URL": server.url})
