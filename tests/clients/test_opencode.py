"""Asks opencode, as npm installs it."""

from __future__ import annotations

from pathlib import Path

from programs import OPENCODE  # type: ignore[import-not-found]
from scripts import OTHER_WORDS, ScriptedServer, cancel, restart, run, steps  # type: ignore[import-not-found]

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
