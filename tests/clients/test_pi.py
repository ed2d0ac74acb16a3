"""Asks pi, as npm installs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import PI, tight  # type: ignore[import-not-found]
from scripts import LONG, OTHER_WORDS, ScriptedServer, cancel, restart, run, steps  # type: ignore[import-not-found]

PACKAGE, VERSION = PI.name, PI.version
pi = PI.command


@pytest.fixture
def env(scripted: ScriptedServer, tmp_path: Path) -> dict[str, str]:
    return dict(PI.configure(scripted, tmp_path))


def test_a_loop(scripted: ScriptedServer, tmp_path: Path, env: dict[str, str]) -> None:
    """a loop with two tools, of whose prompts only new tokens are computed."""
    n_before = len(scripted.requests())
    assert run(pi(steps("bash", "command")), tmp_path, env).strip() == "All is done."
    loop = scripted.requests()[n_before:]
    assert len(loop) == 3 and all(each["prompt_tokens"] - each["cached_tokens"] < 500 for each in loop[-2:])
    # Another session with other words computes nearly nothing again. The first one's words are longer than the rollback
    # window, so a checkpoint of up to 512 tokens before them counts.
    run(pi(OTHER_WORDS), tmp_path, env)
    last = scripted.requests()[-1]
    assert last["prompt_tokens"] - last["cached_tokens"] <= 0.03 * last["prompt_tokens"]


def test_cancel(scripted: ScriptedServer, tmp_path: Path, env: dict[str, str]) -> None:
    """a reply that is cancelled."""
    cancel(pi("[[ON one and two and ]]"), tmp_path, env, scripted)


def test_restart(scripted: ScriptedServer, tmp_path: Path, env: dict[str, str]) -> None:
    """a restart of the server in the middle of a session."""
    restart((pi("Hello. [[SAY One.]]"), pi("--continue", "And now? [[SAY Two.]]")), tmp_path, env, scripted)


def test_overflow(scripted: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    """a session that becomes too long, which it summarises and continues."""
    with tight(PI, 4000, scripted, tmp_path_factory) as tried:
        # By default it keeps the last 20,000 tokens, which is more than this context.
        settings = json.dumps({"compaction": {"keepRecentTokens": 1000}})
        (tried.home / ".pi" / "agent" / "settings.json").write_text(settings)
        assert tried.ask(LONG) == "Okay, noted." and not tried.server.n_refused()
        tried.ask("--continue", LONG)  # With -p, it does not print a reply that it has asked for twice.
        assert tried.ask("--continue", "And now? [[SAY Two.]]") == "Two." and tried.server.n_refused() == 1
