"""Codex, as npm installs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import ScriptedServer, cancel, program, run, steps, version_of  # type: ignore[import-not-found]

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
    n_before = len(scripted.requests())
    assert run(codex(steps("exec_command", "cmd")), home, env).strip() == "All is done."
    loop = scripted.requests()[n_before:]
    assert len(loop) >= 3 and all(each["prompt_tokens"] - each["cached_tokens"] < 500 for each in loop[-2:])
    # Another session with other words computes nearly nothing again.
    run(codex("My dog is called Rex, and I have a horse as well."), home, env)
    last = scripted.requests()[-1]
    assert last["prompt_tokens"] - last["cached_tokens"] <= 0.02 * last["prompt_tokens"]


def test_cancel(scripted: ScriptedServer, codex: Ask, home: Path, env: dict[str, str]) -> None:
    """a reply that is cancelled."""
    cancel(codex("[[ON one and two and ]]"), home, env, scripted)


def test_restart(scripted: ScriptedServer, codex: Ask, home: Path, env: dict[str, str]) -> None:
    """a restart of the server in the middle of a session."""
    assert run(codex("Hello. [[SAY One.]]"), home, env).strip() == "One."
    scripted.stop()
    scripted.start()
    assert run(codex("resume", "--last", "And now? [[SAY Two.]]"), home, env).strip() == "Two."
    (again, *_) = scripted.requests()
    assert again["cached_tokens"] > 0.98 * again["prompt_tokens"]


def test_overflow(codex: Ask, home: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """a prompt that is too long, which it knows as such."""
    server = ScriptedServer(tmp_path_factory.mktemp("small"), options=("--max-tokens", "4096"))
    server.start()
    try:
        with pytest.raises(AssertionError, match="ran out of room in the model's context window"):
            run(codex("Hello."), home, configured(home / "small", server))
    finally:
        server.stop()
