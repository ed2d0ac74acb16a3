"""Asks opencode, as npm installs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import OPENCODE, tight  # type: ignore[import-not-found]
from scripts import LONG, OTHER_WORDS, ScriptedServer, cancel, restart, run, steps  # type: ignore[import-not-found]

PACKAGE, VERSION = OPENCODE.name, OPENCODE.version


def test_a_loop(scripted: ScriptedServer, tmp_path: Path) -> None:
    """a loop with two tools, of whose prompts only new tokens are computed."""
    command, env = OPENCODE.command(steps("bash", "command")), OPENCODE.configure(scripted, tmp_path)
    n_before = len(scripted.requests())
    assert "All is done." in run(command, tmp_path, env)
    loop = scripted.requests()[n_before:]
    assert len(loop) >= 3 and all(each["prompt_tokens"] - each["cached_tokens"] < 500 for each in loop[-2:])
    # Another session with other words computes nearly nothing of its main prompt again.
    n_before = len(scripted.requests())
    run(OPENCODE.command(OTHER_WORDS), tmp_path, env)
    main = max(scripted.requests()[n_before:], key=lambda each: each["prompt_tokens"])
    assert main["prompt_tokens"] - main["cached_tokens"] <= 0.02 * main["prompt_tokens"]


def test_cancel(scripted: ScriptedServer, tmp_path: Path) -> None:
    """a reply that is cancelled."""
    cancel(OPENCODE.command("[[ON one and two and ]]"), tmp_path, OPENCODE.configure(scripted, tmp_path), scripted)


def test_restart(scripted: ScriptedServer, tmp_path: Path) -> None:
    """a restart of the server in the middle of a session."""
    more = OPENCODE.command("--continue", "And now? [[SAY Two.]]")
    env = OPENCODE.configure(scripted, tmp_path)
    restart((OPENCODE.command("Hello. [[SAY One.]]"), more), tmp_path, env, scripted)


def test_overflow(scripted: ScriptedServer, tmp_path_factory: pytest.TempPathFactory) -> None:
    """a session that becomes too long, which it summarises and continues."""
    with tight(OPENCODE, 4000, scripted, tmp_path_factory) as tried:
        assert tried.ask(LONG) == "Okay, noted." and not tried.server.n_refused()
        with pytest.raises(AssertionError, match="maximum context length"):  # It says so, and continues nevertheless.
            tried.ask("--continue", LONG)
        assert tried.ask("--continue", "And now? [[SAY Two.]]") == "Two." and tried.server.n_refused() == 1
