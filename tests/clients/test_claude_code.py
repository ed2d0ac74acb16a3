"""Claude Code, as npm installs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import ScriptedServer, cancel, program, run, steps, version_of  # type: ignore[import-not-found]

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
    n_before = len(scripted.requests())
    done = run(claude(steps("Bash", "command"), "--allowedTools", "Bash"), home, env)
    assert done.strip() == "All is done."
    loop = scripted.requests()[n_before:]
    assert len(loop) >= 3 and all(each["prompt_tokens"] - each["cached_tokens"] < 500 for each in loop[-2:])
    # Another session with other words computes nearly nothing again.
    run(claude("My dog is called Rex, and I have a horse as well."), home, env)
    last = scripted.requests()[-1]
    assert last["prompt_tokens"] - last["cached_tokens"] <= 0.02 * last["prompt_tokens"]


def test_cancel(scripted: ScriptedServer, claude: Ask, home: Path, env: dict[str, str]) -> None:
    """a reply that is cancelled."""
    cancel(claude("[[ON one and two and ]]"), home, env, scripted)


def test_restart(scripted: ScriptedServer, claude: Ask, home: Path, env: dict[str, str]) -> None:
    """a restart of the server in the middle of a session."""
    assert run(claude("Hello. [[SAY One.]]"), home, env).strip() == "One."
    scripted.stop()
    scripted.start()
    assert run(claude("And now? [[SAY Two.]]", "--continue"), home, env).strip() == "Two."
    (again, *_) = scripted.requests()
    assert again["cached_tokens"] > 0.98 * again["prompt_tokens"]


def test_overflow(claude: Ask, home: Path, tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> None:
    """a prompt that is too long, which it knows as such."""
    server = ScriptedServer(tmp_path_factory.mktemp("small"), options=("--max-tokens", "4096"))
    server.start()
    try:
        with pytest.raises(AssertionError, match="Prompt is too long"):
            run(claude("Hello."), home, env | {"ANTHROPIC_BASE_URL": server.url})
    finally:
        server.stop()
